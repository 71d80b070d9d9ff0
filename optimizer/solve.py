"""Solve: the cheapest schedule of a family within a budget, with a bound that says how much cheaper one could be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from placemat.baselines import save_all
from placemat.floor import Floor, budget_too_small, minimum_budget, static_lower_bound
from placemat.graph.errors import PlacematError, SolverFailed
from placemat.incumbent import Incumbent
from placemat.milestone_descent import MilestoneDescent
from placemat.milestone_search import MilestoneSearch
from placemat.phases import WIDER_STEPS, Phases, PhasesArgument, ladder
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.search import FamilySearch
from placemat.simulate import Simulation, simulate
from placemat.starts import free_starts, starting_schedules

# A budget of which the lowest quick plan takes more than this share is tight.
TIGHT_SHARE = 0.85
# Part of the time that the search of large groups of ops gets under a tight budget, which may need smaller ones.
LARGE_GROUPS_SHARE = 0.75
# A wider family is searched if by its relaxation it may save more than this share of the step's seconds.
WORTH_CLIMBING = 0.005
# Part of the time left for all wider families together, so that a small step does not take longer than a large one.
# One that finds a better plan gets a larger part of what is left then, for a bound that holds for that plan.
# Who wants more from one names it: solve(..., phases=8).
CLIMBING_SHARE = 0.05
IMPROVED_SHARE = 0.2


@dataclass(frozen=True)
class SolveResult:
    """A schedule that the referee has passed, and how good it is.

    Attributes:
        schedule: fits the budget.
        status: "optimal" within the asked gap, give or take a millionth of the step's seconds, else "feasible".
        limit: "time" if that stopped the search.
        objective_seconds: recompute seconds of the schedule.
        lower_bound_seconds: no schedule of `family` within the budget needs fewer.
        gap: (objective - lower bound) / objective; 0 where the objective is 0.
        family: the family for which the bound holds, in words. A warm start may be of another one and beat all of it,
            or fit where none of it does; the bound is the objective then, and says nothing of other families.
        solve_seconds: wall-clock time.
        simulation: what the referee says of the schedule.
    """

    schedule: Schedule
    status: Literal["optimal", "feasible"]
    limit: str | None
    objective_seconds: float
    lower_bound_seconds: float
    gap: float
    family: str
    solve_seconds: float
    simulation: Simulation


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    phases: PhasesArgument = None,
    warm_start: Schedule | None = None,
    progress: Callable[[str], None] | None = None,
) -> SolveResult:
    """Minimise the recompute seconds of a step that may hold `budget_bytes` at any moment, static bytes included.

    Equal arguments give equal results unless the time limit cuts the search.

    Args:
        problem: what to schedule.
        budget_bytes: bound on the peak.
        time_limit_s: wall-clock seconds; the best plan so far is returned with its gap.
        gap: stop when (objective - bound) / objective is at most this.
        phases: the family, see `make_phases`; None lets the solver choose and climb, see `ladder`.
        warm_start: a schedule that may already fit.
        progress: takes one line of text per stage.

    Raises:
        BudgetTooSmall: no plan of the family fits; carries the floor.
        SolverFailed: none was found in time, though there may be one; or HiGHS cannot be run.
        InvalidSchedule: `warm_start` is not a schedule of the problem.
        PlacematError: the budget or the gap is negative or no number.
    """
    started = time.monotonic()
    if not gap >= 0 or not budget_bytes >= 0:
        raise PlacematError(f"budget_bytes and gap must be numbers from 0 on, got {budget_bytes} and {gap}.")
    families = ladder(problem, phases)
    incumbent = Incumbent(problem, budget_bytes, started + time_limit_s, progress)
    everything = save_all(problem)
    incumbent.offer(everything)
    # No schedule of any family recomputes less than what must be.
    rungs = _Rungs(families, incumbent, gap, simulate(problem, everything).recompute_seconds, is_free=phases is None)
    try:
        rungs.climb(free_starts(problem, budget_bytes, phases, warm_start))
    except KeyboardInterrupt:
        if incumbent.schedule is None:
            raise
        rungs.limit = "interrupt"
    if incumbent.schedule is None:
        floor = minimum_budget(
            problem,
            time_limit_s=max(incumbent.seconds_left(), 1.0),
            phases=phases,
            warm_start=warm_start,
            progress=progress,
        )
        if not incumbent.offer(floor.schedule):
            raise _no_plan(problem, budget_bytes, floor, time_limit_s)
    return _result(rungs, time.monotonic() - started)


class _Rungs:
    """The searches of one family after the other, each starting from the plan of those before.

    Attributes:
        is_free: no family was asked for.
        searches: those that were begun.
        limit: what stopped the last one, if anything did.
    """

    def __init__(
        self, families: Sequence[Phases], incumbent: Incumbent, gap: float, lower_seconds: float, *, is_free: bool
    ) -> None:
        self.families, self.incumbent, self.gap, self.lower_seconds = families, incumbent, gap, lower_seconds
        self.searches: list[FamilySearch | MilestoneSearch] = []
        self.is_free = is_free
        self.limit: str | None = None

    def climb(self, starts: Iterable[Schedule]) -> None:
        """Search the families until one is not settled, or the next one has nothing left that is worth it."""
        search = self._search(self.families[0])
        self.searches.append(search)
        if search.is_closed():
            return
        is_tight = self._offer_starts(search, starts) > TIGHT_SHARE * self.incumbent.budget_bytes
        if self.incumbent.budget_bytes < static_lower_bound(self.incumbent.problem) or self._look_everywhere():
            return
        search = self._search_first(search, is_tight)
        share = CLIMBING_SHARE if search.is_closed() else 1.0
        climbing_until = time.monotonic() + share * self.incumbent.seconds_left()
        for family in self.families[1:]:
            self.limit = search.limit
            if not search.is_closed() and not search.is_impossible:
                return
            search = self._search(family)
            self.searches.append(search)
            search.deadline = climbing_until
            search.relax()
            if search.is_impossible:
                continue
            if not self._is_worth_climbing(search):
                return
            before_s = self.incumbent.seconds
            search.run()
            if self.incumbent.seconds < before_s and not search.is_closed():  # the bounds before hold for it no more
                search.deadline = time.monotonic() + IMPROVED_SHARE * self.incumbent.seconds_left()
                search.run()
        self.limit = search.limit

    def _look_everywhere(self) -> bool:
        """Search all schedules where no family was asked for and no border says where to cut; True if families are
        of no more use."""
        problem = self.incumbent.problem
        if not self.is_free or problem.border is not None:
            return False
        search = MilestoneSearch(self.incumbent, self.gap, self.lower_seconds)
        self.searches.append(search)
        search.run()
        self.limit = search.limit
        if search.is_closed() or search.lower_seconds == math.inf:
            return True
        if problem.num_steps <= WIDER_STEPS:
            return False
        if self.incumbent.schedule is not None:
            MilestoneDescent(self.incumbent).run(lambda: search.is_closed() or self.incumbent.seconds_left() <= 0)
            self.limit = "time" if self.incumbent.seconds_left() <= 0 else search.limit
        return True

    def _search_first(self, large: FamilySearch, is_tight: bool) -> FamilySearch:
        """The first family; under a tight budget first with large groups of ops and then, if need be, small ones."""
        searches = [large]
        large.look_at_incumbent()
        if is_tight:
            small = self._search(self.families[0], is_tight=True)
            if small.contraction.groups != large.contraction.groups:
                large.deadline = time.monotonic() + LARGE_GROUPS_SHARE * self.incumbent.seconds_left()
                searches.append(small)
        self.searches.pop(0)
        for search in searches:
            self.searches.append(search)
            if search.has_one_cut:
                search.relax()
            search.run()
            if search.is_closed() and self._holds(search):
                break
        return search

    def _search(self, family: Phases, *, is_tight: bool = False) -> FamilySearch:
        return FamilySearch(family, self.incumbent, self.gap, self.lower_seconds, is_tight=is_tight)

    def _offer_starts(self, search: FamilySearch, starts: Iterable[Schedule]) -> int:
        """Quick plans; the lowest of their peaks."""
        problem, budget_bytes = self.incumbent.problem, self.incumbent.budget_bytes
        return self.incumbent.offer_best(chain(starts, starting_schedules(problem, search.phases, budget_bytes)))

    def _is_worth_climbing(self, search: FamilySearch) -> bool:
        """Whether a wider family may save enough of the step's seconds, going by its relaxation."""
        saving_s = self.incumbent.seconds - search.lower_seconds
        return not search.is_closed() and saving_s > WORTH_CLIMBING * self.incumbent.problem.runtime_s

    def _holds(self, search: FamilySearch | MilestoneSearch) -> bool:
        """Whether the best plan is none that a search's family lacks and that beats all of it."""
        return search.lower_seconds <= self.incumbent.seconds + search.resolution_s

    def told(self) -> FamilySearch | MilestoneSearch:
        """The search whose bound is told: of those that hold for the best plan the widest one that is closed, or the
        one that is nearest to it. A plan that was handed in may beat every family."""
        valid = [s for s in self.searches if self._holds(s)]
        closed = [s for s in valid if s.is_closed()]
        if closed:
            return closed[-1]
        return (
            max(valid, key=lambda s: (s.lower_seconds, isinstance(s, MilestoneSearch))) if valid else self.searches[-1]
        )


