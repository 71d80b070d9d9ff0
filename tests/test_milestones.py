"""Milestones: the relaxation bounds every schedule from below, and on layered graphs it is all that a proof needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.layered import layered
from placemat.baselines import save_all
from placemat.milestones import Milestones
from placemat.problem import Problem
from placemat.refinement import TIE_SCALE, cost_unit_s
from placemat.schedule import canonical
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
