"""Schedule: what every solver returns, every referee checks and the emitter runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placemat.problem import Problem


@dataclass(frozen=True)
class Compute:
    """Run an op (for the first time, or again)."""

    op: int


@dataclass(frozen=True)
class Free:
    """Drop a value's storage."""

    value: int


Step = Compute | Free


@dataclass(frozen=True)
class Schedule:
    """Steps in execution order."""

    steps: tuple[Step, ...]

    @property
    def computes(self) -> tuple[int, ...]:
        """Op indices in execution order, first runs and recomputations."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))

    @property
    def recomputes(self) -> tuple[int, ...]:
        """Op indices of the recomputations alone, in execution order."""
        seen: set[int] = set()
        again = []
        for op in self.computes:
            if op in seen:
                again.append(op)
            seen.add(op)
        return tuple(again)


def canonical(problem: Problem, computes: Sequence[int]) -> Schedule:
    """The schedule that runs `computes` in this order and frees each value as early as that allows.

    A value is freed as soon as the next thing that happens to it is the run of its own op, or nothing; a pinned one
    never. No schedule with the same runs has less memory at any of them.
    """
    dies = _last_touches(problem, computes)
    steps: list[Step] = []
    for position, op in enumerate(computes):
        steps.append(Compute(op))
        steps.extend(Free(v) for v in dies[position])
    return Schedule(tuple(steps))


def _last_touches(problem: Problem, computes: Sequence[int]) -> list[list[int]]:
    """Per position, the unpinned values, ascending, that are produced or read there and not again before a new run."""
    first_position: dict[int, int] = {}
    for position, index in enumerate(computes):
        first_position.setdefault(index, position)
    dies: list[list[int]] = [[] for _ in computes]
    wanted: set[int] = set()  # values read later, before their op runs again
    for position in range(len(computes) - 1, -1, -1):
        op = problem.ops[computes[position]]
        reads = op.inputs if first_position[computes[position]] == position else op.recompute_inputs
        for v in (*op.outputs, *reads):
            if v not in wanted and not problem.values[v].pinned:
                dies[position].append(v)
        dies[position].sort()
        wanted.difference_update(op.outputs)
        wanted.update(reads)
    return dies
