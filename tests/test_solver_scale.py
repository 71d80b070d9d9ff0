"""What lets the solver scale: contraction, identical ops, neighbourhoods, wider families, stopping early."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import pytest

from placemat import contraction as contraction_module
from placemat import known_floors
from placemat.baselines import recompute_all, save_all
from placemat.contraction import contract
from placemat.floor import Floor
from placemat.graph.errors import BudgetTooSmall, SolverFailed
from placemat.identical import identical_ops
from placemat.linear_model import LinearModel
from placemat.phases import ladder, make_phases
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.refinement import Refinement, first_grid
from placemat.replay import carried, replay
from placemat.simulate import simulate
from placemat.solve import solve
from tests.bruteforce import free_optimum
from tests.instances import random_problem, training_chain

# The package's attribute of this name is the function.
solve_module = importlib.import_module("placemat.solve")
search_module = importlib.import_module("placemat.search")


@pytest.fixture
def contract_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract problems of any size."""
    monkeypatch.setattr(contraction_module, "EXACT_STEPS", 0)


def gelu_chain() -> Problem:
    """x -> a -> b -> c, all of equal size; backward reads c and x, so that nobody would keep a or b."""
    sizes = {"x": 8, "a": 8, "b": 8, "c": 8, "loss": 1, "gc": 8, "gx": 8}
    reads = {"x": (), "a": (0,), "b": (1,), "c": (2,), "loss": (3,), "gc": (3, 4), "gx": (0, 5)}
    ops = tuple(
        ProblemOp(name, reads[name], (i,), 1.0 + i, recomputable=i < 4, recompute_workspace_bytes=3 * (name == "a"))
        for i, name in enumerate(sizes)
    )
    values = tuple(ProblemValue(name, size, i) for i, (name, size) in enumerate(sizes.items()))
    return Problem(ops, values, border=4)


@pytest.mark.usefixtures("contract_all")
def test_what_nobody_would_keep_runs_again_with_its_reader() -> None:
    problem = gelu_chain()
    contracted = contract(problem, make_phases(problem, 2))
    assert contracted.groups == {3: (1, 2, 3)}
    assert [op.recomputable for op in contracted.problem.ops[:4]] == [True, False, False, True]
    group = contracted.problem.ops[3]
    assert group.runtime_s == 2.0 + 3.0 + 4.0
    assert group.recompute_inputs == (0,)
    assert group.recompute_workspace_bytes == 8  # while b is made from a, and c from b, two of them are there
    dropped = replay(contracted.problem, {0}, 4)
    expanded = contracted.expand(dropped)
    assert expanded.recomputes == (1, 2, 3)
    assert simulate(problem, expanded).peak_bytes == simulate(contracted.problem, dropped).peak_bytes


@pytest.mark.usefixtures("contract_all")
@pytest.mark.parametrize("seed", range(12))
def test_plans_of_a_contracted_problem_hold_for_the_original(seed: int) -> None:
    problem = random_problem(seed, 7, has_border=True)
    low = simulate(problem, recompute_all(problem)).peak_bytes
    for budget_bytes in range(low, simulate(problem, save_all(problem)).peak_bytes):
        try:
            result = solve(problem, budget_bytes, gap=0.0)
        except BudgetTooSmall:
            continue
        assert simulate(problem, result.schedule).peak_bytes <= budget_bytes
        assert result.objective_seconds >= free_optimum(problem, budget_bytes) - 1e-9


@pytest.mark.usefixtures("contract_all")
def test_a_family_says_what_was_decided_beforehand() -> None:
    problem = gelu_chain()
    result = solve(problem, simulate(problem, save_all(problem)).peak_bytes - 1, phases=2)
    assert result.family == "P=2 at the border (2 ops run again only together with their reader)"


@pytest.mark.usefixtures("contract_all")
def test_values_that_must_be_dropped_are_left_to_the_model() -> None:
    problem = replace(gelu_chain(), dropped=frozenset({1}))
    assert contract(problem, make_phases(problem, 2)).problem.ops[1].recomputable


