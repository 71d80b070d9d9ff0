"""Polish: drop recomputations that a schedule does not need to stay within its budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from placemat.problem import Problem
from placemat.schedule import Schedule, canonical
from placemat.simulate import running_bytes, simulate


def drop_needless(problem: Problem, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Leave out recomputations, dearest per byte first, whose values can be held instead within the budget.

    Leaving one out keeps a schedule valid, since its outputs are then held from their last touch on. Memory grows only
    between that touch and the recomputation, so a look at that stretch says whether it fits. What a recomputation that
    is left out no longer holds itself counts from the next round on.
    """
    computes = list(schedule.computes)
    while True:
        profile = _Profile.of(problem, computes)
        kept = profile.drop_round(budget_bytes)
        if len(kept) == len(computes):
            return canonical(problem, computes)
        computes = kept


@dataclass
class _Profile:
    """Bytes while each Compute runs, at most, and where each value is read or produced."""

    problem: Problem
    computes: list[int]
    running: np.ndarray  # int64
    touches: dict[int, list[int]]  # value -> positions, ascending
    again: list[int]  # positions of recomputations

    @classmethod
    def of(cls, problem: Problem, computes: list[int]) -> _Profile:
        schedule = canonical(problem, computes)
        running = running_bytes(schedule, simulate(problem, schedule))
        touches: dict[int, list[int]] = {}
        again: list[int] = []
        seen: set[int] = set()
        for position, index in enumerate(computes):
            op = problem.ops[index]
            if index in seen:
                again.append(position)
            for v in (*op.outputs, *(op.recompute_inputs if index in seen else op.inputs)):
                touches.setdefault(v, []).append(position)
            seen.add(index)
        return cls(problem, computes, np.array(running, dtype=np.int64), touches, again)

    def drop_round(self, budget_bytes: int) -> list[int]:
        """The runs without what need not run again."""
        dropped: set[int] = set()
        for position in sorted(self.again, key=lambda i: (-self._seconds_per_byte(i), i)):
            stretches = self._stretches(position)
            if not self._remakes_dropped(position) and self._fits(stretches, budget_bytes):
                dropped.add(position)
                self._hold(position, stretches)
        return [op for position, op in enumerate(self.computes) if position not in dropped]

    def _seconds_per_byte(self, position: int) -> float:
        op = self.problem.ops[self.computes[position]]
        return op.runtime_s / (1 + sum(self.problem.values[v].bytes for v in op.outputs))

    def _remakes_dropped(self, position: int) -> bool:
        """Whether holding an output instead would hold it over the border, where it must not be."""
        if self.problem.border is None or not self.problem.dropped:
            return False
        border = self.computes.index(self.problem.border)
        for v in self.problem.ops[self.computes[position]].outputs:
            touches = self.touches[v]
            at = touches.index(position)
            is_read = at + 1 < len(touches) and self.computes[touches[at + 1]] != self.computes[position]
            if v in self.problem.dropped and is_read and touches[at - 1] < border < position:
                return True
        return False

    def _stretches(self, position: int) -> list[tuple[int, int]]:
        """(first position, bytes) of what must be held up to `position` if nothing runs there: outputs read later."""
        stretches = []
        for v in self.problem.ops[self.computes[position]].outputs:
            touches = self.touches[v]
            at = touches.index(position)
            is_read = at + 1 < len(touches) and self.computes[touches[at + 1]] != self.computes[position]
            if is_read and not self.problem.values[v].pinned:
                stretches.append((touches[at - 1] + 1, self.problem.values[v].bytes))
        # From the longest stretch to the shortest, so that bytes add up on the way to `position`.
        return [*sorted(stretches), (position, 0)]

    def _fits(self, stretches: list[tuple[int, int]], budget_bytes: int) -> bool:
        held_bytes = 0
        for (start, num_bytes), (stop, _) in pairwise(stretches):
            held_bytes += num_bytes
            if start < stop and int(self.running[start:stop].max()) + held_bytes > budget_bytes:
                return False
        return True

    def _hold(self, position: int, stretches: list[tuple[int, int]]) -> None:
        """Hold the outputs over their stretches, and touch nothing at `position` any more."""
        for start, num_bytes in stretches:
            self.running[start:position] += num_bytes
        self.running[position] = 0
        op = self.problem.ops[self.computes[position]]
        for v in (*op.outputs, *op.recompute_inputs):
            self.touches[v].remove(position)
