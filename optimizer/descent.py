"""Descent: a kept set that gets cheaper move by move, within a budget."""

from __future__ import annotations

import time

from placemat.greedy import KeptSets

_LEAST_SAVING = 1e-7  # of the step's seconds


class Descent:
    """The best kept set so far, and the two questions about another one: does it save seconds, and does it fit?

    The first follows from the kept set alone, in a fraction of the time that the second takes; so only what saves some
    has its memory looked at. As for `greedy.py`, the work is limited by a count; the clock only ends it early.

    Attributes:
        sets: kept sets of a problem.
        kept: the best one.
        seconds: a better one has to recompute less; the seconds of `kept` once a move was made.
        has_moved: whether any move was made.
    """

    def __init__(
        self, sets: KeptSets, kept: frozenset[int], budget_bytes: int, below_s: float, deadline: float
    ) -> None:
        self.sets, self.kept, self.budget_bytes, self.seconds = sets, kept, budget_bytes, below_s
        self.deadline = deadline
        self.has_moved = False
        self.least_s = _LEAST_SAVING * sets.problem.runtime_s

    def goes_on(self) -> bool:
        return self.sets.evaluations < self.sets.max_evaluations and time.monotonic() < self.deadline

    def saved_s(self, kept: frozenset[int]) -> float:
        """What another kept set recomputes less; 0.0 if that is not worth a look."""
        saved_s = self.seconds - self.sets.recompute_s(kept)
        return saved_s if saved_s > self.least_s else 0.0

    def moves_to(self, kept: frozenset[int]) -> bool:
        """Take another kept set if it fits and recomputes less."""
        plan = self.sets.profile(kept)
        if plan.peak_bytes > self.budget_bytes or plan.recompute_s >= self.seconds:
            return False
        self.kept, self.seconds, self.has_moved = kept, plan.recompute_s, True
        return True
