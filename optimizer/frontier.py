"""The frontier: what each budget costs, from the floor to the peak at which nothing more needs to be recomputed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from placemat.baselines import save_all
from placemat.floor import FLOOR_SHARE, Floor, minimum_budget
from placemat.graph.errors import BudgetTooSmall, PlacematError
from placemat.phases import PhasesArgument
from placemat.plan import Plan
from placemat.plots import plot_frontier
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import simulate
from placemat.solve import solve
from placemat.summary import align
from placemat.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FrontierPoint:
    """The best plan known for one budget.

    Attributes:
        budget_bytes, peak_bytes: bound on the peak, and the simulated peak of `schedule`.
        overhead, recompute_seconds: of `schedule`, as a share of one pass over all ops and in seconds; never more than
            at a smaller budget of the same curve.
        lower_bound, lower_bound_seconds: no schedule of `family` within the budget has less.
        gap: (recompute seconds - their lower bound) / recompute seconds, 0 where nothing is recomputed.
        status: "optimal" within the asked gap, else "feasible".
        family: the family for which the bound holds, in words.
        solve_seconds: time spent on this budget alone; 0 where other budgets had the answer.
        schedule: the steps.
    """

    budget_bytes: int
    peak_bytes: int
    overhead: float
    recompute_seconds: float
    lower_bound: float
    lower_bound_seconds: float
    gap: float
    status: Literal["optimal", "feasible"]
    family: str
    solve_seconds: float
    schedule: Schedule


@dataclass(frozen=True, repr=False)
class Frontier:
    """The budget-overhead curve of a training step; its repr is a table. Iterates over its points.

    Attributes:
        points: by rising budget: the first is at the floor, the last recomputes the least that any plan may.
        plans: a plan for each point, for `placemat.apply`.
    """

    points: tuple[FrontierPoint, ...]
    plans: tuple[Plan, ...]

    def __iter__(self) -> Iterator[FrontierPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> FrontierPoint:
        return self.points[index]

    def __repr__(self) -> str:
        return frontier_table(self.points)

    def plot(self, peers: Mapping[str, Sequence[tuple[int, float]]] | None = None, axes: Axes | None = None) -> Figure:
        """Overhead over the peak, beside what people do by hand (priced by the referee).

        Each plan is a mark at its own peak, as peers are. The line is the cheapest one that fits, the dotted line under
        it what no plan within such a budget goes below.

        Args:
            peers: name -> points (peak bytes, overhead as a fraction) of other tools, to draw beside.
            axes: matplotlib axes to draw on; None makes a figure.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        return plot_frontier(self, peers, axes)

    def plan_at(self, budget_bytes: int | str) -> Plan:
        """The cheapest plan of the curve that fits a budget, which need not be that of a point. Solves nothing.

        The plan's lower bound is that of the next larger point, since a bound holds for all smaller budgets.

        Raises:
            BudgetTooSmall: no plan of the curve fits.
            PlacematError: the budget is no size.
        """
        budget = parse_bytes(budget_bytes)
        fitting = [plan for plan in self.plans if plan.predicted_peak_bytes <= budget]
        if not fitting:
            raise self._too_small(budget)

        def cost(plan: Plan) -> tuple[float, int, int]:  # several points may have the same schedule: the nearest one
            return plan.recompute_seconds, plan.predicted_peak_bytes, abs(plan.budget_bytes - budget)

        plan = min(fitting, key=cost)
        # Nothing beats the bound of the last point, whatever the budget.
        above = next((point for point in self.points if point.budget_bytes >= budget), self.points[-1])
        lower_s = min(above.lower_bound_seconds, plan.recompute_seconds)
        is_within = _is_within(plan.recompute_seconds, lower_s, plan.options["gap"])
        is_optimal = is_within or (above.budget_bytes == budget and above.status == "optimal")
        is_ample = plan.eager_bound_bytes is not None and budget >= plan.eager_bound_bytes
        return replace(
            plan,
            budget_bytes=budget,
            lower_bound_seconds=lower_s,
            family=above.family,
            status="optimal" if is_optimal else "feasible",
            runs_original=is_ample and not plan.options["recompute"],
        )

    def _too_small(self, budget_bytes: int) -> BudgetTooSmall:
        lowest = min(self.plans, key=lambda plan: plan.predicted_peak_bytes)
        least_bytes = lowest.predicted_peak_bytes
        return BudgetTooSmall(
            f"budget {budget_bytes} bytes ({format_bytes(budget_bytes)}) is below the frontier: its lowest plan needs "
            f"{least_bytes} bytes ({format_bytes(least_bytes)}), at {lowest.peak_op}"
            f"{', ' + lowest.peak_source if lowest.peak_source else ''}. Remedy: that many bytes, or a smaller batch.",
            minimum_budget_bytes=least_bytes,
            budget_bytes=budget_bytes,
            breakdown=lowest.breakdown,
            binding_op=lowest.peak_op,
            source=lowest.peak_source,
        )


