"""MilestoneSearch: a bound for every schedule, and plans near it, for steps that no border cuts.

Few milestones are enough where the step is over the budget for a while: those at the highest runs of the schedule that
keeps everything come first, then those at the runs that a decoded solution has above the budget. What is left over it,
mostly at recomputations, is shaved off.
"""

from __future__ import annotations

import math
import time

from placemat.baselines import save_all
from placemat.incumbent import Incumbent
from placemat.milestones import Milestones
from placemat.phases import WIDER_STEPS
from placemat.refinement import TIE_SCALE, cost_unit_s, tie_break_s, worst_apart
from placemat.schedule import Schedule, canonical
from placemat.shave import shaved
from placemat.simulate import running_bytes, simulate

FIRST, MORE = 6, 6  # milestones
# Part of the remaining time for all solves together, and for one: a better plan may be found near the one at hand.
SHARE_OF_TIME = 0.4
SHARE_OF_SOLVE = 0.5
GAP_SHARE = 0.95  # of the asked gap: the rest is for the tie-break
# What is over the budget by more than this share is not shaved: far from it shaving is long and dear.
NEAR = 0.15


class MilestoneSearch:
    """Solve, decode, referee, and set a milestone where a solution is over the budget.

    Attributes:
        incumbent: shared with other searches.
        lower_seconds: no schedule within the budget needs fewer, whatever its family.
        limit: what stopped the search, if anything did.
        at: the milestones so far.
    """

    family = "all schedules"

    def __init__(self, incumbent: Incumbent, gap: float, lower_seconds: float) -> None:
        self.incumbent, self.gap, self.lower_seconds = incumbent, gap, lower_seconds
        self.problem = incumbent.problem
        self.limit: str | None = None
        self.at: set[int] = set()

    def is_closed(self) -> bool:
        """Whether the best plan is proven to be within the gap."""
        return self.incumbent.is_within(self.gap, self.lower_seconds, self.resolution_s)

    @property
    def resolution_s(self) -> float:
        """What the tie-break may add to a bound."""
        return tie_break_s(self.problem)

    def run(self) -> None:
        """Until the gap is closed, the time is over, or more milestones would not help."""
        deadline = time.monotonic() + SHARE_OF_TIME * self.incumbent.seconds_left()
        new = self._over(save_all(self.problem), FIRST)
        while new and not self.is_closed() and self.lower_seconds < math.inf:
            self.at |= new
            schedule = self._solve(deadline)
            if schedule is None:
                return
            new = self._over(schedule, MORE) - self.at

    def _solve(self, deadline: float) -> Schedule | None:
        """What a solution says, over the budget perhaps; None where more milestones would not help."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self.limit = "time"
            return None
        model = Milestones(self.problem, self.incumbent.budget_bytes, tuple(sorted(self.at)))
        self.incumbent.tell(f"{len(self.at)} milestones: {model.linear.describe()}")
        if self.problem.num_steps > WIDER_STEPS and len(self.at) <= FIRST:
            # Of a large model a limit may leave no bound but this one.
            self._raise_bound(model.linear.start(model.costs, time_limit_s=left_s, gap=0.0, relaxed=True)().bound)
            left_s = max(0.0, deadline - time.monotonic())
        answer = model.linear.start(model.costs, time_limit_s=SHARE_OF_SOLVE * left_s, gap=GAP_SHARE * self.gap)()
        self._raise_bound(answer.bound)
        self.limit = answer.limit
        if answer.values is None:
            return None
        schedule = canonical(self.problem, model.computes(answer.values))
        self.offer(schedule)
        return schedule if answer.limit is None else None

    def offer(self, schedule: Schedule) -> None:
        """A schedule that is over the budget perhaps."""
        budget_bytes = self.incumbent.budget_bytes
        simulation = simulate(self.problem, schedule)
        if simulation.recompute_seconds >= self.incumbent.seconds:
            return
        if budget_bytes < simulation.peak_bytes <= (1 + NEAR) * budget_bytes:
            schedule = shaved(self.problem, schedule, budget_bytes)
        self.incumbent.offer(schedule)

    def _over(self, schedule: Schedule, count: int) -> set[int]:
        """The steps of the first runs that are highest above the budget, apart from each other; before a
        recomputation that is, the next first run."""
        running = running_bytes(schedule, simulate(self.problem, schedule))
        events, started = [], 0
        for op, num_bytes in zip(schedule.computes, running, strict=True):
            events.append(((started, op), num_bytes))
            started += op == started
        over = worst_apart(events, self.incumbent.budget_bytes, self.problem.num_steps)
        return {t for t, _ in over[:count] if t < self.problem.num_steps}

    def _raise_bound(self, bound: float) -> None:
        """From units of the objective to seconds, less what the tie-break may have added."""
        self.lower_seconds = max(self.lower_seconds, (bound - TIE_SCALE) * cost_unit_s(self.problem))
        overhead = self.incumbent.overhead(self.lower_seconds)
        self.incumbent.tell(f"no schedule at all below {self.lower_seconds:.6g} s ({100 * overhead:.2f} %)")
