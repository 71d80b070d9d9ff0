"""Whatever schedule somebody hands in: a solve at its simulated peak costs no more than it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from placemat.baselines import recompute_all, save_all
from placemat.cost_models.base import cost_graph
from placemat.graph.capture import capture
from placemat.graph.errors import BudgetTooSmall
from placemat.graph.lower import lower
from placemat.phases import PhasesArgument
from placemat.problem import Problem
from placemat.replay import replay
from placemat.schedule import Schedule, canonical
from placemat.simulate import simulate
from placemat.solve import solve
from tests import models
from tests.instances import random_problem
from tests.min_cut import min_cut_schedule, saved_names, saved_values
from tests.steps import FreeOfWorkspace

PLANS_PER_PROBLEM = 200


def cost_or_inf(problem: Problem, budget_bytes: int, phases: PhasesArgument) -> float:
    """Recompute seconds of a solve without a warm start; inf if it says that nothing fits."""
    try:
        return solve(problem, budget_bytes, gap=0.0, phases=phases).objective_seconds
    except BudgetTooSmall:
        return math.inf


def random_replays(problem: Problem, cut: int, seed: int) -> Iterator[Schedule]:
    """Keep the results of random ops over a cut.

    Those of one op together: where one result is remade, a replay drops its kept sisters until then, which the solver's
    families do not (`placemat.phases`: a value that is carried into a phase is held there).
    """
    rng = np.random.default_rng(seed)
    for _ in range(PLANS_PER_PROBLEM):
        share = rng.random()
        kept_ops = {step for step in range(cut) if rng.random() < share}
        yield replay(problem, {v for step in kept_ops for v in problem.ops[step].outputs}, cut)


def random_runs(problem: Problem, seed: int) -> Iterator[Schedule]:
    """Before every step any earlier ops again, in index order."""
    rng = np.random.default_rng(seed)
    for _ in range(PLANS_PER_PROBLEM):
        share = 0.2 * rng.random()
        computes: list[int] = []
        for step in range(problem.num_steps):
            computes += [o for o in range(step) if problem.ops[o].recomputable and rng.random() < share]
            computes.append(step)
        yield canonical(problem, computes)


def best_of(problem: Problem, schedules: Iterator[Schedule]) -> dict[int, float]:
    """Peak bytes below that of keeping everything -> fewest recompute seconds among the schedules with that peak."""
    high = simulate(problem, save_all(problem)).peak_bytes
    best: dict[int, float] = {}
    for schedule in schedules:
        simulation = simulate(problem, schedule)
        if simulation.peak_bytes < high:
            seconds = best.get(simulation.peak_bytes, math.inf)
            best[simulation.peak_bytes] = min(seconds, simulation.recompute_seconds)
    return best


def check_dominated(problem: Problem, best: dict[int, float], phases: PhasesArgument) -> None:
    for peak_bytes, seconds in best.items():
        assert cost_or_inf(problem, peak_bytes, phases) <= seconds + 1e-9, peak_bytes


@pytest.mark.parametrize("cut", [None, 5, 9])
def test_random_kept_sets_are_dominated(cut: int | None) -> None:
    num_compared = 0
    for seed in range(20):
        problem = random_problem(seed, 14, has_border=True)
        best = best_of(problem, random_replays(problem, cut or problem.border, seed))
        check_dominated(problem, best, None if cut is None else [cut])
        num_compared += len(best)
    assert num_compared > 5


@pytest.mark.parametrize("max_outputs", [1, 3])
def test_random_runs_are_dominated_by_one_phase_per_step(max_outputs: int) -> None:
    num_compared = 0
    for seed in range(12):
        problem = random_problem(seed, 9, max_outputs=max_outputs)
        best = best_of(problem, random_runs(problem, seed))
        check_dominated(problem, best, "every")
        num_compared += len(best)
    assert num_compared > 5


WORKLOADS: dict[str, Callable[[], models.Workload]] = {
    "resnet": models.resnet,
    "transformer": models.transformer,
    "inception": lambda: models.inception(blocks=1),
}


@pytest.mark.parametrize("memory_budget", [pytest.param(0.6, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize("name", WORKLOADS)
def test_what_pytorchs_min_cut_saves_is_dominated(name: str, memory_budget: float) -> None:
    model, args, kwargs, _ = WORKLOADS[name]()
    joint = capture(model.forward, args, kwargs)
    names = saved_names(joint, memory_budget)
    lowering = lower(joint, device="cpu", static_bytes={})
    problem = Problem.from_op_graph(lowering.graph, cost_graph(FreeOfWorkspace(), lowering.graph))
    simulation = simulate(problem, min_cut_schedule(problem, lowering, names))
    assert saved_values(lowering, names)
    assert 0.0 < simulation.recompute_seconds < simulate(problem, recompute_all(problem)).recompute_seconds
    assert simulation.peak_bytes < simulate(problem, save_all(problem)).peak_bytes
    assert cost_or_inf(problem, simulation.peak_bytes, 2) <= simulation.recompute_seconds
