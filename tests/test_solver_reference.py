"""One phase per step is Checkmate's problem: equal optima, and equal answers to "does it fit at all"."""

from __future__ import annotations

import math
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from benchmarks.reference.checkmate import checkmate
from placemat.baselines import save_all
from placemat.floor import minimum_budget
from placemat.graph.errors import BudgetTooSmall
from placemat.problem import Problem
from placemat.simulate import simulate
from placemat.solve import solve
from tests.instances import random_problem


def random_training_step(seed: int, num_layers: int) -> Problem:
    """A forward with skips, its backward in reverse, some ops that may not be recomputed and some pinned gradients.

    Bytes are of three digits, so that ties are rare; seconds are eighths, so that sums are exact.
    """
    rng = np.random.default_rng(seed)
    graph: nx.DiGraph[str] = nx.DiGraph()

    def add(name: str, reads: list[str], low: int, high: int, recomputable: float, pinned: float = 0.0) -> None:
        graph.add_node(
            name,
            bytes=int(rng.integers(low, high)),
            seconds=int(rng.integers(1, 10)) / 8,
            workspace_bytes=int(rng.integers(0, 30)),
            recomputable=bool(rng.random() < recomputable),
            pinned=bool(rng.random() < pinned),
        )
        graph.add_edges_from((read, name) for read in reads)

    reads: list[list[str]] = []
    for i in range(num_layers):
        skip = int(rng.integers(0, i)) if i and rng.random() < 0.3 else i - 1
        reads.append([f"forward{j}" for j in sorted({i - 1, skip}) if j >= 0])
        add(f"forward{i}", reads[i], 20, 200, recomputable=0.9)
    for i in reversed(range(num_layers)):
        gradients = [f"backward{j}" for j in range(i + 1, num_layers) if f"forward{i}" in reads[j]]
        own = [f"forward{i}"] if rng.random() < 0.5 or not gradients else []
        add(f"backward{i}", [*gradients, *reads[i], *own], 10, 100, recomputable=0.8, pinned=0.3)
    return Problem.from_networkx(graph, border=num_layers, static_bytes=int(rng.integers(0, 50)))


def optimum(problem: Problem, budget_bytes: int, time_limit_s: float = 60.0) -> float:
    """Our optimum with one phase per step, inf if nothing fits."""
    try:
        result = solve(problem, budget_bytes, gap=0.0, phases="every", time_limit_s=time_limit_s)
    except BudgetTooSmall:
        return math.inf
    assert result.status == "optimal"
    assert simulate(problem, result.schedule).peak_bytes <= budget_bytes
    return result.objective_seconds


def compare(problem: Problem, budget_bytes: int, time_limit_s: float = 60.0) -> float:
    """Both optima, after the reference's own schedule has passed the referee."""
    answer = checkmate(problem, budget_bytes)
    assert answer.status in ("optimal", "infeasible")
    assert answer.lower_bound_seconds is not None
    expected = answer.lower_bound_seconds
    if answer.schedule is not None:
        simulation = simulate(problem, answer.schedule)
        assert simulation.peak_bytes <= budget_bytes
        assert simulation.recompute_seconds == pytest.approx(expected)
    assert optimum(problem, budget_bytes, time_limit_s) == pytest.approx(expected)
    return expected


def part_way(problem: Problem, share: float) -> int:
    """A budget between the floor of one phase per step (0) and what keeping everything needs (1)."""
    low = minimum_budget(problem, phases="every").minimum_bytes
    return low + int(share * (simulate(problem, save_all(problem)).peak_bytes - low))


@pytest.mark.parametrize("seed", range(12))
def test_small_problems_agree_at_every_budget(seed: int) -> None:
    problem = random_problem(seed, 8, max_outputs=1)
    high = simulate(problem, save_all(problem)).peak_bytes
    low = minimum_budget(problem, phases="every").minimum_bytes
    costs = [compare(problem, budget_bytes) for budget_bytes in range(low - 1, high + 1)]
    assert costs[0] == math.inf
    assert costs[1] < math.inf
    assert costs[-1] == 0.0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_fifteen_ops_agree(seed: int, share: float) -> None:
    problem = random_problem(seed, 15, max_outputs=1)
    compare(problem, part_way(problem, share))


@pytest.mark.parametrize(
    ("seed", "num_layers", "share"),
    [(1, 8, 0.0), (2, 8, 0.4), (3, 8, 0.2), (1, 11, 0.6), (4, 11, 0.3), (2, 11, 0.7), (1, 15, 0.7)],
)
def test_training_steps_agree(seed: int, num_layers: int, share: float) -> None:
    problem = random_training_step(seed, num_layers)
    assert 0.0 < compare(problem, part_way(problem, share)) < math.inf


def test_a_budget_below_the_floor_is_refused_by_both() -> None:
    problem = random_training_step(1, 11)
    assert compare(problem, part_way(problem, 0.0) - 1) == math.inf


def with_dropped(problem: Problem, seed: int) -> Problem:
    """Half of the values that may be told to be gone at the border."""
    rng, border = np.random.default_rng(seed), problem.border
    assert border is not None
    dropped = {
        v
        for v, value in enumerate(problem.values[:border])
        if problem.ops[v].recomputable and not value.pinned and v not in problem.ops[border].inputs
        if rng.random() < 0.5
    }
    return replace(problem, dropped=frozenset(dropped))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6, 8])
def test_values_that_must_be_gone_at_the_border_agree(seed: int) -> None:
    problem = with_dropped(random_training_step(seed, 5), seed)
    assert problem.dropped
    for share in (0.0, 0.5, 1.0):
        compare(problem, part_way(problem, share))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.7])
@pytest.mark.parametrize("num_ops", [22, 30])
@pytest.mark.parametrize("seed", range(6))
def test_random_problems_agree(seed: int, num_ops: int, share: float) -> None:
    problem = random_problem(seed, num_ops, max_outputs=1)
    compare(problem, part_way(problem, share), time_limit_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("num_layers", [11, 15])
@pytest.mark.parametrize("seed", range(10, 16))
def test_more_training_steps_agree(seed: int, num_layers: int, share: float) -> None:
    problem = random_training_step(seed, num_layers)
    compare(problem, part_way(problem, share), time_limit_s=600.0)
