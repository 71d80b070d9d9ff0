"""Distance: which values a step reads from afar, what that costs it, and what a recomputation saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import placemat
from placemat.baselines import recompute_all, save_all
from placemat.cost_models import CostFunction, CostTable, OpCost, cost_graph, distance
from placemat.graph.ir import Op, OpGraph, OpSignature, Value
from placemat.problem import Problem, ProblemOp
from placemat.simulate import simulate

MIB = 2**20


@dataclass(frozen=True)
class Flat:
    """Every op takes a second; what is far takes more."""

    far_s_per_byte: float = 0.25 / (16 * MIB)
    source: str = "a test"

    def op_cost(self, op: Op) -> OpCost:
        return OpCost(1.0, 0)


def step(*sizes: int) -> OpGraph:
    """Forward ops, each with one result of so many bytes; the backward reads them, the last one first."""
    signature = OpSignature("aten.mul.Tensor", (), (), ())
    n = len(sizes)
    values = [Value(i, f"v{i}", size, i, "activation", False) for i, size in enumerate(sizes)]
    ops = [Op(i, f"f{i}", signature, "forward", (), (), (i,), True) for i in range(n)]
    ops.append(Op(n, "border", signature, "border", (), (), (), False))
    ops += [Op(n + 1 + k, f"b{k}", signature, "backward", (n - 1 - k,), (), (), False) for k in range(n)]
    return OpGraph(tuple(ops), tuple(values), n, {}, "cpu", "")


def test_far_are_values_with_much_written_in_between_that_fit_a_cache_themselves() -> None:
    graph = step(16 * MIB, 17 * MIB, 32 * MIB, 16 * MIB, 8 * MIB)
    assert distance.far_values_bytes(graph)[:5] == [16 * MIB, 0, 0, 0, 0]
    pinned = replace(graph, values=(replace(graph.values[0], pinned=True), *graph.values[1:]))
    assert not any(distance.far_values_bytes(pinned))
    assert not any(distance.far_values_bytes(step(*[16 * MIB] * 5)))  # 64 MiB and no more lie between


def test_a_step_pays_for_distance_and_a_recomputation_does_not() -> None:
    graph = step(16 * MIB, 64 * MIB, MIB)
    costs = cost_graph(Flat(), graph)
    assert costs.far_s[0] == 0.25
    assert costs.step_s == len(graph.ops) + 0.25
    problem = Problem.from_op_graph(graph, costs)
    assert problem.runtime_s == costs.step_s
    assert simulate(problem, save_all(problem)).total_seconds == costs.step_s
    assert simulate(problem, recompute_all(problem)).recompute_seconds == pytest.approx(3 - 0.25)
    slow = cost_graph(Flat(far_s_per_byte=1.0), graph)
    assert slow.far_s[0] == 1.0  # at most what the op takes: no recomputation earns anything


def test_a_model_that_knows_nothing_of_caches_is_not_asked_for_them() -> None:
    class Simple:
        source = "a test"

        def op_cost(self, op: Op) -> OpCost:
            return OpCost(1.0, 0)

    assert cost_graph(Simple(), step(16 * MIB, 64 * MIB, MIB)).far_s == ()


def test_a_table_of_some_operators_leaves_distance_to_the_other_model() -> None:
    graph = step(16 * MIB, 64 * MIB, MIB)
    assert cost_graph(CostTable({"aten.add": (5.0, 0)}, Flat()), graph).far_s == cost_graph(Flat(), graph).far_s
    assert cost_graph(CostFunction(lambda op: (1.0, 0), Flat()), graph).far_s == ()


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "fast"])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(placemat.PlacematError, match="`far_s_per_byte` of the cost model must be seconds"):
        cost_graph(Flat(rate), step(16 * MIB, 64 * MIB, MIB))


def test_nothing_is_measured_inside_a_profiler(tmp_path: Path) -> None:
    with torch.profiler.profile():
        assert distance.cpu_far_s_per_byte(tmp_path) == 0.0
    assert not list(tmp_path.iterdir())


def test_more_than_an_op_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`far_s` of op 0 \(a\) must be between 0 and `runtime_s`, 1.0; got 2.0"):
        Problem((ProblemOp("a", (), (), 1.0, far_s=2.0),), ())


def test_the_difference_is_measured_once_and_draws_no_random_numbers(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first = distance.cpu_far_s_per_byte(tmp_path)
    assert 0 <= first < 1e-8
    assert torch.equal(torch.random.get_rng_state(), state)
    assert distance.cpu_far_s_per_byte(tmp_path) == first
    assert list(tmp_path.glob("distance.json"))


def test_a_plan_expects_less_where_what_it_recomputes_would_have_been_far() -> None:
    """16 MiB of activations a layer, in meta tensors: nothing runs."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
        x = torch.empty(2**14, 256)
    near, far = (placemat.plan(model, "150 MiB", (x,), cost_model=Flat(rate)) for rate in (0.0, 0.25 / (16 * MIB)))
    assert far.forward_backward_seconds > near.forward_backward_seconds
    assert far.overhead < near.overhead
    assert sum(d.recompute_s == 0.75 for d in far.decisions) > 2