def problem_frontier(
    problem: Problem,
    *,
    points: int = 12,
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    phases: PhasesArgument = None,
    floor: Floor | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[FrontierPoint, ...]:
    """Solve a problem at evenly spaced budgets, from the floor to the peak of `save_all`, by rising budget.

    Budgets share what is found: a plan fits all larger budgets, and a bound holds for all smaller ones of the same
    family. So the largest budget, which is the easiest, is solved first, and leaves its unused time to the others.

    Args:
        problem: what to schedule.
        points: how many budgets, at least 2; fewer come back if there are not as many different ones.
        time_limit_s: wall-clock seconds for the whole curve.
        gap: as for `solve`, per budget.
        phases: the family, see `make_phases`.
        floor: the first budget with its schedule; None finds it in a fifth of the time.
        progress: takes one line of text per stage.

    Raises:
        PlacematError: `points` is no number from 2 on.
        SolverFailed: the solver cannot be run.
    """
    check_points(points)
    deadline = time.monotonic() + time_limit_s
    if floor is None:
        limit_s = FLOOR_SHARE * time_limit_s
        floor = minimum_budget(problem, time_limit_s=limit_s, phases=phases, progress=progress)
    curve = _Curve(problem, gap, phases, progress)
    curve.add_plan(floor.schedule)
    budgets = _spaced(floor.minimum_bytes, simulate(problem, save_all(problem)).peak_bytes, points)
    for number, budget_bytes in enumerate(reversed(budgets)):
        curve.add_budget(budget_bytes, (deadline - time.monotonic()) / (len(budgets) - number))
    return curve.points()


def check_points(points: object) -> None:
    """Refuse what is no number of budgets."""
    if not isinstance(points, int) or isinstance(points, bool) or points < 2:
        raise PlacematError(f"points is how many budgets the frontier has: an int from 2 on, got {points!r}.")


def _spaced(low: int, high: int, count: int) -> list[int]:
    """`count` ints from `low` to `high`, both included, less those that are equal."""
    return sorted({low + max(0, high - low) * i // (count - 1) for i in range(count)})


@dataclass(frozen=True)
class _KnownPlan:
    recompute_seconds: float
    peak_bytes: int
    schedule: Schedule


@dataclass(frozen=True)
class _Bound:
    """What is known of one budget but its best plan, which another budget may still bring."""

    budget_bytes: int
    lower_seconds: float
    family: str
    is_optimal: bool
    solve_seconds: float


class _Curve:
    """Plans and bounds of one problem; budgets are added from the largest to the smallest."""

    def __init__(
        self, problem: Problem, gap: float, phases: PhasesArgument, progress: Callable[[str], None] | None
    ) -> None:
        self.problem, self.gap, self.phases, self.progress = problem, gap, phases, progress
        self.plans: list[_KnownPlan] = []
        self.bounds: list[_Bound] = []
        self.is_interrupted = False
        # No schedule of any family has fewer.
        self.least_seconds = simulate(problem, save_all(problem)).recompute_seconds

    def add_plan(self, schedule: Schedule) -> None:
        simulation = simulate(self.problem, schedule)
        self.plans.append(_KnownPlan(simulation.recompute_seconds, simulation.peak_bytes, schedule))

    def best(self, budget_bytes: int) -> _KnownPlan:
        fitting = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda plan: (plan.recompute_seconds, plan.peak_bytes))

    def add_budget(self, budget_bytes: int, time_limit_s: float) -> None:
        """Solve for a budget, unless what larger ones gave closes it or the time is over."""
        if self.bounds:
            known, above = self.best(budget_bytes), self.bounds[-1]
            is_closed = _is_within(known.recompute_seconds, above.lower_seconds, self.gap)
            if is_closed or time_limit_s <= 0 or self.is_interrupted:
                self.bounds.append(replace(above, budget_bytes=budget_bytes, is_optimal=is_closed, solve_seconds=0.0))
                return
        result = solve(
            self.problem,
            budget_bytes,
            time_limit_s=max(time_limit_s, 0.0),
            gap=self.gap,
            phases=self.phases,
            warm_start=self.best(budget_bytes).schedule,
            progress=self.progress,
        )
        self.add_plan(result.schedule)
        of_family = [bound.lower_seconds for bound in self.bounds if bound.family == result.family]
        lower_s = max(self.least_seconds, result.lower_bound_seconds, *of_family)
        is_optimal = result.status == "optimal"
        self.bounds.append(_Bound(budget_bytes, lower_s, result.family, is_optimal, result.solve_seconds))
        self._tell(f"{format_bytes(budget_bytes)}: {self._overhead(result.objective_seconds):.2%}, {result.status}")
        if result.limit == "interrupt":
            self.is_interrupted = True
            self._tell("interrupted: the rest of the curve has the best plans so far")

    def points(self) -> tuple[FrontierPoint, ...]:
        """By rising budget; each has the best plan of all that fit."""
        return tuple(self._point(bound) for bound in reversed(self.bounds))

    def _point(self, bound: _Bound) -> FrontierPoint:
        plan = self.best(bound.budget_bytes)
        lower_s = min(bound.lower_seconds, plan.recompute_seconds)
        is_optimal = bound.is_optimal or _is_within(plan.recompute_seconds, lower_s, self.gap)
        return FrontierPoint(
            budget_bytes=bound.budget_bytes,
            peak_bytes=plan.peak_bytes,
            overhead=self._overhead(plan.recompute_seconds),
            recompute_seconds=plan.recompute_seconds,
            lower_bound=self._overhead(lower_s),
            lower_bound_seconds=lower_s,
            gap=(plan.recompute_seconds - lower_s) / plan.recompute_seconds if plan.recompute_seconds else 0.0,
            status="optimal" if is_optimal else "feasible",
            family=bound.family,
            solve_seconds=bound.solve_seconds,
            schedule=plan.schedule,
        )

    def _overhead(self, seconds: float) -> float:
        return seconds / self.problem.runtime_s if self.problem.runtime_s > 0 else 0.0

    def _tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)


def _is_within(seconds: float, lower_seconds: float, gap: float) -> bool:
    return seconds - lower_seconds <= gap * seconds


def frontier_table(points: Sequence[FrontierPoint]) -> str:
    """Aligned text, one budget a line."""
    rows = [("budget", "peak", "overhead", "at least", "gap", "solved in", "status", "family")]
    for point in points:
        rows.append(
            (
                format_bytes(point.budget_bytes),
                format_bytes(point.peak_bytes),
                f"{point.overhead:.2%}",
                f"{point.lower_bound:.2%}",
                f"{point.gap:.2%}",
                f"{point.solve_seconds:.1f} s",
                point.status,
                point.family,
            )
        )
    return align(rows, frozenset({6, 7}))
