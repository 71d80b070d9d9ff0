"""The frontier: monotone, bounded from below, exact at both ends, and made of plans that run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

import placemat
from placemat import Frontier, FrontierPoint, Problem, problem_frontier
from placemat import frontier as frontier_of
from placemat.baselines import save_all
from placemat.floor import minimum_budget
from placemat.simulate import simulate
from placemat.solve import solve
from placemat.units import format_bytes
from tests.instances import random_problem, training_chain
from tests.steps import make_step, run_step


def check_curve(problem: Problem, points: Sequence[FrontierPoint]) -> None:
    """What holds of every curve, however little time there was."""
    for point in points:
        simulation = simulate(problem, point.schedule)
        assert simulation.peak_bytes == point.peak_bytes <= point.budget_bytes
        assert simulation.recompute_seconds == point.recompute_seconds >= point.lower_bound_seconds
        assert point.overhead == pytest.approx(point.recompute_seconds / problem.runtime_s)
        assert point.lower_bound == pytest.approx(point.lower_bound_seconds / problem.runtime_s)
        assert 0 <= point.gap <= 1
    for small, large in itertools.pairwise(points):
        assert small.budget_bytes < large.budget_bytes
        assert small.recompute_seconds >= large.recompute_seconds
        if small.family == large.family:
            assert small.lower_bound_seconds >= large.lower_bound_seconds or small.gap == 0
    assert points[-1].budget_bytes == simulate(problem, save_all(problem)).peak_bytes
    assert points[-1].recompute_seconds == simulate(problem, save_all(problem)).recompute_seconds
    assert points[-1].gap == 0


def test_a_chain_from_the_floor_to_no_recomputation() -> None:
    problem = training_chain(8)
    points = problem_frontier(problem, points=6, gap=0.0)
    check_curve(problem, points)
    assert len(points) == 6
    assert points[0].budget_bytes == minimum_budget(problem).minimum_bytes
    assert points[0].overhead > points[-1].overhead == 0.0
    widths = [b.budget_bytes - a.budget_bytes for a, b in itertools.pairwise(points)]
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_every_point_is_what_solve_says(seed: int) -> None:
    problem = random_problem(seed, 8, has_border=True)
    points = problem_frontier(problem, points=5, gap=0.0)
    check_curve(problem, points)
    for point in points:
        alone = solve(problem, point.budget_bytes, gap=0.0)
        assert point.recompute_seconds <= alone.objective_seconds
        assert point.lower_bound_seconds <= alone.objective_seconds
        assert point.status == "optimal"


def test_budgets_that_are_equal_count_once() -> None:
    problem = random_problem(3, 8, has_border=True)
    points = problem_frontier(problem, points=50)
    check_curve(problem, points)
    assert len(points) <= 1 + points[-1].budget_bytes - points[0].budget_bytes


def test_without_time_every_budget_still_has_a_plan() -> None:
    problem = training_chain(12)
    points = problem_frontier(problem, points=7, time_limit_s=1e-9)
    check_curve(problem, points)
    assert len(points) == 7
    assert points[0].status == "feasible"


def test_an_interrupt_ends_the_search_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(problem: Problem, budget_bytes: int, **options):
        calls.append(budget_bytes)
        result = solve(problem, budget_bytes, **options)
        return replace(result, limit="interrupt") if len(calls) == 3 else result

    monkeypatch.setitem(problem_frontier.__globals__, "solve", interrupted)
    problem, lines = training_chain(12), list[str]()
    points = problem_frontier(problem, points=8, progress=lines.append)
    check_curve(problem, points)
    assert len(calls) == 3
    assert any("interrupted" in line for line in lines)


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, True, None, "12"])
def test_a_frontier_needs_two_points(points) -> None:
    with pytest.raises(placemat.PlacematError, match="from 2 on"):
        problem_frontier(training_chain(3), points=points)


# -------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def attention() -> tuple[nn.Module, tuple, Frontier]:
    model, args = make_step("attention")
    return model, args, frontier_of(model, args, points=4, time_limit_s=10)


def test_curve_of_a_model(attention) -> None:
    model, args, frontier = attention
    assert [p.budget_bytes for p in frontier] == [plan.budget_bytes for plan in frontier.plans]
    assert len(frontier) == 4
    # A plan for the first budget may turn out lower than the floor that the curve started from.
    assert placemat.minimum_budget(model, args) == frontier.plans[0].floor_bytes <= frontier[0].budget_bytes
    assert frontier[-1].budget_bytes == frontier.plans[-1].keep_everything_bytes
    assert frontier[0].overhead > frontier[-1].overhead == 0.0
    for point, plan in zip(frontier, frontier.plans, strict=True):
        assert plan.predicted_peak_bytes == point.peak_bytes
        assert plan.overhead == pytest.approx(point.overhead)
        assert plan.lower_bound == pytest.approx(point.lower_bound)
        assert plan.options["budget_fraction"] is None
    assert "forward" not in model.__dict__


def test_repr_is_a_table(attention) -> None:
    header, *rows = repr(attention[2]).splitlines()
    assert header.split() == ["budget", "peak", "overhead", "at", "least", "gap", "solved", "in", "status", "family"]
    assert len(rows) == 4
    assert " 0.00% " in rows[-1]
    assert rows[0].startswith(format_bytes(attention[2][0].budget_bytes))


def test_plan_at_a_point_is_the_plan_of_that_point(attention) -> None:
    frontier = attention[2]
    for point, plan in zip(frontier, frontier.plans, strict=True):
        assert frontier.plan_at(point.budget_bytes) == plan


def test_plan_at_a_budget_between_points(attention) -> None:
    frontier = attention[2]
    budget_bytes = frontier[2].budget_bytes - 1
    plan = frontier.plan_at(f"{budget_bytes} B")
    assert plan.budget_bytes == budget_bytes >= plan.predicted_peak_bytes
    assert plan.recompute_seconds <= frontier[1].recompute_seconds
    assert plan.lower_bound_seconds <= frontier[2].recompute_seconds
    assert frontier.plan_at("1 TiB").runs_original
    with pytest.raises(placemat.BudgetTooSmall, match="smaller batch") as caught:
        frontier.plan_at(min(point.peak_bytes for point in frontier) - 1)
    assert caught.value.minimum_budget_bytes == min(point.peak_bytes for point in frontier)
    with pytest.raises(placemat.PlacematError, match="budget_bytes"):
        frontier.plan_at(0.5)


@pytest.mark.parametrize("index", range(4))
def test_plans_of_the_curve_train_as_before(attention, index: int) -> None:
    model, args, frontier = attention
    expected = run_step(model, args)
    placemat.apply(model, frontier.plan_at(frontier[index].budget_bytes))
    got = run_step(model, args)
    placemat.restore(model)
    assert got.same_as(expected)


def test_constraints_move_the_ends() -> None:
    model, args = make_step("attention")
    curve = frontier_of(model, args, points=3, time_limit_s=10, recompute=["norm"], keep=["qkv"])
    assert curve[-1].overhead > 0
    assert curve[-1].status == "optimal"
    assert all("native_layer_norm" in {d.op for d in plan.decisions if d.recomputed} for plan in curve.plans)
    assert not curve.plan_at("1 TiB").runs_original


def test_what_a_frontier_does_not_take() -> None:
    model, args = make_step("attention")
    with pytest.raises(placemat.PlacematError, match="example inputs"):
        frontier_of(model)
    with pytest.raises(placemat.PlacematError, match="takes no budget_bytes"):
        frontier_of(model, args, budget_bytes=3)
    with pytest.raises(placemat.PlacematError, match="from 2 on"):
        frontier_of(model, args, points=1)


def test_a_plan_whose_search_was_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args, **options):
        return replace(solve(*args, **options), limit="interrupt")

    monkeypatch.setattr("placemat.pipeline.solve", interrupted)
    model, args = make_step("branches")
    lines = list[str]()
    plan = placemat.plan(model, None, args, budget_fraction=1.0, progress=lines.append)
    assert "interrupted: going on with the best plan so far" in lines
    assert any("interrupted" in note for note in plan.notes)
