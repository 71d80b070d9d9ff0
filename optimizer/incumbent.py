"""Incumbent: the best schedule so far within a budget, and who may hear of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import simulate


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
        if simulate(self.problem, schedule).peak_bytes > self.budget_bytes:
            return False
        schedule = drop_needless(self.problem, schedule, self.budget_bytes)
        seconds = simulate(self.problem, schedule).recompute_seconds
        is_shorter = self.schedule is not None and len(schedule.recomputes) < len(self.schedule.recomputes)
        if seconds > self.seconds or (seconds == self.seconds and not is_shorter):
            return False
        self.schedule, self.seconds = schedule, seconds
        self.tell(f"a plan of {seconds:.6g} s of recomputation ({100 * self.overhead(seconds):.2f} %)")
        return True

    def offer_best(self, schedules: Iterable[Schedule]) -> None:
        """Offer the cheapest of those that fit: dropping what is needless takes longer than telling which that is."""
        simulated = [(simulate(self.problem, schedule), schedule) for schedule in schedules]
        fitting = [(s.recompute_seconds, schedule) for s, schedule in simulated if s.peak_bytes <= self.budget_bytes]
        if fitting:
            self.offer(min(fitting, key=lambda pair: pair[0])[1])

    def is_within(self, gap: float, lower_seconds: float, resolution_s: float) -> bool:
        """Objective and bound agree within the gap; the tie-break alone may hold them apart by its own size."""
        return self.seconds < math.inf and self.seconds - lower_seconds <= gap * self.seconds + resolution_s

    def overhead(self, seconds: float) -> float:
        return seconds / (self.problem.runtime_s or 1.0)

    def tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)
