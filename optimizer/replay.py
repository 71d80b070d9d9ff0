"""From a set of kept values to a schedule: keep these over a cut, recompute the rest as late as possible."""

from __future__ import annotations

from collections.abc import Collection

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
    """Drop at `cut` what is not in `kept` and can be recomputed; recompute each op at most once, before its first use.

    Args:
        problem: any problem.
        kept: values to hold over the cut; those that cannot be recomputed or are pinned are held in any case.
        cut: step from which on values are recomputed; values produced at or after it are never dropped.
    """
    available = {
        v for v, value in enumerate(problem.values)
        if v in kept or value.producer >= cut or not may_be_dropped(problem, v)
    }  # fmt: skip
    computes: list[int] = []
    for step, op in enumerate(problem.ops):
        if step >= cut:
            again = _missing_ops(problem, op.inputs, available)
            computes.extend(again)
            for w in again:
                available.update(problem.ops[w].outputs)
        computes.append(step)
    return canonical(problem, computes)


def _missing_ops(problem: Problem, wanted: Collection[int], available: Collection[int]) -> list[int]:
    """Ops to recompute so that `wanted` is there, in index order."""
    ops: set[int] = set()
    stack = [v for v in wanted if v not in available]
    while stack:
        w = problem.values[stack.pop()].producer
        if w not in ops:
            ops.add(w)
            stack.extend(u for u in problem.ops[w].recompute_inputs if u not in available)
    return sorted(ops)