def test_equal_layers_are_found_and_others_are_not() -> None:
    problem = training_chain(40)
    groups = identical_ops(problem)
    assert any(20 in group for group in groups)
    for group in groups:
        ops = [problem.ops[o] for o in group]
        assert len({op.runtime_s for op in ops}) == 1
        assert len({tuple(problem.values[v].bytes for v in op.outputs) for op in ops}) == 1
    slower = replace(problem.ops[20], runtime_s=99.0)
    changed = replace(problem, ops=(*problem.ops[:20], slower, *problem.ops[21:]))
    assert not any(20 in group for group in identical_ops(changed))


def test_names_play_no_part_in_identity() -> None:
    problem = training_chain(40)
    renamed = replace(problem, ops=tuple(replace(op, name=f"n{i}") for i, op in enumerate(problem.ops)))
    assert identical_ops(problem) == identical_ops(renamed)


@pytest.mark.parametrize("seed", range(8))
def test_carried_values_make_the_same_schedule_again(seed: int) -> None:
    problem = random_problem(seed, 9, share_fixed=0.1, has_border=True)
    kept = {v for v in range(len(problem.values)) if (v * 7 + seed) % 3}
    schedule = replay(problem, kept, 4)
    over = {v for v, p in carried(problem, schedule, [4])}
    assert replay(problem, over, 4) == schedule


def test_a_first_grid_has_the_cuts_and_where_a_plan_is_full() -> None:
    problem = training_chain(100)
    assert problem.num_steps > 150
    full = save_all(problem)
    phases = make_phases(problem, 2)
    grid = first_grid(problem, phases, full, simulate(problem, full).peak_bytes)
    assert {99, 100, 101, 199} <= grid
    assert len(grid) < 30


def test_rows_appear_where_a_plan_is_over_the_limit() -> None:
    problem = training_chain(100)
    full = save_all(problem)
    limit_bytes = simulate(problem, full).peak_bytes // 2
    phases = make_phases(problem, 2)
    refinement = Refinement(problem, phases, limit_bytes, {199})
    built = refinement.build()
    before = refinement.size
    answer = built.start(time_limit_s=30.0, gap=0.0)()
    assert answer.values is not None
    refinement.tighten(built, full, simulate(problem, full), answer.values)
    assert refinement.size > before


def test_families_of_a_ladder_lie_within_each_other() -> None:
    problem = training_chain(40)
    families = ladder(problem)
    assert [family.num_phases for family in families] == [2, 8, 80]
    for narrow, wide in itertools.pairwise(families):
        assert set(narrow.cuts) <= set(wide.cuts)
    assert len(ladder(problem, 2)) == 1
    assert len(ladder(training_chain(150))) == 1


def test_a_wider_family_is_cheaper_where_it_can_be() -> None:
    problem = training_chain(10, gradient_bytes=90)
    low, high = (simulate(problem, f(problem)).peak_bytes for f in (recompute_all, save_all))
    budget_bytes = min(low, high) * 2 // 3
    costs = []
    for phases in (2, None):
        try:
            costs.append(solve(problem, budget_bytes, phases=phases).objective_seconds)
        except BudgetTooSmall:
            costs.append(float("inf"))
    assert costs[1] <= costs[0]


def test_interrupt_returns_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    problem = training_chain(9)
    budget_bytes = simulate(problem, recompute_all(problem)).peak_bytes
    budget_bytes = min(budget_bytes, simulate(problem, save_all(problem)).peak_bytes - 1)
    monkeypatch.setattr(LinearModel, "start", interrupt)
    starts = solve_module.starting_schedules(problem, make_phases(problem, 2), budget_bytes)
    assert any(simulate(problem, start).peak_bytes <= budget_bytes for start in starts)
    result = solve(problem, budget_bytes)
    assert (result.status, result.limit) == ("feasible", "interrupt")
    assert simulate(problem, result.schedule).peak_bytes <= budget_bytes


