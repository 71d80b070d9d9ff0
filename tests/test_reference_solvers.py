"""Solvers of other papers, as written here for the race: their plans are legal and fit, the exact ones are exact."""

from __future__ import annotations

import math

import pytest
from ortools.math_opt.python import mathopt

from benchmarks.layered import layered
from benchmarks.reference import chen, segments
from benchmarks.reference.answer import Answer
from benchmarks.reference.checkmate import checkmate
from benchmarks.reference.interval import interval
from benchmarks.reference.rotor import Backward, Chain, Forward, lay_out, rotor, sequences
from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.phases import make_phases
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.schedule import Schedule
from placemat.simulate import simulate
from tests.bruteforce import cheapest, family_optima, free_optimum
from tests.instances import random_problem, training_chain

HEURISTICS = {
    "sqrt(n)": chen.sqrt_n,
    "greedy": chen.greedy,
    "greedy at articulation points": lambda problem, budget: chen.greedy(problem, budget, "articulation points"),
    "rotor": rotor,
}
MODELS = {
    "checkmate": lambda problem, budget: checkmate(problem, budget, 30.0, mathopt.SolverType.HIGHS),
    "interval": lambda problem, budget: interval(problem, budget, 30.0, copies=problem.num_steps),
}


def seconds_of(problem: Problem, budget_bytes: int, answer: Answer) -> float:
    """Recompute seconds of the plan, by the referee, which also finds it legal; inf without one."""
    if answer.schedule is None:
        return math.inf
    simulation = simulate(problem, answer.schedule)
    assert simulation.peak_bytes <= budget_bytes
    return simulation.recompute_seconds


@pytest.mark.parametrize("name", HEURISTICS)
def test_plans_of_heuristics_fit_and_beat_no_optimum(name: str) -> None:
    num_plans = 0
    for seed in range(6):
        problem = random_problem(seed, 7, share_fixed=0.1, has_border=True)
        high = simulate(problem, save_all(problem)).peak_bytes
        for budget_bytes in (high, high - 1, high - 3):
            seconds = seconds_of(problem, budget_bytes, HEURISTICS[name](problem, budget_bytes))
            assert seconds >= free_optimum(problem, budget_bytes) - 1e-9
            num_plans += seconds < math.inf
    assert num_plans > 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_models_are_exact_where_ops_have_one_output(name: str, seed: int) -> None:
    problem = random_problem(seed, 6, max_outputs=1)
    optima = family_optima(problem, make_phases(problem, "every"))
    high = simulate(problem, save_all(problem)).peak_bytes
    budgets = sorted({min(optima) - 1, *(peak for peak in optima if peak <= high)})
    for budget_bytes in budgets:
        answer = MODELS[name](problem, budget_bytes)
        assert answer.status in ("optimal", "infeasible")
        assert seconds_of(problem, budget_bytes, answer) == pytest.approx(cheapest(optima, budget_bytes))
        assert answer.lower_bound_seconds == pytest.approx(cheapest(optima, budget_bytes))


@pytest.mark.parametrize("name", MODELS)
def test_models_hold_for_ops_of_several_outputs(name: str) -> None:
    for seed in range(3):
        problem = random_problem(seed, 6, max_outputs=2, has_border=True)
        optima = family_optima(problem, make_phases(problem, "every"))
        for budget_bytes in sorted(optima)[:2]:
            seconds = seconds_of(problem, budget_bytes, MODELS[name](problem, budget_bytes))
            # Checkmate's op makes all of its outputs again; intervals know each of them.
            assert seconds >= cheapest(optima, budget_bytes) - 1e-9
            assert name == "checkmate" or seconds == pytest.approx(cheapest(optima, budget_bytes))


def test_intervals_of_two_copies_and_no_time_say_so() -> None:
    problem = training_chain(6)
    answer = interval(problem, simulate(problem, save_all(problem)).peak_bytes, time_limit_s=0.0)
    assert (answer.schedule, answer.status) == (None, "none")
    answer = checkmate(problem, simulate(problem, save_all(problem)).peak_bytes, time_limit_s=0.0)
    assert (answer.schedule, answer.status) == (None, "none")


