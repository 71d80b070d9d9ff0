"""A plan as text: what it costs, what binds, and which modules keep and recompute what."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placemat.labels import HANDING_OUT, short_source
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.decisions import Decision
    from placemat.plan import Plan

BUDGET_SENTENCE = (
    "The budget bounds the peak bytes of live tensor storage on the model's device during one training step (forward, "
    "loss, backward): parameters, buffers, inputs, gradients, outputs, activations, temporaries and what you reserve."
)
_MAX_MODULES = 40
_NUMBER = re.compile(r"\d+")
# The rest of the categories of `Plan.breakdown` speak for themselves.
_CATEGORY_NOTES = {
    "outputs": "with their gradients",
    "mutations": "new contents of buffers and inputs",
    "temporaries": "outputs and workspace of the running op, gradients in flight",
    "reserved": "declared by you",
}


def summarize(plan: Plan) -> str:
    """The text of `Plan.summary`."""
    blocks = [
        BUDGET_SENTENCE,
        align(limit_rows(plan), frozenset({0, 2})),
        f"{align(peak_rows(plan), frozenset({0, 3}))}\n{peak_place(plan)}",
        align(cost_rows(plan), frozenset({0, 1})),
        _modules(plan.decisions),
    ]
    if plan.runs_original:
        blocks.insert(1, ample(plan))
    if plan.notes:
        blocks.append("\n".join(["notes", *(f"- {note}" for note in plan.notes)]))
    return "\n\n".join(blocks)


def ample(plan: Plan) -> str:
    """What is to know of a plan with `runs_original`."""
    bound = "" if plan.eager_bound_bytes is None else f", which needs at most {format_bytes(plan.eager_bound_bytes)}"
    return f"The budget is ample: the module runs its original forward{bound}. The schedule below is not used."


def align(rows: Iterable[Sequence[str]], left: frozenset[int] = frozenset({0})) -> str:
    """A table of text; columns are to the right but for those in `left`."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def limit_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Floor, peak, budget and the peak of keeping everything."""
    below = f"below {format_bytes(plan.floor_bound_bytes)} there is none"
    proof = "proven for the solved family" if plan.floor_proven else f"smallest peak that was found, {below}"
    headroom = plan.budget_bytes - plan.predicted_peak_bytes
    room = f"{format_bytes(abs(headroom))} {'below' if headroom >= 0 else 'ABOVE'} the budget"
    asked = " but what recompute= asks for" if plan.options.get("recompute") else ""
    return [
        ("floor", format_bytes(plan.floor_bytes), proof),
        ("predicted peak", format_bytes(plan.predicted_peak_bytes), room),
        ("budget", format_bytes(plan.budget_bytes), ""),
        (
            "keep everything",
            format_bytes(plan.keep_everything_bytes),
            f"peak of planned code without recomputation{asked}; eager's may differ",
        ),
    ]


def peak_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A header, the categories at the peak, their total."""
    rows: list[tuple[str, ...]] = [("at the peak", "bytes", "share", "")]
    for category, num_bytes in plan.breakdown.items():
        if num_bytes:
            share = f"{num_bytes / plan.predicted_peak_bytes:.1%}"
            rows.append((category, format_bytes(num_bytes), share, _CATEGORY_NOTES.get(category, "")))
    rows.append(("total", format_bytes(plan.predicted_peak_bytes), "", ""))
    return rows


def peak_place(plan: Plan) -> str:
    """The op that binds."""
    return f"reached at {plan.peak_op}: {short_source(plan.peak_source) or 'no source line'}"


def cost_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Overhead and bound, and where the figures come from."""
    extra_ms, step_ms = plan.recompute_seconds * 1e3, plan.forward_backward_seconds * 1e3
    return [
        ("overhead", f"{plan.overhead:.2%}: {extra_ms:.4g} ms of recomputation for a step of {step_ms:.4g} ms"),
        ("lower bound", f"{plan.lower_bound:.2%} for family {plan.family}, gap {plan.gap:.2%}, {plan.status}"),
        ("costs", f"{plan.cost_source} ({plan.device})"),
        ("time", f"captured in {plan.capture_seconds:.2f} s, solved in {plan.solve_seconds:.2f} s"),
        *segment_rows(plan),
        *((name, ", ".join(plan.options[name])) for name in ("keep", "recompute") if plan.options.get(name)),
        ("versions", f"placemat {plan.placemat_version}, torch {plan.torch_version}"),
    ]