def _no_plan(problem: Problem, budget_bytes: int, floor: Floor, time_limit_s: float) -> PlacematError:
    """Too small for sure, or not found in time."""
    if floor.lower_bound_bytes > budget_bytes:
        return budget_too_small(problem, budget_bytes, floor)
    return SolverFailed(
        f"no plan for {budget_bytes:,} bytes was found in {time_limit_s:g} s; the lowest that was found needs "
        f"{floor.minimum_bytes:,}, and below {floor.lower_bound_bytes:,} there is none ({floor.family}). Remedy: that "
        "budget, a larger time_limit_s, or a warm_start= that fits."
    )


def _result(rungs: _Rungs, solve_seconds: float) -> SolveResult:
    incumbent, search = rungs.incumbent, rungs.told()
    assert incumbent.schedule is not None
    simulation = simulate(incumbent.problem, incumbent.schedule)
    assert simulation.peak_bytes <= incumbent.budget_bytes
    objective = simulation.recompute_seconds
    lower = min(search.lower_seconds, objective)
    is_closed = search.is_closed()
    return SolveResult(
        schedule=incumbent.schedule,
        status="optimal" if is_closed else "feasible",
        limit=None if is_closed else rungs.limit,
        objective_seconds=objective,
        lower_bound_seconds=lower,
        gap=(objective - lower) / objective if objective else 0.0,
        family=search.family,
        solve_seconds=solve_seconds,
        simulation=simulation,
    )