def chain(num_layers: int) -> Problem:
    """Forward ops of unequal size and time, each backward op reading the input and the output of its layer."""
    sizes = [7, 3, 9, 4, 8, 2, 6, 5][:num_layers]
    ops = [ProblemOp(f"f{i}", (i - 1,) if i else (), (i,), 1.0 + i % 3) for i in range(num_layers)]
    values = [ProblemValue(f"f{i}", size, i) for i, size in enumerate(sizes)]
    for i in range(num_layers):
        v, layer = num_layers + i, num_layers - 1 - i
        reads = {layer, v - 1, *([layer - 1] if layer else [])}
        ops.append(ProblemOp(f"b{layer}", tuple(sorted(reads)), (v,), 2.0, recomputable=False))
        values.append(ProblemValue(f"b{layer}", 1, v))
    return Problem(tuple(ops), tuple(values), border=num_layers)


def every_op_a_stage(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> Chain:
    monkeypatch.setattr("benchmarks.reference.rotor.borders_of_blocks", lambda problem, _: range(1, problem.border))
    return Chain.of(problem)


def test_rotor_is_optimal_on_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(4)
    every_op_a_stage(problem, monkeypatch)
    high = simulate(problem, save_all(problem)).peak_bytes
    low = simulate(problem, recompute_all(problem)).peak_bytes
    for budget_bytes in range(low, high + 1):
        seconds = seconds_of(problem, budget_bytes, rotor(problem, budget_bytes))
        optimum = free_optimum(problem, budget_bytes)
        # A persistent plan may not drop in backward what it kept in forward: now and then that costs a little.
        assert optimum <= seconds <= optimum + 2.0


def test_rotor_runs_every_stage_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(7)
    made = every_op_a_stage(problem, monkeypatch)
    assert made.num_stages == 7
    laid_out: list[Schedule] = []
    for sequence in sequences(made):
        assert [item.stage for item in sequence if isinstance(item, Backward)] == list(reversed(range(7)))
        assert all(sum(item == Forward(stage, True) for item in sequence) == 1 for stage in range(7))
        laid_out.append(lay_out(made, sequence))
    peaks = [simulate(problem, schedule).peak_bytes for schedule in laid_out]
    assert laid_out[-1].recomputes == ()
    assert min(peaks) < peaks[-1]


def test_greedy_finds_a_plan_between_the_two_that_need_no_search() -> None:
    problem = training_chain(20)
    high, low = (simulate(problem, plan(problem)) for plan in (save_all, recompute_all))
    root = simulate(problem, chen_sqrt_n(problem))
    assert seconds_of(problem, root.peak_bytes, chen.greedy(problem, root.peak_bytes)) <= root.recompute_seconds
    middle = (high.peak_bytes + root.peak_bytes) // 2
    assert 0.0 < seconds_of(problem, middle, chen.greedy(problem, middle)) < low.recompute_seconds


def test_blocks_end_where_one_small_value_goes_on() -> None:
    """Two residual blocks x + wide(x), whose hidden values are larger."""
    ops, values = [ProblemOp("in", (), (0,), 1.0)], [ProblemValue("in", 10, 0)]
    for block in range(2):
        x = len(ops) - 1
        ops.append(ProblemOp(f"up{block}", (x,), (x + 1,), 1.0))
        ops.append(ProblemOp(f"down{block}", (x + 1,), (x + 2,), 1.0))
        ops.append(ProblemOp(f"add{block}", (x, x + 2), (x + 3,), 1.0))
        values += [
            ProblemValue(f"{n}{block}", b, x + 1 + i)
            for i, (n, b) in enumerate((("up", 40), ("down", 10), ("add", 10)))
        ]
    ops.append(ProblemOp("loss", (len(ops) - 1,), (len(ops),), 1.0))
    values.append(ProblemValue("loss", 1, len(ops) - 1))
    problem = Problem(tuple(ops), tuple(values), border=len(ops))
    assert segments.articulation_points(problem) == [1, 4, 7]
    assert segments.borders_of_blocks(problem, 10) == [1, 4, 7]
    assert segments.borders_of_blocks(problem, 2) == [4]


def test_layered_graphs_are_those_of_the_recipe() -> None:
    problem = layered(250, seed=3)
    assert problem == layered(250, seed=3)
    assert problem != layered(250, seed=4)
    assert problem.num_steps == 250
    sizes = [value.bytes for value in problem.values[1:-1]]
    assert all(size > 0 and size % 10 == 0 for size in sizes)
    assert all(op.inputs for op in problem.ops[1:])
    read = {v for op in problem.ops for v in op.inputs}
    assert read == set(range(249))
    num_edges = sum(len(op.inputs) for op in problem.ops)
    assert 2.5 < num_edges / 250 < 6.0
