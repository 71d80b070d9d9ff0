"""Laws of the solver: equal to enumeration where that is possible, ordered where it is not."""

from __future__ import annotations

import itertools
import math

import pytest

from placemat import refinement
from placemat.baselines import save_all
from placemat.floor import minimum_budget
from placemat.graph.errors import BudgetTooSmall, PlacematError
from placemat.phases import make_phases
from placemat.problem import Problem
from placemat.schedule import Schedule, canonical
from placemat.simulate import simulate
from placemat.solve import solve
from tests.bruteforce import Optima, cheapest, family_optima, free_optimum, num_plans
from tests.instances import random_problem, relabelled, training_chain, with_no_ops

MAX_PLANS = 5000


def cost_or_inf(problem: Problem, budget_bytes: int, phases: object) -> float:
    """Optimal recompute seconds of the family, inf if it has no plan."""
    try:
        result = solve(problem, budget_bytes, gap=0.0, phases=phases)  # type: ignore[arg-type]
    except BudgetTooSmall:
        return math.inf
    assert result.status == "optimal"
    assert result.simulation == simulate(problem, result.schedule)
    assert result.objective_seconds == result.simulation.recompute_seconds
    assert result.simulation.peak_bytes <= budget_bytes
    return result.objective_seconds


def budgets(optima: Optima, problem: Problem) -> range:
    """From one byte too few to one below what keeping everything needs."""
    return range(min(optima) - 1, simulate(problem, save_all(problem)).peak_bytes + 1)


