"""The referee, on a problem small enough to check by hand."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from placemat.baselines import save_all
from placemat.graph.errors import InvalidSchedule
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.schedule import Compute, Free, Schedule, canonical
from placemat.simulate import simulate
from tests.instances import random_problem


def diamond() -> Problem:
    """a (3 bytes) -> b (5) -> d (2) and a -> d; b needs 4 bytes of workspace; d may not be recomputed and is pinned."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("a", bytes=3, seconds=1.0)
    graph.add_node("b", bytes=5, seconds=2.0, workspace_bytes=4)
    graph.add_node("d", bytes=2, seconds=4.0, recomputable=False, pinned=True)
    graph.add_edges_from([("a", "b"), ("b", "d"), ("a", "d")])
    return Problem.from_networkx(graph, static_bytes=10)


def test_save_all_of_the_diamond_by_hand() -> None:
    result = simulate(diamond(), save_all(diamond()))
    # a: 10 + 3; b: 10 + 3 + 5 + 4 workspace; d: 10 + 3 + 5 + 2, then a and b go.
    assert result.timeline == (13, 22, 20, 17, 12)
    assert result.peak_bytes == 22
    assert result.peak_step == 1
    assert result.resident_at_peak == (0,)
    assert result.recompute_seconds == 0.0
    assert result.total_seconds == 7.0


def test_recomputing_a_costs_its_seconds_and_frees_it_in_between() -> None:
    problem = diamond()
    schedule = canonical(problem, [0, 1, 0, 2])
    assert schedule.steps == (
        Compute(0), Compute(1), Free(0), Compute(0), Compute(2), Free(0), Free(1),
    )  # fmt: skip
    assert schedule.recomputes == (0,)
    result = simulate(problem, schedule)
    assert result.recompute_seconds == 1.0
    assert result.timeline == (13, 22, 15, 18, 20, 17, 12)


def test_an_old_copy_counts_until_it_is_replaced() -> None:
    steps = (Compute(0), Compute(0), Compute(1), Compute(2))
    # The second run of a holds the old and the new copy (16), after it there is one (13).
    assert simulate(diamond(), Schedule(steps)).timeline == (13, 16, 22, 20)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Compute(0), Compute(1), Compute(2), Free(2)), "pinned"),
        ((Compute(0), Free(0), Free(0)), "not resident"),
        ((Compute(0), Free(0), Compute(1)), "reads value 0"),
        ((Compute(1),), "index order"),
        ((Compute(0), Compute(1)), "never run"),
        ((Compute(0), Compute(1), Compute(2), Compute(2)), "may not be recomputed"),
        ((Compute(0), Compute(3)), "no op 3"),
        ((Compute(0), Free(7)), "no value 7"),
    ],
)
def test_bad_schedules_are_rejected_by_name(steps: tuple[Compute | Free, ...], message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        simulate(diamond(), Schedule(steps))


def test_a_recomputation_reads_its_own_inputs_and_workspace() -> None:
    ops = (
        ProblemOp("state", (), (0,), 0.0, recomputable=False),
        ProblemOp("random", (), (1,), 1.0, 1, True, (0,), 6),
        ProblemOp("reader", (1,), (), 1.0),
    )
    values = (ProblemValue("state", 2, 0), ProblemValue("mask", 4, 1))
    problem = Problem(ops, values)
    assert max(simulate(problem, canonical(problem, [0, 1, 2])).timeline) == 5  # the state goes at once
    assert simulate(problem, canonical(problem, [0, 1, 1, 2])).timeline[:5] == (2, 7, 2, 12, 4 + 2 - 2)
    with pytest.raises(InvalidSchedule, match="reads value 0"):
        simulate(problem, Schedule((Compute(0), Compute(1), Free(0), Compute(1), Compute(2))))


@pytest.mark.parametrize("seed", range(40))
def test_freeing_later_than_canonical_never_helps(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    computes: list[int] = []
    for step in range(problem.num_steps):
        again = [o for o in range(step) if problem.ops[o].recomputable and rng.random() < 0.4]
        computes += [*again, step]
    schedule = canonical(problem, computes)
    peak = simulate(problem, schedule).peak_bytes
    frees = [i for i, step in enumerate(schedule.steps) if isinstance(step, Free)]
    for i in frees:
        fewer = Schedule(schedule.steps[:i] + schedule.steps[i + 1 :])
        assert simulate(problem, fewer).peak_bytes >= peak
        earlier = (*schedule.steps[: i - 1], schedule.steps[i], schedule.steps[i - 1], *schedule.steps[i + 1 :])
        if isinstance(schedule.steps[i - 1], Compute):
            with pytest.raises(InvalidSchedule):
                simulate(problem, Schedule(earlier))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (0, 0)}, "twice"),
        ({"inputs": (2,)}, "topological order"),
        ({"inputs": (9,)}, "names value 9"),
        ({"runtime_s": float("nan")}, "finite"),
        ({"workspace_bytes": -1}, "whole number"),
        ({"outputs": ()}, "not among the outputs"),
    ],
)
def test_a_malformed_problem_says_what_is_wrong(change: dict[str, object], message: str) -> None:
    good = {"name": "b", "inputs": (0,), "outputs": (1,), "runtime_s": 1.0}
    ops = (
        ProblemOp("a", (), (0,), 1.0),
        ProblemOp(**{**good, **change}),  # type: ignore[arg-type]
        ProblemOp("c", (1,), (2,), 1.0),
    )
    with pytest.raises(ValueError, match=message):
        Problem(ops, tuple(ProblemValue(name, 1, i) for i, name in enumerate("abc")))


def test_from_networkx_checks_order_and_attributes() -> None:
    graph = nx.DiGraph([("a", "b")])
    with pytest.raises(ValueError, match="no attribute `bytes`"):
        Problem.from_networkx(graph)
    nx.set_node_attributes(graph, {n: {"bytes": 1, "seconds": 1.0} for n in graph})
    with pytest.raises(ValueError, match="topological order"):
        Problem.from_networkx(graph, ["b", "a"])
    with pytest.raises(ValueError, match="every node once"):
        Problem.from_networkx(graph, ["a"])
    graph.add_edge("b", "a")
    with pytest.raises(ValueError, match="cycle"):
        Problem.from_networkx(graph)
