"""Shaving: legal plans on any graph, down to the budget where moves of one value at a time lead there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.layered import layered
from placemat.baselines import save_all
from placemat.shave import shaved
from placemat.simulate import simulate
from placemat.starts import free_starts
from tests.bruteforce import free_optimum
from tests.instances import random_problem


@pytest.mark.parametrize("seed", range(10))
def test_shaved_schedules_are_legal_and_no_higher(seed: int) -> None:
    problem = random_problem(seed, 8, share_fixed=0.1, has_border=seed % 2 == 0)
    everything = save_all(problem)
    high = simulate(problem, everything).peak_bytes
    for budget_bytes in range(high, high - 4, -1):
        simulation = simulate(problem, shaved(problem, everything, budget_bytes))
        assert simulation.peak_bytes <= high
        if simulation.peak_bytes <= budget_bytes:
            assert simulation.recompute_seconds >= free_optimum(problem, budget_bytes) - 1e-9


def test_most_budgets_that_can_be_met_are_met() -> None:
    num_met = num_possible = 0
    for seed in range(25):
        problem = random_problem(seed, 8, share_fixed=0.0, share_pinned=0.0)
        everything = save_all(problem)
        budget_bytes = simulate(problem, everything).peak_bytes - 1
        if free_optimum(problem, budget_bytes) < float("inf"):
            num_possible += 1
            num_met += simulate(problem, shaved(problem, everything, budget_bytes)).peak_bytes <= budget_bytes
    assert num_possible > 5
    assert num_met >= 0.8 * num_possible


@pytest.mark.parametrize("seed", range(12))
def test_values_that_must_be_gone_at_the_border_stay_gone(seed: int) -> None:
    problem = random_problem(seed, 10, share_fixed=0.0, share_pinned=0.0, has_border=True)
    border = problem.border
    assert border is not None
    dropped = {v for op in problem.ops[:border] for v in op.outputs} - set(problem.ops[border].inputs)
    problem = replace(problem, dropped=frozenset(dropped))
    start = save_all(problem)
    # The referee refuses a plan that holds one of them.
    assert simulate(problem, shaved(problem, start, 0)).peak_bytes <= simulate(problem, start).peak_bytes


def test_a_layered_graph_gets_a_plan_at_once() -> None:
    """The retention MILP alone found none for it in 25 s."""
    problem = layered(250, seed=0)
    budget_bytes = int(0.9 * simulate(problem, save_all(problem)).peak_bytes)
    (start,) = free_starts(problem, budget_bytes, None, None)
    simulation = simulate(problem, start)
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.recompute_seconds < 0.03 * problem.runtime_s
    assert not list(free_starts(problem, budget_bytes, 20, None))
