"""Decisions: what a schedule does with each value of the graph, and why, for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from placemat.cost_models.base import Costs
from placemat.graph.ir import Op, OpGraph, Value
from placemat.schedule import Compute, Free, Schedule
from placemat.units import format_bytes


@dataclass(frozen=True)
class Decision:
    """What happens to one value: a forward value, or any other one that is computed more than once.

    Attributes:
        index: of the value in `Problem.values`.
        value, op, target, module_path, source, phase: the value, the op that makes it, and where that comes from.
        shape, dtype: of the value; None and "" where it is no single tensor.
        bytes: bytes of the value.
        kept: held from forward into backward.
        recomputed: how often its op runs again.
        recompute_s: what one recomputation of its op adds to the step.
        why: the reason, for people.
    """

    index: int
    value: str
    op: str
    target: str
    module_path: str
    source: str | None
    phase: str
    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    kept: bool
    recomputed: int
    recompute_s: float
    why: str


def decide(graph: OpGraph, costs: Costs, schedule: Schedule) -> tuple[Decision, ...]:
    """Decisions of a legal schedule, in the order of the graph's values; values without bytes are left out."""
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    held = _held_over_border(graph, schedule)
    decisions = []
    for value in graph.values:
        op = graph.ops[value.producer]
        recomputed = runs[op.index] - 1
        if value.bytes == 0 or (op.phase != "forward" and not recomputed):
            continue
        kept = value.index in held
        recompute_s = costs.runtime_s[op.index] - costs.far_s_of(op.index)
        decisions.append(
            Decision(
                index=value.index,
                value=value.name,
                op=op.name,
                target=op.target,
                module_path=op.module_path,
                source=op.source,
                phase=op.phase,
                shape=value.shape,
                dtype=value.dtype,
                bytes=value.bytes,
                kept=kept,
                recomputed=recomputed,
                recompute_s=recompute_s,
                why=_why(value, op, recompute_s, kept, recomputed, graph.dropped.get(value.index)),
            )
        )
    return tuple(decisions)


def _held_over_border(graph: OpGraph, schedule: Schedule) -> set[int]:
    """Forward values that are resident once the border has run and what it alone needed has been freed."""
    held: set[int] = set()
    passed = False
    for step in schedule.steps:
        if isinstance(step, Free):
            held.discard(step.value)
        elif passed:
            break
        else:
            passed = step.op == graph.border
            held.update(graph.ops[step.op].outputs)
    return {v for v in held if graph.ops[graph.values[v].producer].phase == "forward"}


def _why(value: Value, op: Op, recompute_s: float, kept: bool, recomputed: int, why_dropped: str | None) -> str:
    if value.pinned:
        return "held by the caller or by autograd to the end of the step"
    if recomputed:
        gain = "remakes it after it was freed" if kept else f"makes room for {format_bytes(value.bytes)}"
        asked = f"; {why_dropped}" if why_dropped else ""
        return f"running {op.target} again, {recompute_s * 1e3:.3g} ms a time, {gain}{asked}"
    if not kept:
        return "not needed after its last use" if op.phase == "backward" else "not needed by backward"
    if not op.recomputable:
        return f"cannot be recomputed: {op.why_not}"
    saved = f"{recompute_s * 1e3:.3g} ms and the recomputation of what it is made from"
    return f"keeping {format_bytes(value.bytes)} saves {saved}"