def test_interrupt_without_a_plan_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    problem = training_chain(9)
    monkeypatch.setattr(solve_module, "starting_schedules", lambda *_: [])
    monkeypatch.setattr(search_module.FamilySearch, "relax", interrupt)
    with pytest.raises(KeyboardInterrupt):
        solve(problem, simulate(problem, save_all(problem)).peak_bytes - 1)


def test_not_found_in_time_is_not_called_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = training_chain(9)
    least = solve_module.minimum_budget(problem)
    assert least.proven
    unproven = replace(least, minimum_bytes=least.minimum_bytes + 50, schedule=save_all(problem), proven=False)
    monkeypatch.setattr(solve_module, "starting_schedules", lambda *_: [])
    monkeypatch.setattr(solve_module, "minimum_budget", lambda *_, **__: unproven)
    with pytest.raises(SolverFailed, match="was found in 0 s"):
        solve(problem, least.minimum_bytes, time_limit_s=0.0)


def test_interrupt_returns_the_lowest_floor_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    problem = training_chain(9)
    monkeypatch.setattr(LinearModel, "start", interrupt)
    floor = solve_module.minimum_budget(problem)
    assert floor.interrupted
    assert not floor.proven
    assert simulate(problem, floor.schedule).peak_bytes == floor.minimum_bytes


def test_the_floor_is_that_of_the_widest_family() -> None:
    """A chain whose backward needs 522 bytes if each value is recomputed once, and 269 if anything may run again."""
    num_layers = 12
    ops = [ProblemOp(f"f{i}", (i - 1,) if i else (), (i,), 1.0) for i in range(num_layers)]
    values = [ProblemValue(f"f{i}", 100 + i, i) for i in range(num_layers)]
    for i in range(num_layers):
        v = num_layers + i
        ops.append(ProblemOp(f"b{i}", tuple({num_layers - 1 - i, v - 1}), (v,), 2.0, recomputable=False))
        values.append(ProblemValue(f"b{i}", 50, v))
    problem = Problem(tuple(ops), tuple(values), border=num_layers)
    narrow = solve_module.minimum_budget(problem, phases=2)
    floor = solve_module.minimum_budget(problem, time_limit_s=200.0)
    assert (narrow.minimum_bytes, floor.minimum_bytes) == (522, 269)
    assert narrow.proven
    assert floor.proven
    assert solve(problem, floor.minimum_bytes, time_limit_s=200.0).objective_seconds == 66.0
    with pytest.raises(BudgetTooSmall, match="269"):
        solve(problem, floor.minimum_bytes - 1)


def test_a_budget_that_is_not_tight_does_not_wait_for_the_least_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = training_chain(13)
    quick_bytes = solve_module.minimum_budget(problem, time_limit_s=0.0).minimum_bytes
    searched: list[float] = []

    def search(*_: object, time_limit_s: float, **__: object) -> Floor:
        searched.append(time_limit_s)
        return solve_module.minimum_budget(problem, time_limit_s=time_limit_s)

    monkeypatch.setattr(known_floors, "known_floor", search)
    floor = known_floors.floor_for(problem, quick_bytes, time_limit_s=5.0, progress=lambda _: None)
    assert (floor.minimum_bytes, searched) == (quick_bytes, [])
    assert floor.lower_bound_bytes <= quick_bytes
    known_floors.floor_for(problem, quick_bytes - 1, time_limit_s=5.0, progress=lambda _: None)
    assert searched == [5.0]


def test_a_floor_that_was_not_searched_for_is_not_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = training_chain(14)
    monkeypatch.setattr(known_floors, "_FLOORS", {})
    low = solve_module.minimum_budget(problem)
    quick = replace(low, minimum_bytes=low.minimum_bytes + 9)
    assert known_floors.lowered_floor(problem, quick, low.schedule).minimum_bytes == low.minimum_bytes
    assert not known_floors._FLOORS
