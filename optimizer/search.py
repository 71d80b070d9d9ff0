"""FamilySearch: the cheapest schedule of one family within a budget, by a retention MILP that is refined on the way."""

from __future__ import annotations

import math
import time

import numpy as np

from placemat.contraction import contract
from placemat.crossover import Crossover
from placemat.decode import decode
from placemat.greedy import repaired
from placemat.incumbent import Incumbent
from placemat.linear_model import LinearAnswer, Solving
from placemat.local_search import searched_locally
from placemat.milp import Retention
from placemat.neighborhood import neighborhoods
from placemat.phases import Phases
from placemat.refinement import (
    FRACTION,
    TIE_SCALE,
    RefinedModel,
    Refinement,
    cost_unit_s,
    first_grid,
    tie_break_s,
)
from placemat.replay import default_cut
from placemat.schedule import Schedule
from placemat.simulate import Simulation, simulate

# Part of the remaining time that one MILP may take: a plan that fails the referee needs another one.
SHARE_OF_TIME = 0.75
# With one in hand that is near the bound: what is left is the proof, and a solve that is cut short proves nothing.
PROOF_GAP = 0.05
SHARE_OF_PROOF = 0.95
# Without a plan in hand: the first answers are over the budget, and several short solves tell what rows are missing.
SHARE_WITHOUT_PLAN = 0.1
RELAXED_THRESHOLDS = (0.05, 0.3, 0.7)  # what a relaxation keeps by more than this is tried
# An incumbent that is further from the bound is worth looking around for better ones.
WIDE_GAP = 0.02
MANY_COLUMNS = 150  # a model with fewer binaries is solved before a look around it would be over
NEIGHBORHOOD_S = 3.0
NEIGHBORHOOD_SCALES = (1, 2, 4)
MOST_FAILURES = 12
CROSSOVER_S = 12.0
# Plans are changed move by move when no more than this part of the time is left.
LATE_SHARE = 0.5
# Part of the time that is left for the referee then.
REFEREE_SHARE = 0.03
# Part of the asked gap that one MILP may leave: the rest is for what the referee and the tie-break add.
GAP_SHARE = 0.95


