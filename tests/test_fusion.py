"""What plans for fused kernels take to be in registers, and what that leaves of an op's seconds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import placemat
from placemat.cost_models.base import Costs
from placemat.cost_models.fused import fused_costs
from placemat.graph.fusion import find_fusion, fused
from placemat.graph.ir import OpGraph
from tests.test_lower import graph_of


class Chain(nn.Module):
    """a is read by an elementwise op of the forward alone, b by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x) + 1.0
        b = a * 2.0
        return self.second(b).sum()


class Waves(nn.Module):
    """The backward of `sin` reads the product's result, that of `cos` the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sin().cos()).sum()


def value_of(graph: OpGraph, target: str, phase: str = "forward") -> int:
    return next(op.outputs[0] for op in graph.ops if op.target.startswith(target) and op.phase == phase)


def seconds_left(graph: OpGraph, target: str) -> float:
    nothing = (0,) * len(graph.ops)
    costs = fused_costs(Costs((1.0,) * len(graph.ops), nothing, nothing, "ones"), graph)
    return costs.runtime_s[graph.values[value_of(graph, target)].producer]


def test_chains_take_no_memory_where_only_elementwise_ops_read():
    graph = graph_of(Chain().forward, torch.randn(4, 8))
    after = fused(graph)
    assert after.values[value_of(graph, "aten.add.Tensor")].bytes == 0
    kept = value_of(graph, "aten.mul.Tensor")  # a product reads it
    assert after.values[kept].bytes == graph.values[kept].bytes == 4 * 8 * 4


def test_results_that_cross_the_border_take_memory_but_may_be_recomputed_in_registers():
    graph = graph_of(Waves().forward, torch.randn(4, 8))
    sine, cosine = value_of(graph, "aten.sin"), value_of(graph, "aten.cos")
    fusion = find_fusion(graph)
    assert sine not in fusion.inlined
    assert sine in fusion.inlined_again
    assert cosine not in fusion.inlined_again  # a product of the backward reads it


def test_seconds_by_the_traffic_that_is_left():
    graph = graph_of(Chain().forward, torch.randn(4, 8))
    assert seconds_left(graph, "aten.add.Tensor") == pytest.approx(0.5)  # reads, and writes nothing
    assert seconds_left(graph, "aten.mul.Tensor") == pytest.approx(0.5)  # writes, and reads nothing
    assert seconds_left(graph, "aten.addmm") == 1.0


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(Chain(), nn.Tanh()), (torch.randn(4, 8),)


def test_plans_say_what_they_are_for_and_are_run_by_nothing_else(tmp_path):
    model, args = small()
    plan = placemat.plan(model, None, args, budget_fraction=0.0, compiler="inductor", time_limit_s=5)
    plan.save(tmp_path / "plan.json")
    loaded = placemat.Plan.load(tmp_path / "plan.json")
    assert loaded.options["compiler"] == "inductor"
    assert "fused kernels" in loaded.cost_source
    with pytest.raises(placemat.UnsupportedFeature, match="compiler='eager' it needs more"):
        placemat.apply(model, loaded, compiler="eager")
    with pytest.raises(placemat.UnsupportedFeature, match="for fused kernels"):
        loaded.checkpoint_modules()
    placemat.apply(model, loaded)
    assert model.forward.compiler == "inductor"
