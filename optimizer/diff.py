"""Two plans compared: figures that changed, and what happens to values otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from placemat.explain import fate
from placemat.labels import shape_text
from placemat.summary import align, block_of
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.decisions import Decision
    from placemat.plan import Plan

_MAX_ROWS = 60


def diff(old: Plan, new: Plan) -> str:
    """The text of `Plan.diff`."""
    figures = [row for row in _figures(old, new) if row[1] != row[2]]
    blocks = [align([("", "this", "other", ""), *figures])] if figures else []
    if old.fingerprint == new.fingerprint:
        blocks.append(_decisions(old.decisions, new.decisions))
    else:
        blocks.append(
            f"The graphs are different ones ({old.fingerprint[:12]} and {new.fingerprint[:12]}: another model, call or "
            "torch version), so values cannot be compared; here are their modules."
        )
        blocks.append(_modules(old.decisions, new.decisions))
    return "\n\n".join(blocks)


def _figures(old: Plan, new: Plan) -> list[tuple[str, str, str, str]]:
    """(name, of the old plan, of the new plan, difference)."""
    sizes = [
        ("budget", old.budget_bytes, new.budget_bytes),
        ("predicted peak", old.predicted_peak_bytes, new.predicted_peak_bytes),
        ("floor", old.floor_bytes, new.floor_bytes),
        ("keep everything", old.keep_everything_bytes, new.keep_everything_bytes),
        *(
            (f"{name} at the peak", old.breakdown.get(name, 0), new.breakdown.get(name, 0))
            for name in dict.fromkeys([*old.breakdown, *new.breakdown])
        ),
    ]
    rows = [(name, format_bytes(a), format_bytes(b), _signed(b - a)) for name, a, b in sizes]
    rows.append(("overhead", f"{old.overhead:.2%}", f"{new.overhead:.2%}", f"{new.overhead - old.overhead:+.2%}"))
    rows.append(("recomputation", *_milliseconds(old.recompute_seconds, new.recompute_seconds)))
    rows.append(("step", *_milliseconds(old.forward_backward_seconds, new.forward_backward_seconds)))
    for name in ("peak_op", "family", "status", "cost_source", "device", "torch_version", "placemat_version"):
        rows.append((name.replace("_", " "), str(getattr(old, name)), str(getattr(new, name)), ""))
    for name in sorted({*old.options, *new.options} - {"call"}):
        rows.append((f"{name}=", str(old.options.get(name)), str(new.options.get(name)), ""))
    return rows


def _milliseconds(a: float, b: float) -> tuple[str, str, str]:
    return f"{a * 1e3:.4g} ms", f"{b * 1e3:.4g} ms", f"{(b - a) * 1e3:+.4g} ms"


def _signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes >= 0 else ''}{format_bytes(num_bytes)}"


def _decisions(old: Sequence[Decision], new: Sequence[Decision]) -> str:
    """Values of one graph that the plans treat differently."""
    before, after = ({d.index: d for d in decisions} for decisions in (old, new))
    rows = []
    for index in sorted({*before, *after}):
        a, b = before.get(index), after.get(index)
        either = a or b
        assert either is not None
        fates = tuple("freed" if d is None else fate(d) for d in (a, b))
        if fates[0] != fates[1]:
            shape = shape_text(either.shape, either.dtype)
            rows.append((either.module_path or "(model)", either.op, shape, format_bytes(either.bytes), *fates))
    if not rows:
        return f"All {len(before)} values are treated alike."
    left = frozenset({0, 1, 2, 4, 5})
    table = align([("module", "op", "shape", "bytes", "this", "other"), *rows[:_MAX_ROWS]], left)
    more = f"\n... and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""
    return f"{table}{more}\n{len(rows)} values are treated differently, {len({*before, *after}) - len(rows)} alike"


def _modules(old: Sequence[Decision], new: Sequence[Decision]) -> str:
    """Bytes kept and recomputed per block of modules, where they differ."""
    before, after = _bytes_by_block(old), _bytes_by_block(new)
    rows = []
    for block in dict.fromkeys([*before, *after]):
        a, b = before.get(block, (0, 0)), after.get(block, (0, 0))
        if a != b:
            rows.append((block, *(format_bytes(size) for size in (a[0], b[0], a[1], b[1]))))
    if not rows:
        return "Every module keeps and recomputes as many bytes."
    return align([("module", "this keeps", "other keeps", "this recomputes", "other recomputes"), *rows[:_MAX_ROWS]])


def _bytes_by_block(decisions: Sequence[Decision]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for d in decisions:
        kept, again = sums.get(block_of(d), (0, 0))
        sums[block_of(d)] = (kept + d.bytes * d.kept, again + d.bytes * bool(d.recomputed))
    return sums
