"""From a set of kept values to a schedule: keep these over a cut, recompute the rest as late as possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from placemat.problem import Problem
from placemat.schedule import Schedule, canonical


def default_cut(problem: Problem) -> int:
    """The border, or the middle of a step that has none."""
    return problem.num_steps // 2 if problem.border is None else problem.border


def may_be_dropped(problem: Problem, v: int) -> bool:
    """Whether a later recomputation could bring `v` back."""
    value = problem.values[v]
    return problem.ops[value.producer].recomputable and not value.pinned


def replay(problem: Problem, kept: Collection[int], cut: int) -> Schedule:
    """Drop at `cut` what is not in `kept` and can be recomputed, and at the border what must be dropped there; after
    either recompute each op at most once, before its first use.

    Args:
        problem: any problem.
        kept: values to hold over the cut; those that cannot be recomputed or are pinned are held in any case, and those
            in `problem.dropped` over the border in none.
        cut: step from which on values are recomputed; values produced at or after it are not dropped by it.
    """
    missing: set[int] = set()
    computes: list[int] = []
    for step, op in enumerate(problem.ops):
        if step == cut:
            missing.update(
                v for v, value in enumerate(problem.values)
                if v not in kept and value.producer < cut and may_be_dropped(problem, v)
            )  # fmt: skip
        again = missing_ops(problem, op.inputs, missing)
        computes.extend(again)
        for w in again:
            missing.difference_update(problem.ops[w].outputs)
        if step == problem.border:
            missing.update(problem.dropped)
        computes.append(step)
    return canonical(problem, computes)


def missing_ops(problem: Problem, wanted: Collection[int], missing: Collection[int]) -> list[int]:
    """Ops to recompute so that `wanted` is there, in index order."""
    ops: set[int] = set()
    stack = [v for v in wanted if v in missing]
    while stack:
        w = problem.values[stack.pop()].producer
        if w not in ops:
            ops.add(w)
            stack.extend(u for u in problem.ops[w].recompute_inputs if u in missing)
    return sorted(ops)


def carried(problem: Problem, schedule: Schedule, cuts: Sequence[int]) -> set[tuple[int, int]]:
    """(value, p) for what a schedule holds over the p-th cut, from 1 on, because something reads it before its op runs
    again; pinned values left out.

    A value is over a cut if it is touched before the first run of the op at the cut and read next after it.
    """
    held: set[tuple[int, int]] = set()
    computes = schedule.computes
    starts, started = {}, 0
    for position, index in enumerate(computes):
        if index == started:
            starts[index] = position
            started += 1
    is_read: set[int] = set()  # values of which the next touch is a read
    ahead = len(computes)
    for p in range(len(cuts), 0, -1):
        # Recomputations before the first run at the cut belong to its phase.
        begin = starts[cuts[p - 1] - 1] + 1
        for position in range(ahead - 1, begin - 1, -1):
            op = problem.ops[computes[position]]
            is_first = starts[computes[position]] == position
            is_read.difference_update(op.outputs)
            is_read.update(op.inputs if is_first else op.recompute_inputs)
        ahead = begin
        held.update(
            (v, p) for v in is_read if problem.values[v].producer < cuts[p - 1] and not problem.values[v].pinned
        )
    return held
