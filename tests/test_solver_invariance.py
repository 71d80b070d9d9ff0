"""What must not change a plan or its cost: units, bytes that are always there, the process, its own peak as budget."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from placemat.baselines import save_all
from placemat.floor import minimum_budget
from placemat.phases import PhasesArgument
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule
from placemat.simulate import simulate
from placemat.solve import SolveResult, solve
from tests.instances import random_problem, relabelled, training_chain

# Several outputs, workspaces, pinned values, ops that may not be recomputed; (problem, family).
INSTANCES: list[tuple[Problem, PhasesArgument]] = [
    (training_chain(8), None),
    (training_chain(6), 4),
    (random_problem(6, 12, has_border=True), None),
    (random_problem(13, 12, max_outputs=3), "every"),
    (random_problem(24, 14, max_outputs=3, has_border=True), (3, 7, 10)),
]


@functools.cache
def budgets(problem: Problem, phases: PhasesArgument, count: int) -> list[int]:
    """`count` budgets, evenly from the floor of the family to one byte below what keeping everything needs."""
    low = minimum_budget(problem, phases=phases).minimum_bytes
    high = simulate(problem, save_all(problem)).peak_bytes - 1
    assert low < high, "an instance that has no choice says nothing"
    return sorted({low + (high - low) * i // (count - 1) for i in range(count)})


def optimum(problem: Problem, budget_bytes: int, phases: PhasesArgument) -> SolveResult:
    result = solve(problem, budget_bytes, gap=0.0, phases=phases)
    assert result.status == "optimal"
    return result


@pytest.mark.parametrize(("problem", "phases"), INSTANCES)
def test_cost_never_rises_and_a_plans_own_peak_is_budget_enough(problem: Problem, phases: PhasesArgument) -> None:
    results = [optimum(problem, budget_bytes, phases) for budget_bytes in budgets(problem, phases, 5)]
    costs = [result.objective_seconds for result in results]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    for result in results:
        again = optimum(problem, result.simulation.peak_bytes, phases)
        assert again.objective_seconds == result.objective_seconds


@pytest.mark.parametrize(("byte_unit", "second_unit"), [(2**30, 2.0**-40), (10**9 + 7, 2.0**20)])
@pytest.mark.parametrize(("problem", "phases"), INSTANCES)
def test_units_of_bytes_and_seconds_do_not_matter(
    problem: Problem, phases: PhasesArgument, byte_unit: int, second_unit: float
) -> None:
    ops = tuple(
        replace(
            op,
            runtime_s=op.runtime_s * second_unit,
            far_s=op.far_s * second_unit,
            workspace_bytes=op.workspace_bytes * byte_unit,
            recompute_workspace_bytes=op.recompute_workspace_bytes * byte_unit,
        )
        for op in problem.ops
    )
    values = tuple(replace(value, bytes=value.bytes * byte_unit) for value in problem.values)
    scaled = replace(problem, ops=ops, values=values, static_bytes=problem.static_bytes * byte_unit)
    for budget_bytes in budgets(problem, phases, 3):
        expected = optimum(problem, budget_bytes, phases).objective_seconds * second_unit
        # One byte less than the next whole unit holds no more than the unit before it does.
        for scaled_bytes in (budget_bytes * byte_unit, (budget_bytes + 1) * byte_unit - 1):
            assert optimum(scaled, scaled_bytes, phases).objective_seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("problem", "phases"), INSTANCES)
def test_static_bytes_only_shift_the_budget(problem: Problem, phases: PhasesArgument) -> None:
    more_bytes = 7 * 2**33 + 1
    shifted = replace(problem, static_bytes=problem.static_bytes + more_bytes)
    assert budgets(shifted, phases, 3) == [b + more_bytes for b in budgets(problem, phases, 3)]
    for budget_bytes in budgets(problem, phases, 3):
        expected = optimum(problem, budget_bytes, phases)
        assert optimum(shifted, budget_bytes + more_bytes, phases).objective_seconds == expected.objective_seconds


@pytest.mark.parametrize(("problem", "phases"), INSTANCES)
def test_indices_of_values_do_not_matter(problem: Problem, phases: PhasesArgument) -> None:
    for budget_bytes, seed in zip(budgets(problem, phases, 3), itertools.count()):
        other = optimum(relabelled(problem, seed), budget_bytes, phases)
        assert other.objective_seconds == optimum(problem, budget_bytes, phases).objective_seconds


def as_text(schedule: Schedule) -> list[str]:
    return [f"run {step.op}" if isinstance(step, Compute) else f"free {step.value}" for step in schedule.steps]


def plans() -> list[object]:
    """Everything that a solve says of the instances but how long it took."""
    said: list[object] = []
    for problem, phases in INSTANCES:
        low, mid, _ = budgets(problem, phases, 3)
        said.append(as_text(minimum_budget(problem, phases=phases).schedule))
        for budget_bytes in (low, mid):
            result = solve(problem, budget_bytes, phases=phases)
            said.append([as_text(result.schedule), result.lower_bound_seconds.hex(), result.status, result.family])
    return said


def test_every_process_makes_the_same_plans() -> None:
    code = "import json; from tests.test_solver_invariance import plans; print(json.dumps(plans()))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
    )
    assert json.loads(told.stdout) == plans()
