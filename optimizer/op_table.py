"""What is kept and recomputed, value by value; layers that do the same are folded into one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from placemat.explain import fate
from placemat.labels import location, shape_text
from placemat.summary import align, block_of, next_block
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.decisions import Decision
    from placemat.plan import Plan

HEADER = ("op", "shape", "bytes", "fate", "ms a run", "module", "source")
LEFT = frozenset({0, 1, 3, 5, 6})


def op_table(plan: Plan, max_rows: int | None = None) -> str:
    """The text of `Plan.table`."""
    rows: list[tuple[str, ...]] = []
    for label, count, block_rows in folded_blocks(plan.decisions):
        rows.append((f"{label} (x{count})" if count > 1 else label, *[""] * (len(HEADER) - 1)))
        rows.extend(block_rows)
    shown = rows if max_rows is None else rows[:max_rows]
    lines = [align([HEADER, *shown], LEFT)]
    if len(shown) < len(rows):
        lines.append(f"... {len(rows) - len(shown)} more rows: plan.table()")
    return "\n".join([*lines, *totals(plan)])


def totals(plan: Plan) -> list[str]:
    """Sums over all decisions, not over rows: a folded row stands for several."""
    kept = [d.bytes for d in plan.decisions if d.kept]
    again = [d.bytes for d in plan.decisions if d.recomputed]
    freed = [d.bytes for d in plan.decisions if not d.kept and not d.recomputed]
    return [
        f"kept        {len(kept)} values, {format_bytes(sum(kept))}",
        f"recomputed  {len(again)} values, {format_bytes(sum(again))}, {plan.recompute_seconds * 1e3:.4g} ms a step",
        f"freed       {len(freed)} values, {format_bytes(sum(freed))}, that nobody needs again (not listed)",
    ]


def folded_blocks(decisions: Iterable[Decision]) -> list[tuple[str, int, list[tuple[str, ...]]]]:
    """(label, number of layers, rows) with runs of consecutive layers that do the same as one: ("h.3-h.11", 9, ...)."""
    listed = [d for d in decisions if d.kept or d.recomputed]
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for block, group in groupby(listed, block_of):
        blocks.setdefault(block, []).extend(_rows(group, block))
    folded: list[tuple[str, str, int, list[tuple[str, ...]]]] = []
    for block, rows in blocks.items():
        if folded and block == next_block(folded[-1][1]) and rows == folded[-1][3]:
            first, _, count, same = folded[-1]
            folded[-1] = (first, block, count + 1, same)
        else:
            folded.append((block, block, 1, rows))
    return [(first if first == last else f"{first}-{last}", count, rows) for first, last, count, rows in folded]


def _rows(decisions: Iterable[Decision], block: str) -> list[tuple[str, ...]]:
    """Cells of `HEADER`; equal neighbours are one row with their number."""
    rows = []
    for row, equal in groupby(_row(d, block) for d in decisions):
        count = sum(1 for _ in equal)
        rows.append((f"{row[0]} x{count}" if count > 1 else row[0], *row[1:]))
    return rows


def _row(decision: Decision, block: str) -> tuple[str, ...]:
    """The module is relative to the block, so that equal layers have equal rows."""
    inside = decision.module_path.removeprefix(block).lstrip(".")
    return (
        "  " + decision.target.removesuffix(".default"),
        shape_text(decision.shape, decision.dtype),
        format_bytes(decision.bytes),
        fate(decision),
        f"{decision.recompute_s * 1e3:.3g}",
        f".{inside}" if inside else "",
        "/".join(location(decision.source).split("/")[-2:]),
    )
