"""Laws of the baselines: valid on any graph, never better than the solver that may do what they do."""

from __future__ import annotations

import pytest

from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.simulate import simulate
from placemat.solve import solve
from tests.instances import random_problem, training_chain

BASELINES = [save_all, recompute_all, chen_sqrt_n]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("seed", range(30))
def test_baselines_are_valid_and_dominated_by_the_solver(baseline, seed: int) -> None:  # type: ignore[no-untyped-def]
    problem = random_problem(seed, 8, has_border=True)
    result = simulate(problem, baseline(problem))
    solved = solve(problem, result.peak_bytes, gap=0.0)
    assert solved.objective_seconds <= result.recompute_seconds
    assert solved.simulation.peak_bytes <= result.peak_bytes


def test_save_all_recomputes_nothing() -> None:
    problem = training_chain(6)
    assert save_all(problem).recomputes == ()


def test_recompute_all_runs_every_layer_but_the_unneeded_last_again_once() -> None:
    problem = training_chain(6)
    assert recompute_all(problem).recomputes == tuple(range(6))


def test_chen_keeps_about_a_square_root_of_the_layers() -> None:
    problem = training_chain(16)
    schedule = chen_sqrt_n(problem)
    assert sorted(schedule.recomputes) == [o for o in range(16) if o % 4 != 3]
    chen_peak = simulate(problem, schedule).peak_bytes
    assert chen_peak < simulate(problem, save_all(problem)).peak_bytes
    assert chen_peak < simulate(problem, recompute_all(problem)).peak_bytes
