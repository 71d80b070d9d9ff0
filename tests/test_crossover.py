"""Crossover: what incumbent, refused solutions and relaxation agree on is fixed; and the solves that go with it."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from placemat.crossover import LATEST, Crossover
from placemat.linear_model import LinearModel
from placemat.milp import Retention, build_retention
from placemat.phases import find_wants, make_phases
from tests.instances import training_chain


@pytest.fixture
def model() -> Retention:
    problem = training_chain(6)
    phases = make_phases(problem, 2)
    return build_retention(problem, phases, find_wants(problem, phases, set(range(problem.num_steps))))


def solution(model: Retention, kept: set[tuple[int, int]], share: float = 1.0) -> np.ndarray:
    values = np.zeros(len(model.linear.column_names))
    values[[model.s[key] for key in kept]] = share
    return values


def test_without_solutions_all_is_fixed_as_the_incumbent_has_it(model: Retention) -> None:
    keys = sorted(model.s)
    fixed = Crossover().fixed(model, set(keys[:2]), None)
    assert fixed == {key: float(key in keys[:2]) for key in keys}


def test_what_a_solution_has_otherwise_is_free(model: Retention) -> None:
    keys, crossover = sorted(model.s), Crossover()
    crossover.add(model, solution(model, {keys[0], keys[2]}))
    fixed = crossover.fixed(model, {keys[0], keys[1]}, None)
    assert set(keys) - set(fixed) == {keys[1], keys[2]}
    assert fixed[keys[0]] == 1.0


def test_the_oldest_solution_is_forgotten(model: Retention) -> None:
    keys, crossover = sorted(model.s), Crossover()
    for key in keys[: LATEST + 1]:
        crossover.add(model, solution(model, {key}))
    fixed = crossover.fixed(model, set(), None)
    assert set(keys) - set(fixed) == set(keys[1 : LATEST + 1])


def test_what_the_relaxation_keeps_in_part_is_free(model: Retention) -> None:
    keys = sorted(model.s)
    fixed = Crossover().fixed(model, {keys[0]}, solution(model, {keys[0], keys[1]}, share=0.5))
    assert set(keys) - set(fixed) == {keys[0], keys[1]}


def test_a_cutoff_admits_only_what_costs_no_more() -> None:
    linear = LinearModel("two columns")
    cheap, dear = (linear.add_column(name, is_integer=True) for name in ("cheap", "dear"))
    linear.add_row("one", [(cheap, 1.0), (dear, 1.0)], lower=1.0)
    costs = {cheap: 2.0, dear: 3.0}
    assert linear.start(costs, time_limit_s=10.0, gap=0.0, cutoff=2.0)().objective == pytest.approx(2.0)
    beyond = linear.start(costs, time_limit_s=10.0, gap=0.0, cutoff=1.9)()
    assert beyond.status == "infeasible"
    assert beyond.bound == math.inf


def test_a_solve_tells_when_it_is_done() -> None:
    linear = LinearModel("one column")
    linear.add_row("one", [(linear.add_column("x"), 1.0)], lower=1.0)
    solving = linear.start({0: 1.0}, time_limit_s=10.0, gap=0.0)
    while not solving.is_done():
        time.sleep(0.01)
    assert solving().status == "optimal"