@pytest.fixture(params=["whole grid", "coarse grid"])
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems get all steps at once; a coarse first grid makes them go through what large ones go through."""
    if request.param == "coarse grid":
        monkeypatch.setattr(refinement, "WHOLE_GRID_STEPS", 0)


@pytest.mark.usefixtures("grid")
@pytest.mark.parametrize("seed", range(25))
def test_one_phase_per_step_equals_stage_wise_enumeration(seed: int) -> None:
    problem = random_problem(seed, 5)
    phases = make_phases(problem, "every")
    if num_plans(problem, phases) > MAX_PLANS:
        pytest.skip("too many plans to enumerate")
    optima = family_optima(problem, phases)
    for budget_bytes in budgets(optima, problem):
        assert cost_or_inf(problem, budget_bytes, "every") == pytest.approx(cheapest(optima, budget_bytes))


@pytest.mark.usefixtures("grid")
@pytest.mark.parametrize("cuts", [2, 3, [2, 5]], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_phases_equal_enumeration_of_their_family(seed: int, cuts: int | list[int]) -> None:
    problem = random_problem(seed, 6, max_outputs=1)
    phases = make_phases(problem, cuts)
    if num_plans(problem, phases) > MAX_PLANS:
        pytest.skip("too many plans to enumerate")
    optima = family_optima(problem, phases, holds_carried=True)
    for budget_bytes in budgets(optima, problem):
        assert cost_or_inf(problem, budget_bytes, cuts) == pytest.approx(cheapest(optima, budget_bytes))


@pytest.mark.parametrize("seed", range(15))
def test_no_ops_between_single_steps_reach_the_unrestricted_optimum(seed: int) -> None:
    problem = random_problem(100 + seed, 5)
    spaced = with_no_ops(problem)
    low, high = minimum_budget(problem).lower_bound_bytes, simulate(problem, save_all(problem)).peak_bytes
    for budget_bytes in range(low - 2, high + 1):
        assert cost_or_inf(spaced, budget_bytes, "every") == pytest.approx(free_optimum(problem, budget_bytes))


@pytest.mark.parametrize("seed", range(30))
def test_families_are_ordered_and_cost_never_rises_with_budget(seed: int) -> None:
    problem = random_problem(200 + seed, 6)
    high = simulate(problem, save_all(problem)).peak_bytes
    costs: dict[object, list[float]] = {}
    for phases in (2, "every"):
        costs[phases] = [cost_or_inf(problem, b, phases) for b in range(high - 6, high + 1)]
        assert all(b <= a + 1e-9 for a, b in itertools.pairwise(costs[phases]))
    free = [free_optimum(problem, b) for b in range(high - 6, high + 1)]
    assert all(f <= e + 1e-9 and e <= p + 1e-9 for f, e, p in zip(free, costs["every"], costs[2], strict=True))
    assert costs[2][-1] == 0.0


@pytest.mark.usefixtures("grid")
@pytest.mark.parametrize("phases", [2, 3, "every"])
@pytest.mark.parametrize("seed", range(12))
def test_the_floor_is_reached_and_one_byte_less_is_refused(seed: int, phases: int | str) -> None:
    problem = random_problem(300 + seed, 6)
    floor = minimum_budget(problem, phases=phases)  # type: ignore[arg-type]
    assert floor.proven
    assert simulate(problem, floor.schedule).peak_bytes == floor.minimum_bytes == sum(floor.breakdown.values())
    assert cost_or_inf(problem, floor.minimum_bytes, phases) < math.inf
    with pytest.raises(BudgetTooSmall, match=f"{floor.minimum_bytes:,} bytes") as caught:
        solve(problem, floor.minimum_bytes - 1, phases=phases)  # type: ignore[arg-type]
    assert caught.value.minimum_budget_bytes == floor.minimum_bytes
    assert caught.value.binding_op == floor.binding_op
    assert caught.value.breakdown == floor.breakdown


@pytest.mark.parametrize("seed", range(15))
def test_names_and_orders_of_values_do_not_matter(seed: int) -> None:
    problem = random_problem(400 + seed, 6)
    other = relabelled(problem, seed)
    high = simulate(problem, save_all(problem)).peak_bytes
    assert simulate(other, save_all(other)).peak_bytes == high
    for budget_bytes in range(high - 4, high):
        assert cost_or_inf(other, budget_bytes, 3) == pytest.approx(cost_or_inf(problem, budget_bytes, 3))


def half_way(problem: Problem) -> int:
    return (minimum_budget(problem).minimum_bytes + simulate(problem, save_all(problem)).peak_bytes) // 2


def test_equal_problems_get_equal_plans() -> None:
    first, second = (solve(training_chain(9), half_way(training_chain(9))) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.lower_bound_seconds == second.lower_bound_seconds


def test_ample_budget_keeps_everything_without_a_search() -> None:
    problem = training_chain(5)
    result = solve(problem, simulate(problem, save_all(problem)).peak_bytes, time_limit_s=0.0)
    assert result.schedule == save_all(problem)
    assert (result.status, result.gap, result.lower_bound_seconds) == ("optimal", 0.0, 0.0)


def test_no_recomputation_that_the_budget_does_not_ask_for() -> None:
    problem = random_problem(7, 8, share_fixed=0.0)
    free_of_charge = Problem(
        tuple(op.__class__(**{**op.__dict__, "runtime_s": 0.0}) for op in problem.ops), problem.values, 4
    )
    result = solve(free_of_charge, half_way(free_of_charge), gap=0.0)
    fewest = len(result.schedule.recomputes)
    computes = list(result.schedule.computes)
    seen: set[int] = set()
    for i, op in enumerate(computes):
        if op in seen:
            without = simulate(free_of_charge, canonical(free_of_charge, computes[:i] + computes[i + 1 :]))
            assert without.peak_bytes > half_way(free_of_charge), f"run {i} of {fewest} recomputations is needless"
        seen.add(op)


def test_without_time_the_best_start_is_returned_with_an_honest_gap() -> None:
    problem = training_chain(9)
    start = minimum_budget(problem).schedule
    result = solve(problem, half_way(problem), time_limit_s=0.0, warm_start=start)
    assert result.status == "feasible"
    assert result.limit == "time"
    assert result.lower_bound_seconds == 0.0
    assert result.gap == 1.0
    assert result.objective_seconds <= simulate(problem, start).recompute_seconds


def test_a_warm_start_of_another_problem_is_rejected() -> None:
    problem = training_chain(4)
    with pytest.raises(ValueError, match="never run"):
        solve(problem, half_way(problem), warm_start=Schedule(()))


@pytest.mark.parametrize("phases", [0, 99, [3, 3], [0], "most"])
def test_impossible_cuts_are_refused(phases: object) -> None:
    with pytest.raises(ValueError, match=r"phases|cuts"):
        make_phases(training_chain(4), phases)  # type: ignore[arg-type]


def test_progress_and_family_are_told_in_words() -> None:
    problem = training_chain(9)
    lines: list[str] = []
    result = solve(problem, half_way(problem), phases=2, progress=lines.append)
    assert result.family == "P=2 at the border"
    assert any("no plan below" in line for line in lines)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_recomputation_saves_counts(seed: int) -> None:
    """`far_s` makes recomputations cheaper than runs: still what enumeration finds."""
    problem = random_problem(seed, 4, has_far=True)
    optima = family_optima(problem, make_phases(problem, "every"))
    for budget_bytes in budgets(optima, problem):
        assert cost_or_inf(problem, budget_bytes, "every") == pytest.approx(cheapest(optima, budget_bytes))


@pytest.mark.parametrize(("budget_bytes", "gap"), [(100, -1.0), (100, math.nan), (math.nan, 0.01), (-1, 0.01)])
def test_what_is_no_budget_and_no_gap_is_refused(budget_bytes: int, gap: float) -> None:
    with pytest.raises(PlacematError, match="numbers from 0 on"):
        solve(training_chain(4), budget_bytes, gap=gap)
