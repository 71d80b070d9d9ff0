"""Solve: the cheapest schedule of a family within a budget, with a bound that says how much cheaper one could be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from placemat.baselines import save_all
from placemat.decode import decode
from placemat.floor import budget_too_small, minimum_budget, static_lower_bound
from placemat.greedy import greedy
from placemat.milp import Retention
from placemat.phases import Phases, PhasesArgument, make_phases
from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.refinement import FRACTION, TIE_SCALE, Refinement, cost_unit_s, first_grid
from placemat.replay import default_cut
from placemat.schedule import Schedule
from placemat.simulate import Simulation, simulate
from placemat.starts import starting_schedules

# Part of the remaining time that one MILP may take: a plan that fails the referee needs another one.
SHARE_OF_TIME = 0.7


@dataclass(frozen=True)
class SolveResult:
    """A schedule that the referee has passed, and how good it is.

    Attributes:
        schedule: fits the budget.
        status: "optimal" within the asked gap, else "feasible".
        limit: "time" if that stopped the search.
        objective_seconds: recompute seconds of the schedule.
        lower_bound_seconds: no schedule of `family` within the budget needs fewer.
        gap: (objective - lower bound) / objective; 0 where the objective is 0.
        family: the family for which the bound holds, in words.
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
        phases: the family, see `make_phases`; None is P = 2 cut at the border.
        warm_start: a schedule that may already fit.
        progress: takes one line of text per stage.

    Raises:
        BudgetTooSmall: no plan of the family fits, or none was found; carries the floor.
        InvalidSchedule: `warm_start` is not a schedule of the problem.
        SolverFailed: HiGHS cannot be run.
    """
    family = make_phases(problem, phases)
    search = _Search(problem, family, budget_bytes, gap, time.monotonic() + time_limit_s, progress)
    started = time.monotonic()
    everything = save_all(problem)
    if simulate(problem, everything).peak_bytes <= budget_bytes:
        search.offer(everything)
        return search.result(started)
    starts = starting_schedules(problem, family) + ([] if warm_start is None else [warm_start])
    for start in starts:
        search.offer(start)
    if budget_bytes >= static_lower_bound(problem):
        lowest = min(starts, key=lambda schedule: simulate(problem, schedule).peak_bytes)
        grid_start = lowest if search.best is None else search.best
        is_default = family.cuts[1:-1] == (default_cut(problem),)
        if is_default and (found := greedy(problem, budget_bytes)) is not None:
            search.offer(found)
        search.run(grid_start)
    if search.best is None:
        floor = minimum_budget(
            problem,
            time_limit_s=max(search.seconds_left(), 1.0),
            phases=phases,
            warm_start=warm_start,
            progress=progress,
        )
        if floor.minimum_bytes > budget_bytes:
            raise budget_too_small(problem, budget_bytes, floor)
        search.offer(floor.schedule)
    return search.result(started)


@dataclass
class _Search:
    """The best plan and the best bound so far."""

    problem: Problem
    phases: Phases
    budget_bytes: int
    gap: float
    deadline: float
    progress: Callable[[str], None] | None
    best: Schedule | None = None
    best_seconds: float = float("inf")
    lower_seconds: float = 0.0
    limit: str | None = None

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def offer(self, schedule: Schedule) -> None:
        """Take a schedule that fits, less what it need not recompute, if it is cheaper or as cheap in fewer runs."""
        if simulate(self.problem, schedule).peak_bytes > self.budget_bytes:
            return
        schedule = drop_needless(self.problem, schedule, self.budget_bytes)
        seconds = simulate(self.problem, schedule).recompute_seconds
        is_shorter = self.best is not None and len(schedule.recomputes) < len(self.best.recomputes)
        if seconds < self.best_seconds or (seconds == self.best_seconds and is_shorter):
            self.best, self.best_seconds = schedule, seconds

    def is_closed(self) -> bool:
        """Objective and bound agree within the gap; the tie-break alone may hold them apart by its own size."""
        if self.best is None:
            return False
        resolution_s = TIE_SCALE * cost_unit_s(self.problem)
        return self.best_seconds - self.lower_seconds <= self.gap * self.best_seconds + resolution_s

    def run(self, start: Schedule) -> None:
        """Solve, decode, referee and tighten until the gap is closed; the first grid follows `start`."""
        grid = first_grid(self.problem, start)
        refinement = Refinement(self.problem, self.phases, self.budget_bytes, grid)
        while not self.is_closed():
            if self.seconds_left() <= 0:
                self.limit = "time"
                return
            if not self._step(refinement):
                return

    def _step(self, refinement: Refinement) -> bool:
        """One solve, decoded and refereed; False when another would not help."""
        built = refinement.build()
        self._tell(f"{self.phases.family}: {built.model.linear.describe()}")
        answer = built.minimize(time_limit_s=SHARE_OF_TIME * self.seconds_left(), gap=self.gap)
        self._raise_bound(answer.bound)
        if answer.limit is not None:
            self.limit = answer.limit
        if answer.values is None:
            return False
        schedule = decode(built.model, answer.values)
        simulation = simulate(self.problem, schedule)
        self._check_objective(built.model, answer.values, simulation)
        self._tell(
            f"a plan of {simulation.recompute_seconds:.6g} s and {simulation.peak_bytes:,} bytes; "
            f"at least {self.lower_seconds:.6g} s"
        )
        if simulation.peak_bytes > self.budget_bytes:
            refinement.tighten(built, schedule, simulation, answer.values)
            return True
        self.offer(schedule)
        # Another solve starts from nothing: it helps only against Y that are fractional at the optimum.
        return answer.status == "optimal" and not self.is_closed() and refinement.make_binary(built, answer.values)

    def _check_objective(self, model: Retention, solution: np.ndarray, simulation: Simulation) -> None:
        """An integral solution says what its schedule costs."""
        columns = [(solution[ramp.final], self.problem.ops[o].runtime_s) for (o, _), ramp in model.Y.items()]
        if all(min(x, 1 - x) <= FRACTION for x, _ in columns):
            claimed_s = sum(round(x) * runtime_s for x, runtime_s in columns)
            assert abs(claimed_s - simulation.recompute_seconds) <= 1e-9 * max(self.problem.runtime_s, claimed_s)

    def _raise_bound(self, bound: float) -> None:
        """From units of the objective to seconds, less what the tie-break may have added."""
        seconds = (bound - TIE_SCALE) * cost_unit_s(self.problem)
        self.lower_seconds = max(self.lower_seconds, seconds)

    def _tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def result(self, started: float) -> SolveResult:
        assert self.best is not None
        simulation = simulate(self.problem, self.best)
        assert simulation.peak_bytes <= self.budget_bytes
        objective = simulation.recompute_seconds
        lower = min(self.lower_seconds, objective)
        return SolveResult(
            schedule=self.best,
            status="optimal" if self.is_closed() else "feasible",
            limit=None if self.is_closed() else self.limit,
            objective_seconds=objective,
            lower_bound_seconds=lower,
            gap=(objective - lower) / objective if objective else 0.0,
            family=self.phases.family,
            solve_seconds=time.monotonic() - started,
            simulation=simulation,
        )
