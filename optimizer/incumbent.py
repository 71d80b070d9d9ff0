"""Incumbent: the best schedule so far within a budget, and who may hear of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import Simulation, simulate


@dataclass
class Incumbent:
    """What a search has in hand.

    Attributes:
        problem: what is scheduled.
        budget_bytes: bound on the peak of every schedule that is taken.
        deadline: `time.monotonic()` at which to stop.
        progress: takes one line of text per event.
        schedule: the cheapest so far, of equally cheap ones the shortest.
        seconds: its recompute seconds; inf without one.
    """

    problem: Problem
    budget_bytes: int
    deadline: float
    progress: Callable[[str], None] | None = None
    schedule: Schedule | None = None
    seconds: float = math.inf

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def offer(self, schedule: Schedule) -> bool:
        """Take a schedule that fits, less what it need not recompute, if it is better; the referee decides."""
        before = self.schedule
        if self._first_look(schedule).peak_bytes <= self.budget_bytes:
            self._take_polished(schedule)
        return self.schedule is not before

    def offer_best(self, schedules: Iterable[Schedule]) -> int:
        """Offer the cheapest of those that fit: dropping what is needless takes longer than telling which that is.

        Returns the lowest of all their peaks; the budget where there are no schedules.
        """
        looks = [(self._first_look(schedule), schedule) for schedule in schedules]
        fitting = [(s.recompute_seconds, schedule) for s, schedule in looks if s.peak_bytes <= self.budget_bytes]
        if fitting:
            self._take_polished(min(fitting, key=lambda pair: pair[0])[1])
        return min((simulation.peak_bytes for simulation, _ in looks), default=self.budget_bytes)

    def _first_look(self, schedule: Schedule) -> Simulation:
        """Simulate; one that fits is taken as it is where nothing is in hand, to have something as soon as can be."""
        simulation = simulate(self.problem, schedule)
        if self.schedule is None and simulation.peak_bytes <= self.budget_bytes:
            self._take(schedule, simulation.recompute_seconds)
        return simulation

    def _take_polished(self, schedule: Schedule) -> None:
        polished = drop_needless(self.problem, schedule, self.budget_bytes)
        self._take(polished, simulate(self.problem, polished).recompute_seconds)

    def _take(self, schedule: Schedule, seconds: float) -> None:
        is_shorter = self.schedule is not None and len(schedule.recomputes) < len(self.schedule.recomputes)
        if seconds < self.seconds or (seconds == self.seconds and is_shorter):
            self.schedule, self.seconds = schedule, seconds
            self.tell(f"a plan of {seconds:.6g} s of recomputation ({100 * self.overhead(seconds):.2f} %)")

    def is_within(self, gap: float, lower_seconds: float, resolution_s: float) -> bool:
        """Objective and bound agree within the gap; the tie-break alone may hold them apart by its own size."""
        return self.seconds < math.inf and self.seconds - lower_seconds <= gap * self.seconds + resolution_s

    def overhead(self, seconds: float) -> float:
        return seconds / (self.problem.runtime_s or 1.0)

    def tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)
