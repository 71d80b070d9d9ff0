"""Milestones: the relaxation bounds every schedule from below, and on layered graphs it is all that a proof needs."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.layered import layered
from placemat.baselines import save_all
from placemat.incumbent import Incumbent
from placemat.milestone_descent import MilestoneDescent
from placemat.milestones import Milestones
from placemat.problem import Problem
from placemat.refinement import TIE_SCALE, cost_unit_s
from placemat.schedule import canonical
from placemat.shave import shaved
from placemat.simulate import Simulation, simulate
from placemat.solve import solve
from tests.instances import random_problem


def bound_s(problem: Problem, budget_bytes: int, at: tuple[int, ...]) -> float:
    model = Milestones(problem, budget_bytes, at)
    answer = model.linear.start(model.costs, time_limit_s=10.0, gap=0.0)()
    return (answer.bound - TIE_SCALE) * cost_unit_s(problem)


def random_runs(problem: Problem, rng: np.random.Generator) -> Simulation:
    """A schedule of no family: before each first run any ops that may run again do so, any number of times."""
    computes: list[int] = []
    for step in range(problem.num_steps):
        again = [o for o in range(step) if problem.ops[o].recomputable]
        if again:
            computes.extend(rng.choice(again, size=int(rng.integers(0, 4))).tolist())
        computes.append(step)
    return simulate(problem, canonical(problem, computes))


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_at_all_is_below_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, 9)
    at = tuple(sorted(rng.choice(problem.num_steps, size=4, replace=False).tolist()))
    cheapest: dict[int, float] = {}
    for _ in range(300):
        simulation = random_runs(problem, rng)
        peak, seconds = simulation.peak_bytes, simulation.recompute_seconds
        cheapest[peak] = min(seconds, cheapest.get(peak, math.inf))
    for peak in sorted(cheapest)[:6]:
        seconds = min(s for p, s in cheapest.items() if p <= peak)
        assert bound_s(problem, peak, at) <= seconds * (1 + 1e-9)


def test_milestones_prove_a_layered_graph() -> None:
    problem = layered(100, 0)
    budget_bytes = int(0.8 * simulate(problem, save_all(problem)).peak_bytes)
    result = solve(problem, budget_bytes, time_limit_s=30.0, gap=0.0)
    assert result.status == "optimal"
    assert result.family == "all schedules"
    assert round(100 * result.objective_seconds / problem.runtime_s, 3) == 2.738


def descended(problem: Problem, budget_bytes: int, neighborhoods: int) -> Incumbent:
    incumbent = Incumbent(problem, budget_bytes, math.inf)
    incumbent.offer(shaved(problem, save_all(problem), budget_bytes))
    asked = iter(range(neighborhoods))
    MilestoneDescent(incumbent).run(lambda: next(asked, None) is None)
    return incumbent


def test_the_descent_finds_better_plans_and_always_the_same() -> None:
    problem = layered(70, 3)
    budget_bytes = int(0.75 * simulate(problem, save_all(problem)).peak_bytes)
    shave_s = descended(problem, budget_bytes, 0).seconds
    first, second = (descended(problem, budget_bytes, 7) for _ in range(2))
    assert first.seconds < shave_s
    assert first.schedule == second.schedule


def test_a_schedule_solves_the_model_at_its_own_peak() -> None:
    problem = random_problem(4, 12)
    simulation = simulate(problem, schedule := shaved(problem, save_all(problem), 0))
    model = Milestones(problem, simulation.peak_bytes, (3, 6, 9))
    solution = model.solution(schedule.computes)
    linear = model.linear
    starts = [*linear.row_starts, len(linear.row_columns)]
    for r, (begin, end) in enumerate(pairwise(starts)):
        activity = np.dot(linear.coefficients[begin:end], solution[linear.row_columns[begin:end]])
        assert linear.row_lower[r] - 1e-9 <= activity <= linear.row_upper[r] + 1e-6, linear.row_names[r]