class FamilySearch:
    """Solve, decode, referee and tighten until incumbent and bound agree.

    Attributes:
        phases: the family.
        incumbent: shared with the searches of other families.
        gap: (objective - bound) / objective at which to stop.
        deadline: `time.monotonic()` at which to stop; the incumbent's, unless set to an earlier one.
        lower_seconds: no schedule of the family within the budget needs fewer.
        limit: what stopped the search, if anything did.
    """

    def __init__(
        self, phases: Phases, incumbent: Incumbent, gap: float, lower_seconds: float, *, is_tight: bool
    ) -> None:
        self.phases, self.incumbent, self.gap = phases, incumbent, gap
        self.started, self.deadline = time.monotonic(), incumbent.deadline
        self.lower_seconds = lower_seconds
        self.limit: str | None = None
        self.share_without_plan = SHARE_WITHOUT_PLAN
        self.contraction = contract(incumbent.problem, phases, is_tight=is_tight)
        self.problem = self.contraction.problem
        self.has_one_cut = phases.cuts[1:-1] == (default_cut(self.problem),)
        self.refinement = Refinement(self.problem, phases, incumbent.budget_bytes, set())
        self.crossover = Crossover()
        self.locally_searched_seconds = math.inf  # of the latest incumbent that was searched around
        self.look_at_incumbent()

    @property
    def family(self) -> str:
        """The schedules for which the bound holds, in words."""
        return self.contraction.family(self.phases)

    def is_closed(self) -> bool:
        """Whether the best plan is proven to be within the gap."""
        return self.incumbent.is_within(self.gap, self.lower_seconds, self.resolution_s)

    @property
    def resolution_s(self) -> float:
        """What the tie-break may add to a bound."""
        return tie_break_s(self.problem)

    @property
    def is_impossible(self) -> bool:
        """No schedule of the family fits the budget."""
        return self.lower_seconds == math.inf

    def run(self) -> None:
        """Until the gap is closed, the time is over, or another solve would not help."""
        self.started = time.monotonic()
        while not self.is_closed() and not self.is_impossible:
            if self.seconds_left() <= 0:
                self.limit = "time"
                return
            if not self._solve():
                if self.limit is not None and self.is_wide():
                    self._improve(self.deadline)
                return

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def relax(self) -> None:
        """A first bound, and plans near what the relaxation keeps."""
        if self.seconds_left() <= 0:
            self.limit = "time"
            return
        built = self.refinement.build()
        solution = self._relaxed(built, SHARE_OF_TIME * self.seconds_left())
        if solution is not None and self.has_one_cut:
            for threshold in RELAXED_THRESHOLDS:
                self._repair(built.model, solution, threshold)
            self.look_at_incumbent()

    def look_at_incumbent(self) -> None:
        """Let the next model have rows where the best plan so far is full."""
        incumbent = self.incumbent
        self.refinement.grid |= first_grid(incumbent.problem, self.phases, incumbent.schedule, incumbent.budget_bytes)

    def _improve(self, deadline: float, whole: Solving | None = None) -> None:
        """What lies between the incumbent and cheaper solutions over the budget; then neighborhoods of the incumbent,
        larger ones once so many in a row gave no better plan and no missing row; until the whole model is solved."""
        self._cross(deadline, whole)
        for scale in NEIGHBORHOOD_SCALES:
            self._improve_at(scale, deadline, whole)

    def _search_locally(self) -> None:
        """What the incumbent keeps over the cut, changed by moves that solving cut short has missed.

        Late, when the gap is wide still: crossovers that start from such plans find less.
        """
        is_new = self.incumbent.seconds < self.locally_searched_seconds
        whole_s = self.deadline - self.started
        is_late = 0 < self.seconds_left() < LATE_SHARE * whole_s
        if is_new and is_late and self.has_one_cut and self.is_wide():
            incumbent, kept = self.incumbent, frozenset(v for v, _ in self._carried())
            moves_end = self.deadline - REFEREE_SHARE * whole_s
            schedule = searched_locally(self.problem, kept, incumbent.budget_bytes, incumbent.seconds, moves_end)
            if schedule is not None:
                self.offer(schedule)
            self.locally_searched_seconds = incumbent.seconds

    def _goes_on(self, deadline: float, whole: Solving | None) -> bool:
        return self.is_wide() and time.monotonic() < deadline and not (whole is not None and whole.is_done())

    def _cross(self, deadline: float, whole: Solving | None) -> None:
        """First between the solutions at hand; what the relaxation has otherwise is free too if that leads nowhere."""
        is_relaxed, limit_s = not self.crossover.solutions, CROSSOVER_S
        while self._goes_on(deadline, whole):
            self._search_locally()
            built, seconds = self.refinement.build(), self.incumbent.seconds
            relaxed = self._relaxed(built, deadline - time.monotonic()) if is_relaxed else None
            fixed = self.crossover.fixed(built.model, self._carried(), relaxed)
            self.incumbent.tell(f"{self.phases.family}: crossover of {len(built.model.s) - len(fixed)} values")
            answer = built.start(
                time_limit_s=min(limit_s, deadline - time.monotonic()),
                gap=self.gap,
                fixed=built.columns(fixed),
                below_s=(1 - self.gap / 2) * seconds,
            )()
            knows_more = answer.values is not None and (
                self._take(built, answer) or self.refinement.make_binary(built, answer.values)
            )
            if not knows_more and self.incumbent.seconds >= seconds and is_relaxed:
                if answer.limit is None:
                    return
                limit_s *= 2
            is_relaxed = not self.crossover.solutions or not knows_more

    def _relaxed(self, built: RefinedModel, time_limit_s: float) -> np.ndarray | None:
        """A solution of the relaxation, which may raise the bound."""
        answer = built.start(time_limit_s=time_limit_s, gap=0.0, relaxed=True)()
        self._raise_bound(answer.bound)
        return answer.values

    def _improve_at(self, scale: int, deadline: float, whole: Solving | None) -> None:
        incumbent, built = self.incumbent, self.refinement.build()
        carried = self._carried()
        around = neighborhoods(built.model, carried, scale)
        failures = 0
        while failures < MOST_FAILURES and self._goes_on(deadline, whole):
            seconds = incumbent.seconds
            answer = built.start(
                time_limit_s=min(scale * NEIGHBORHOOD_S, deadline - time.monotonic()),
                gap=self.gap / 2,
                fixed=built.columns(next(around)),
                below_s=(1 - self.gap / 2) * seconds,
            )()
            failures += 1
            if answer.values is not None and self._take(built, answer):
                built = self.refinement.build()
                failures -= 1
            if incumbent.seconds < seconds:
                failures = 0
                carried.clear()
                carried.update(self._carried())

    def _carried(self) -> set[tuple[int, int]]:
        assert self.incumbent.schedule is not None
        return self.contraction.carried(self.incumbent.schedule, self.phases.cuts[1:-1])

    def _solve(self) -> bool:
        """Solve the whole model, and meanwhile look around the incumbent; False when another solve would not help."""
        built = self.refinement.build()
        self.incumbent.tell(f"{self.phases.family}: {built.model.linear.describe()}")
        share = self._share()
        time_limit_s = share * self.seconds_left()
        whole = built.start(time_limit_s=time_limit_s, gap=GAP_SHARE * self.gap)
        if len(built.model.s) >= MANY_COLUMNS and self.is_wide():
            self._improve(time.monotonic() + time_limit_s, whole)
        answer = whole()
        self._raise_bound(answer.bound)
        self.limit = answer.limit
        if answer.values is None:
            is_cut_short = answer.limit is not None and share < SHARE_OF_TIME
            self.share_without_plan = min(2 * share, SHARE_OF_TIME)
            return is_cut_short
        if self._take(built, answer):
            return True
        # Another solve starts from nothing: it helps only against Y that are fractional at the optimum.
        is_optimal = answer.status == "optimal"
        return is_optimal and not self.is_closed() and self.refinement.make_binary(built, answer.values)

    def _share(self) -> float:
        """Part of the remaining time for the next MILP."""
        if self.incumbent.schedule is None:
            return self.share_without_plan
        seconds = self.incumbent.seconds
        return SHARE_OF_TIME if seconds - self.lower_seconds > PROOF_GAP * seconds else SHARE_OF_PROOF

    def is_wide(self) -> bool:
        """Whether the gap is wide enough to look for better plans around the incumbent."""
        seconds = self.incumbent.seconds
        return seconds < math.inf and seconds - self.lower_seconds > max(WIDE_GAP, 2 * self.gap) * seconds

    def _take(self, built: RefinedModel, answer: LinearAnswer) -> bool:
        """Decode and referee a solution; True if it was over the budget and the next model knows."""
        assert answer.values is not None
        schedule = decode(built.model, answer.values)
        simulation = simulate(self.problem, schedule)
        self._check_objective(built.model, answer.values, simulation)
        self.offer(schedule)
        if simulation.peak_bytes <= self.incumbent.budget_bytes:
            return False
        if self.has_one_cut:
            self._repair(built.model, answer.values, 0.5)
        self.crossover.add(built.model, answer.values)
        self.refinement.tighten(built, schedule, simulation, answer.values)
        return True

    def offer(self, schedule: Schedule) -> None:
        """A schedule of the contracted problem."""
        self.incumbent.offer(self.contraction.expand(schedule))

    def _repair(self, model: Retention, solution: np.ndarray, threshold: float) -> None:
        """What a solution keeps that is over the budget is a good start for a plan that fits."""
        kept = frozenset(v for (v, _), column in model.s.items() if solution[column] > threshold)
        schedule = repaired(self.problem, kept, self.incumbent.budget_bytes)
        if schedule is not None:
            self.offer(schedule)

    def _check_objective(self, model: Retention, solution: np.ndarray, simulation: Simulation) -> None:
        """An integral solution says what its schedule costs."""
        columns = [(solution[ramp.final], self.problem.ops[o].recompute_s) for (o, _), ramp in model.Y.items()]
        if all(min(x, 1 - x) <= FRACTION for x, _ in columns):
            claimed_s = sum(round(x) * runtime_s for x, runtime_s in columns)
            assert abs(claimed_s - simulation.recompute_seconds) <= 1e-9 * max(self.problem.runtime_s, claimed_s)

    def _raise_bound(self, bound: float) -> None:
        """From units of the objective to seconds, less what the tie-break may have added."""
        seconds = (bound - TIE_SCALE) * cost_unit_s(self.problem)
        self.lower_seconds = max(self.lower_seconds, seconds)
        overhead = self.incumbent.overhead(self.lower_seconds)
        self.incumbent.tell(f"{self.phases.family}: no plan below {self.lower_seconds:.6g} s ({100 * overhead:.2f} %)")