def segment_rows(plan: Plan) -> list[tuple[str, ...]]:
    """In how many segments gradients arrive, unless it is one."""
    ends = sum(label.target in HANDING_OUT for label in plan.labels.ops)
    return [("gradients", f"handed out in {ends} segments")] if ends > 1 else []


@dataclass(frozen=True)
class _Tally:
    """Values of one block of modules; a value that is both kept and recomputed counts as kept."""

    num_kept: int
    kept_bytes: int
    num_recomputed: int
    recomputed_bytes: int
    recompute_ms: float

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.num_kept),
            format_bytes(self.kept_bytes),
            str(self.num_recomputed),
            format_bytes(self.recomputed_bytes),
            f"{self.recompute_ms:.4g}",
        )


def _tally(decisions: Iterable[Decision]) -> _Tally:
    listed = list(decisions)
    kept = [d.bytes for d in listed if d.kept]
    recomputed = [d.bytes for d in listed if d.recomputed and not d.kept]
    seconds_by_op = {d.op: d.recomputed * d.recompute_s for d in listed}
    return _Tally(len(kept), sum(kept), len(recomputed), sum(recomputed), sum(seconds_by_op.values()) * 1e3)


def _modules(decisions: Sequence[Decision]) -> str:
    rows = module_rows(decisions)
    table = align([*rows[: _MAX_MODULES + 1], *rows[-1:]] if len(rows) > _MAX_MODULES + 2 else rows)
    if any("(x" in row[0] for row in rows):
        table += "\nfigures of a row (xN) are those of each of its N modules"
    if len(rows) > _MAX_MODULES + 2:
        table += f"\n{len(rows) - _MAX_MODULES - 2} more rows are left out"
    return table


def module_rows(decisions: Sequence[Decision]) -> list[tuple[str, ...]]:
    """A header, one row per block of modules or run of equal ones, the total."""
    by_block: dict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        by_block[block_of(decision)].append(decision)
    folded = _fold([(block, _tally(group)) for block, group in by_block.items()])
    rows = [(f"{label} (x{count})" if count > 1 else label, *t.cells()) for label, count, t in folded]
    header = ("module", "kept", "bytes", "recomputed", "bytes", "ms")
    return [header, *rows, ("total", *_tally(decisions).cells())]


def block_of(decision: Decision) -> str:
    """Module path up to its first number ("h.3" of "h.3.mlp.c_fc"), or its first name."""
    parts = decision.module_path.split(".")
    numbers = [i for i, part in enumerate(parts) if _NUMBER.fullmatch(part)]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0] or "(model)"


def _fold(tallies: Sequence[tuple[str, _Tally]]) -> list[tuple[str, int, _Tally]]:
    """(label, count, tally) with runs of equal consecutively numbered blocks as one: ("h.3-h.11", 9, tally)."""
    folded: list[tuple[str, str, int, _Tally]] = []
    for block, tally in tallies:
        if folded:
            first, last, count, same = folded[-1]
            if block == next_block(last) and tally.cells() == same.cells():
                folded[-1] = (first, block, count + 1, same)
                continue
        folded.append((block, block, 1, tally))
    return [(first if first == last else f"{first}-{last}", count, tally) for first, last, count, tally in folded]


def next_block(block: str) -> str | None:
    """ "h.4" for "h.3"; None for a block without a number."""
    stem, _, number = block.rpartition(".")
    if not _NUMBER.fullmatch(number):
        return None
    return f"{stem}.{int(number) + 1}" if stem else str(int(number) + 1)
