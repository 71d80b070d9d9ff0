"""Alternative: a schedule with the other choice for a few ops, priced by the referee.

Nothing is solved again: every other decision of the schedule stays. So an alternative says what one decision is worth
as the others stand; two alternatives do not add up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from placemat.problem import Problem
from placemat.replay import default_cut, may_be_dropped
from placemat.schedule import Compute, Free, Schedule, canonical
from placemat.simulate import simulate


@dataclass(frozen=True)
class Alternative:
    """What `simulate` says of the other schedule; `peak_op` is the op that runs at its peak."""

    schedule: Schedule
    peak_bytes: int
    recompute_seconds: float
    peak_op: int


def keep_instead(problem: Problem, schedule: Schedule, ops: Collection[int]) -> Alternative:
    """Never run `ops` again: their results stay from their first run to their last reader.

    Recomputations that only served those of `ops` fall away too, and those that also served others wait for them.

    Raises:
        InvalidSchedule: a result of `ops` must not be held over the border (`Problem.dropped`).
    """
    runs = zip(schedule.computes, _are_first(schedule.computes), strict=True)
    computes = _without_useless(problem, [op for op, is_first in runs if is_first or op not in ops])
    return _priced(problem, _postponed(problem, computes, _sources(problem, ops)))


def recompute_instead(problem: Problem, schedule: Schedule, ops: Collection[int]) -> Alternative:
    """Hold no result of `ops` over the border: what can be dropped is made again before its first reader in backward.

    What such a recomputation reads and the schedule neither holds over the border nor has made again by then is
    recomputed with it, and held to its last reader: a recomputation that the schedule has later falls away. Without a
    border the middle of the step takes its place.
    """
    missing = {v for w in ops for v in problem.ops[w].outputs if may_be_dropped(problem, v)}
    cut = default_cut(problem)
    present: set[int] = set()
    moved: set[int] = set()
    computes: list[int] = []
    started, is_after_cut = 0, False
    for step in schedule.steps:
        if isinstance(step, Free):
            if not is_after_cut:
                present.discard(step.value)
            continue
        op = problem.ops[step.op]
        is_after_cut = started >= cut
        is_first = step.op == started
        started += is_first
        if not is_first and step.op in moved:
            moved.discard(step.op)
            continue
        if is_after_cut:
            reads = _reads(problem, step.op, is_first)
            again = _to_run_again(problem, [v for v in reads if v in missing], missing, present)
            for w in again:
                missing.difference_update(problem.ops[w].outputs)
                present.update(problem.ops[w].outputs)
            computes.extend(again)
            moved.update(again)
            if not is_first:
                missing.difference_update(op.outputs)
        computes.append(step.op)
        present.update(op.outputs)
    return _priced(problem, _without_useless(problem, computes))


def _to_run_again(problem: Problem, wanted: Sequence[int], missing: set[int], present: set[int]) -> list[int]:
    """Ops to run, in index order, so that `wanted` is there; what cannot be recomputed is held instead."""
    ops: set[int] = set()
    stack = list(wanted)
    while stack:
        w = problem.values[stack.pop()].producer
        if w not in ops:
            ops.add(w)
            for u in problem.ops[w].recompute_inputs:
                if u in missing or (u not in present and may_be_dropped(problem, u)):
                    stack.append(u)
    return sorted(ops)


def _without_useless(problem: Problem, computes: Sequence[int]) -> list[int]:
    """The runs without recomputations of which nothing is read before it is made again."""
    useful: list[int] = []
    wanted: set[int] = set()
    for index, is_first in reversed(list(zip(computes, _are_first(computes), strict=True))):
        outputs = problem.ops[index].outputs
        if is_first or wanted.intersection(outputs):
            useful.append(index)
            wanted.difference_update(outputs)
            wanted.update(_reads(problem, index, is_first))
    return useful[::-1]


def _sources(problem: Problem, ops: Collection[int]) -> set[int]:
    """The ops that recomputations of `ops` may need."""
    found: set[int] = set()
    stack = list(ops)
    while stack:
        for v in problem.ops[stack.pop()].recompute_inputs:
            w = problem.values[v].producer
            if w not in found and problem.ops[w].recomputable:
                found.add(w)
                stack.append(w)
    return found


def _postponed(problem: Problem, computes: Sequence[int], ops: Collection[int]) -> list[int]:
    """The runs with recomputations of `ops` as late as their readers allow, in index order before one reader.

    From the last to the first, so that a recomputation follows one that reads it.
    """
    runs = list(zip(computes, _are_first(computes), strict=True))
    for position in range(len(runs) - 1, -1, -1):
        index, is_first = runs[position]
        if is_first or index not in ops:
            continue
        made = set(problem.ops[index].outputs)
        reader = next(j for j in range(position + 1, len(runs)) if made.intersection(_reads(problem, *runs[j])))
        while reader - 1 > position and not runs[reader - 1][1] and runs[reader - 1][0] > index:
            reader -= 1
        runs.insert(reader - 1, runs.pop(position))
    return [index for index, _ in runs]


def _reads(problem: Problem, index: int, is_first: bool) -> tuple[int, ...]:
    return problem.ops[index].inputs if is_first else problem.ops[index].recompute_inputs


def _are_first(computes: Sequence[int]) -> list[bool]:
    """First runs come in index order."""
    started = 0
    flags = []
    for index in computes:
        flags.append(index == started)
        started += flags[-1]
    return flags


def _priced(problem: Problem, computes: Sequence[int]) -> Alternative:
    schedule = canonical(problem, computes)
    simulation = simulate(problem, schedule)
    step = schedule.steps[simulation.peak_step]
    assert isinstance(step, Compute)
    return Alternative(schedule, simulation.peak_bytes, simulation.recompute_seconds, step.op)
