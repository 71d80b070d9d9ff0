"""Polish: drop recomputations that a schedule does not need to stay within its budget."""

from __future__ import annotations

from dataclasses import dataclass

from placemat.problem import Problem
from placemat.schedule import Compute, Schedule, canonical
from placemat.simulate import simulate


def drop_needless(problem: Problem, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Leave out recomputations, dearest per byte first, whose values can be held instead within the budget.

    Leaving one out keeps a schedule valid, since its outputs are then held from their last touch on. Memory grows only
    between that touch and the recomputation, so a look at that stretch says whether it fits.
    """
    computes = list(schedule.computes)
    again = sorted(_again(computes), key=lambda i: (-_seconds_per_byte(problem, computes[i]), i))
    dropped: set[int] = set()
    current = _Profile.of(problem, computes, dropped)
    for position in again:
        if current.fits_without(problem, computes, position, dropped, budget_bytes):
            dropped.add(position)
            current = _Profile.of(problem, computes, dropped)
    return canonical(problem, [op for i, op in enumerate(computes) if i not in dropped])


def _seconds_per_byte(problem: Problem, op: int) -> float:
    return problem.ops[op].runtime_s / (1 + sum(problem.values[v].bytes for v in problem.ops[op].outputs))


def _again(computes: list[int]) -> list[int]:
    """Positions of recomputations."""
    seen: set[int] = set()
    positions = []
    for position, op in enumerate(computes):
        if op in seen:
            positions.append(position)
        seen.add(op)
    return positions


@dataclass(frozen=True)
class _Profile:
    """Bytes while each Compute runs (0 where it is left out), and where each value is touched."""

    running: list[int]
    touches: dict[int, list[int]]  # value -> positions that read or produce it, ascending
    firsts: dict[int, int]  # op -> position of its first run

    @classmethod
    def of(cls, problem: Problem, computes: list[int], dropped: set[int]) -> _Profile:
        schedule = canonical(problem, [op for i, op in enumerate(computes) if i not in dropped])
        timeline = simulate(problem, schedule).timeline
        at_runs = iter(b for step, b in zip(schedule.steps, timeline, strict=True) if isinstance(step, Compute))
        running = [0 if i in dropped else next(at_runs) for i in range(len(computes))]
        touches: dict[int, list[int]] = {}
        firsts: dict[int, int] = {}
        for i, index in enumerate(computes):
            if i in dropped:
                continue
            op = problem.ops[index]
            reads = op.inputs if firsts.setdefault(index, i) == i else op.recompute_inputs
            for v in (*op.outputs, *reads):
                touches.setdefault(v, []).append(i)
        return cls(running, touches, firsts)

    def fits_without(
        self, problem: Problem, computes: list[int], position: int, dropped: set[int], budget_bytes: int
    ) -> bool:
        """Whether every output that is read after `position` can be held up to it from its touch before."""
        extra = [0] * (position + 1)
        for v in problem.ops[computes[position]].outputs:
            touches = self.touches[v]
            at = touches.index(position)
            is_read = at + 1 < len(touches) and computes[touches[at + 1]] != computes[position]
            if problem.values[v].pinned or not is_read:
                continue
            for i in range(touches[at - 1] + 1, position):
                extra[i] += problem.values[v].bytes
        return all(self.running[i] + extra[i] <= budget_bytes for i in range(position) if extra[i] and i not in dropped)
