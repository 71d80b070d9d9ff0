"""Shaving: bring a schedule down to a budget run by run, on any graph, with cuts anywhere or without any.

A value is idle over a run if it is resident there and neither made nor read by it. The move: drop an idle value after
its last touch and make it again right before its next reader. What that run needs is held until then, or, in a second
kind of the same move, made again as well where it is no longer there. Moves are judged by the bytes over the budget,
summed over all runs, that they take away per second of recomputation; the best one is made, and the next is looked for
at the run that is then the highest. As for `greedy.py`, the work is limited by a count and not by a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np

from placemat.problem import Problem
from placemat.schedule import Schedule, canonical
from placemat.simulate import running_bytes, simulate

_MOST_OP_VISITS = 200_000  # moves times ops
_TRIED = 8  # of the moves that look best, until one is as good as it looks
_LONGEST_CHAIN = 16  # ops that one move runs again
_LEAST_SECONDS = 1e-6  # of the step: what any recomputation costs at least, so that ratios stay finite


def shaved(problem: Problem, schedule: Schedule, budget_bytes: int) -> Schedule:
    """The first schedule within the budget, from `schedule` on; if the moves lead nowhere or the work is up before
    that, the one with the lowest peak on the way."""
    lowest = profile = _Profile.of(problem, list(schedule.computes))
    for _ in range(max(1, _MOST_OP_VISITS // max(1, problem.num_steps))):
        excess = profile.excess(budget_bytes)
        if excess == 0:
            break
        after = profile.best_move(budget_bytes)
        if after is None:
            break
        profile = after
        if profile.peak_bytes < lowest.peak_bytes:
            lowest = profile
    return canonical(problem, lowest.computes)


@dataclass(frozen=True)
class _Move:
    """Run `ops`, in this order, before what is at `position`."""

    rank: tuple[float, int, int]
    position: int
    ops: tuple[int, ...]

    def applied(self, computes: list[int]) -> list[int]:
        return [*computes[: self.position], *self.ops, *computes[self.position :]]


@dataclass
class _Profile:
    """Runs, bytes at each of them, and when each value is made or read.

    Attributes:
        running: bytes while each run lasts; int64.
        touches: value -> positions, ascending.
        makes: value -> positions of the runs of its op, ascending.
    """

    problem: Problem
    computes: list[int]
    running: np.ndarray
    touches: list[list[int]]
    makes: list[list[int]]

    @classmethod
    def of(cls, problem: Problem, computes: list[int]) -> _Profile:
        schedule = canonical(problem, computes)
        running = np.array(running_bytes(schedule, simulate(problem, schedule)), dtype=np.int64)
        touches: list[list[int]] = [[] for _ in problem.values]
        makes: list[list[int]] = [[] for _ in problem.values]
        seen: set[int] = set()
        for position, index in enumerate(computes):
            op = problem.ops[index]
            for v in op.recompute_inputs if index in seen else op.inputs:
                touches[v].append(position)
            for v in op.outputs:
                touches[v].append(position)
                makes[v].append(position)
            seen.add(index)
        return cls(problem, computes, running, touches, makes)

    @property
    def peak_bytes(self) -> int:
        return int(self.running.max())

    def excess(self, budget_bytes: int) -> int:
        return int(np.maximum(self.running - budget_bytes, 0).sum())

    def moves(self, budget_bytes: int) -> Iterator[_Move]:
        """The moves that take something away at the highest run."""
        top = int(self.running.argmax())
        for v, value in enumerate(self.problem.values):
            if value.pinned or not self.problem.ops[value.producer].recomputable:
                continue
            stretch = self._idle(v, top)
            if stretch is None:
                continue
            kinds = {(value.producer,), self._chain(v, stretch[1])}
            for ops in sorted(kinds):
                saved = self._saved_bytes(v, stretch, ops, budget_bytes)
                if saved > 0:
                    seconds = sum(self.problem.ops[o].recompute_s for o in ops)
                    seconds += _LEAST_SECONDS * self.problem.runtime_s
                    yield _Move((-saved / seconds, v, len(ops)), stretch[1], ops)

    def best_move(self, budget_bytes: int) -> _Profile | None:
        """After the best move that is as good as it looks; None if none of the first few is."""
        for move in nsmallest(_TRIED, self.moves(budget_bytes), key=lambda move: move.rank):
            after = _Profile.of(self.problem, move.applied(self.computes))
            if after.excess(budget_bytes) < self.excess(budget_bytes):
                return after
        return None

    def _idle(self, v: int, position: int) -> tuple[int, int] | None:
        """Last touch before the position and next one after it, if the next one is a read."""
        touches = self.touches[v]
        i = bisect_left(touches, position)
        if i == 0 or i == len(touches) or touches[i] == position or touches[i] in self.makes[v]:
            return None
        return touches[i - 1], touches[i]

    def _is_there(self, v: int, position: int) -> bool:
        """Whether a value is resident when a position is reached: made before and read at it or later, or pinned."""
        touches = self.touches[v]
        i = bisect_left(touches, position)
        if i == 0:
            return False
        return self.problem.values[v].pinned or (i < len(touches) and touches[i] not in self.makes[v])

    def _chain(self, v: int, position: int) -> tuple[int, ...]:
        """Ops that make v from what is resident at the position, in order; those that may not run again left out. Its
        own op alone where that is a long way."""
        ops: set[int] = set()
        stack = [v]
        while stack:
            o = self.problem.values[stack.pop()].producer
            if o in ops or not self.problem.ops[o].recomputable:
                continue
            ops.add(o)
            if len(ops) > _LONGEST_CHAIN:
                return (self.problem.values[v].producer,)
            stack.extend(u for u in self.problem.ops[o].recompute_inputs if not self._is_there(u, position))
        return tuple(sorted(ops))

    def _saved_bytes(self, v: int, stretch: tuple[int, int], ops: tuple[int, ...], budget_bytes: int) -> int:
        """By how much the sum over the budget falls, as an estimate: other results of the same ops do not count."""
        start, stop = stretch[0] + 1, stretch[1]
        held = [u for o in ops for u in self.problem.ops[o].recompute_inputs if not self._is_there(u, stop)]
        made = {u for o in ops for u in self.problem.ops[o].outputs}
        starts = {u: self.touches[u][bisect_left(self.touches[u], stop) - 1] + 1 for u in held if u not in made}
        if not self.problem.dropped.isdisjoint(starts):
            return 0  # held over the border, where it must not be
        low = min([start, *starts.values()])
        before = self.running[low:stop]
        after = before.copy()
        after[start - low :] -= self.problem.values[v].bytes
        for u, begin in starts.items():
            after[begin - low :] += self.problem.values[u].bytes
        at_stop = int(self.running[stop]) - self._own_bytes(stop) - self.problem.values[v].bytes
        burst, live = 0, at_stop + sum(self.problem.values[u].bytes for u in starts)
        for o in ops:
            op = self.problem.ops[o]
            taken = sum(self.problem.values[u].bytes for u in op.outputs)
            burst += max(0, live + taken + op.recompute_workspace_bytes - budget_bytes)
            live += taken
        fallen = np.maximum(before - budget_bytes, 0).sum() - np.maximum(after - budget_bytes, 0).sum()
        return int(fallen) - burst

    def _own_bytes(self, position: int) -> int:
        """Outputs and workspace of a run."""
        op = self.problem.ops[self.computes[position]]
        is_first = self.computes.index(self.computes[position]) == position
        workspace = op.workspace_bytes if is_first else op.recompute_workspace_bytes
        return workspace + sum(self.problem.values[v].bytes for v in op.outputs)
