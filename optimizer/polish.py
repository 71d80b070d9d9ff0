"""Polish: drop recomputations that a schedule does not need to stay within its budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from placemat.problem import Problem
from placemat.schedule import Schedule, canonical
from placemat.simulate import running_bytes, simulate


def drop_needless(problem: Problem, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Leave out recomputations, dearest per byte first, whose values can be held instead within the budget.

    Leaving one out keeps a schedule valid, since its outputs are then held from their last touch on, and what it was
    the last to read goes earlier. So memory changes only between those touches and the recomputation: a look at that
    stretch says whether it fits. What goes earlier makes room for others, which is why there are rounds.
    """
    profile = _Profile.of(problem, list(schedule.computes))
    while profile.drop_round(budget_bytes):
        pass
    return canonical(problem, profile.left())


@dataclass
class _Profile:
    """Bytes while each Compute runs, and where each value is read or produced.

    Attributes:
        computes: all runs, those that are left out too, so that positions stay.
        running: int64 bytes at each position; of one that is left out, less than at its neighbours.
        touches: value -> positions, ascending.
        again: positions of the recomputations that are not left out.
    """

    problem: Problem
    computes: list[int]
    running: np.ndarray
    touches: dict[int, list[int]]
    again: list[int]
    left_out: set[int] = field(default_factory=set)

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
        again.sort(key=lambda i: (-_seconds_per_byte(problem, computes[i]), i))
        return cls(problem, computes, np.array(running, dtype=np.int64), touches, again)

    @cached_property
    def border_position(self) -> int:
        """Where the border runs; there is one."""
        assert self.problem.border is not None
        return self.computes.index(self.problem.border)

    def left(self) -> list[int]:
        """The runs that are not left out."""
        return [op for position, op in enumerate(self.computes) if position not in self.left_out]

    def drop_round(self, budget_bytes: int) -> bool:
        """Look at each recomputation once; whether any was left out."""
        before = len(self.again)
        for position in self.again:
            changes = self._changes(position)
            if not self._remakes_dropped(position) and self._fits(changes, position, budget_bytes):
                self._leave_out(position, changes)
        self.again = [position for position in self.again if position not in self.left_out]
        return len(self.again) < before

    def _remakes_dropped(self, position: int) -> bool:
        """Whether holding an output instead would hold it over the border, where it must not be."""
        if self.problem.border is None or not self.problem.dropped:
            return False
        return any(
            v in self.problem.dropped
            and self._is_read_after(v, position)
            and self._before(v, position) < self.border_position < position
            for v in self.problem.ops[self.computes[position]].outputs
        )

    def _changes(self, position: int) -> list[tuple[int, int]]:
        """(first position, more bytes) from there up to `position` if nothing runs there, by first position: outputs
        that are read later are held, inputs that are not are gone."""
        op, values = self.problem.ops[self.computes[position]], self.problem.values
        held = [(v, values[v].bytes) for v in op.outputs if self._is_read_after(v, position)]
        gone = [(v, -values[v].bytes) for v in op.recompute_inputs if not self._is_read_after(v, position)]
        unpinned = [(v, num_bytes) for v, num_bytes in (*held, *gone) if not values[v].pinned]
        return sorted((self._before(v, position) + 1, num_bytes) for v, num_bytes in unpinned)

    def _fits(self, changes: list[tuple[int, int]], position: int, budget_bytes: int) -> bool:
        more_bytes = 0
        for (start, num_bytes), (stop, _) in pairwise([*changes, (position, 0)]):
            more_bytes += num_bytes
            if more_bytes > 0 and start < stop and int(self.running[start:stop].max()) + more_bytes > budget_bytes:
                return False
        return True

    def _leave_out(self, position: int, changes: list[tuple[int, int]]) -> None:
        op = self.problem.ops[self.computes[position]]
        for start, num_bytes in changes:
            self.running[start:position] += num_bytes
        self.running[position] = 0
        for v in (*op.outputs, *op.recompute_inputs):
            self.touches[v].remove(position)
        self.left_out.add(position)

    def _before(self, v: int, position: int) -> int:
        """The touch of a value before the one at a position."""
        return self.touches[v][self.touches[v].index(position) - 1]

    def _is_read_after(self, v: int, position: int) -> bool:
        """Whether a value that is touched at a position is read later, before its op runs again."""
        after = self.touches[v].index(position) + 1
        touches, producer = self.touches[v], self.problem.values[v].producer
        return after < len(touches) and self.computes[touches[after]] != producer


def _seconds_per_byte(problem: Problem, index: int) -> float:
    op = problem.ops[index]
    return op.recompute_s / (1 + sum(problem.values[v].bytes for v in op.outputs))
