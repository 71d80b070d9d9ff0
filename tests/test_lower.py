"""What lowering makes of views, expanded tensors, several outputs, random ops and overwritten inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from placemat.graph.capture import capture
from placemat.graph.eager_modules import KeptModules
from placemat.graph.ir import OpGraph
from placemat.graph.loss_region import LossRegion
from placemat.graph.lower import RNG_STATE_BYTES, lower
from placemat.graph.static import static_bytes
from tests.steps import make_step


def graph_of(forward, *args, **options) -> OpGraph:
    return lower(capture(forward, args, {}), device="cpu", static_bytes={}, **options).graph


def ops_of(graph: OpGraph, phase: str) -> list[str]:
    return [op.target for op in graph.ops if op.phase == phase]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_views_are_no_ops_and_share_their_base():
    graph = graph_of(lambda w: (w.exp().t()[1:, None].sin() * 2).sum(), weight(5, 7))
    assert ops_of(graph, "forward") == ["aten.exp.default", "aten.sin.default", "aten.mul.Tensor", "aten.sum.default"]
    exp, sin = graph.ops[0], graph.ops[1]
    assert sin.inputs == exp.outputs
    assert graph.values[exp.outputs[0]].bytes == 5 * 7 * 4


def test_expanded_tensor_costs_its_storage():
    graph = graph_of(lambda w: (w.exp().expand(1000, 5) * 2).sum(), weight(1, 5))
    assert graph.values[graph.ops[0].outputs[0]].bytes == 5 * 4


def test_each_result_of_an_op_is_a_value_of_its_own():
    model, args = make_step("branches")
    graph = graph_of(model.forward, *args)
    dropout = next(op for op in graph.ops if op.target == "aten.native_dropout.default")
    assert [graph.values[v].bytes for v in dropout.outputs] == [48 * 64 * 4, 48 * 64]


def test_random_op_can_be_replayed_from_a_saved_state():
    model, args = make_step("branches")
    graph = graph_of(model.forward, *args)
    dropout = next(op for op in graph.ops if op.target == "aten.native_dropout.default")
    (state,) = set(dropout.recompute_inputs) - set(dropout.inputs)
    assert graph.values[state].role == "rng_state"
    assert graph.values[state].bytes == RNG_STATE_BYTES["cpu"] == torch.get_rng_state().nbytes
    assert dropout.recomputable
    assert graph.ops[graph.values[state].producer].index == dropout.index - 1


def test_custom_op_runs_once_and_says_why():
    @torch.library.custom_op("placemat_test::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    opaque.register_fake(lambda x: torch.empty_like(x))
    opaque.register_autograd(lambda ctx, g: g)
    graph = graph_of(lambda w: opaque(w.exp()).sin().sum(), weight(4))
    op = next(op for op in graph.ops if "opaque" in op.target and op.phase == "forward")
    assert not op.recomputable
    assert "placemat_test::opaque is not known to be pure" in str(op.why_not)


def test_reader_of_an_overwritten_input_runs_once():
    def forward(w, x):
        y = torch.sin(x) * w
        x.mul_(2.0)
        return (y * w).sum()

    graph = graph_of(forward, weight(4), torch.randn(4))
    sine = graph.ops[0]
    assert not sine.recomputable
    assert "overwrites" in str(sine.why_not)
    assert any(op.target == "placemat.copy_back" for op in graph.ops)


def test_roles_and_border():
    model, args = make_step("convolutions")
    graph = graph_of(model.forward, *args)
    border = graph.ops[graph.border]
    assert border.phase == "border"
    assert all(op.phase == "forward" for op in graph.ops[: graph.border])
    assert all(op.phase == "backward" for op in graph.ops[graph.border + 1 :])
    gradients = {graph.values[v].bytes for v in graph.ops[-1].inputs}
    assert gradients == {p.numel() * 4 for p in model.parameters()}
    assert all(graph.values[v].pinned for v in graph.ops[-1].inputs)
    assert {v.role for v in graph.values if v.pinned} == {"output", "tangent", "gradient"}


def test_ops_carry_module_and_source():
    model, args = make_step("branches")
    graph = graph_of(model.forward, *args)
    gelu = next(op for op in graph.ops if op.target == "aten.gelu.default")
    assert gelu.module_path == "left.1"
    assert "steps.py" in str(gelu.source)
    assert "self.left" in str(gelu.source)
    backward = next(op for op in graph.ops if op.target == "aten.gelu_backward.default")
    assert backward.module_path == "left.1"


def test_networkx_view_has_the_same_edges():
    model, args = make_step("attention")
    graph = graph_of(model.forward, *args)
    view = graph.to_networkx()
    assert view.number_of_nodes() == len(graph.ops)
    assert {(a, b) for a, b in view.edges} == {
        (graph.values[v].producer, op.index) for op in graph.ops for v in op.inputs
    }
    assert view.nodes[0]["target"] == graph.ops[0].target


class _TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x).tanh()
        return self.a(h).sum(), self.b(h).sum()


def test_unused_tangent_takes_its_branch_out_of_the_backward():
    model, x = _TwoLosses(), torch.randn(3, 4)
    whole = graph_of(model.forward, x)
    first = graph_of(model.forward, x, loss=LossRegion(frozenset({0})))
    assert len(first.ops) < len(whole.ops)
    gradients = [first.values[v].bytes for v in first.ops[-1].inputs]
    assert sorted(gradients) == sorted(p.numel() * 4 for m in (model.trunk, model.a) for p in m.parameters())


class _Drawn(nn.Module):
    """The gradient of `a` is zeros that depend on no tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.b(x).sum(), torch.normal(self.a(x), 0.5).tanh().sum()


def test_zeros_of_a_draw_are_absent_with_its_tangents():
    model, x = _Drawn(), torch.randn(3, 4)
    first, second = (graph_of(model.forward, x, loss=LossRegion(frozenset({i}))) for i in (0, 1))
    made = [[graph.values[v].bytes for v in graph.ops[-1].inputs] for graph in (first, second)]
    assert [sorted(sizes) for sizes in made] == [
        sorted(p.numel() * 4 for p in m.parameters()) for m in (model.b, model.a)
    ]


def test_static_bytes_count_storages_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model.register_buffer("window", torch.zeros(100)[:3])
    x = torch.randn(2, 8)
    counted = static_bytes(model, (x, x[0]), {"again": x}, accumulate_grad=True)
    assert counted == {
        "parameters": (64 + 8 + 8) * 4,
        "buffers": 400,
        "inputs": 64,
        "existing gradients": (64 + 8 + 8) * 4,
    }


@pytest.mark.parametrize("name", ["branches", "attention", "convolutions"])
def test_ops_read_only_what_came_before(name):
    model, args = make_step(name)
    graph = graph_of(model.forward, *args)
    for op in graph.ops:
        assert all(graph.values[v].producer < op.index for v in op.inputs)
        assert all(graph.values[v].producer == op.index for v in op.outputs)


@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.mse_loss,
        nn.functional.smooth_l1_loss,
        nn.functional.soft_margin_loss,
        lambda a, b: nn.functional.mse_loss(a, b, reduction="none").sum(),
    ],
)
def test_scalar_loss_costs_the_storage_that_its_kernel_leaves(loss):
    w, target = weight(30, 40), torch.rand(30, 40)
    graph = graph_of(lambda w: loss(w.sigmoid(), target) * 2, w)
    last = max(op.index for op in graph.ops if op.phase == "forward") - 1
    assert graph.values[graph.ops[last].outputs[0]].bytes == loss(w, target).untyped_storage().nbytes()


def test_storages_are_rounded_as_their_allocator_rounds_them():
    def sizes(device):
        with torch.device(device):
            model, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), torch.empty(7, 3)
        joint = capture(model.forward, (x,), {}, KeptModules.find(model, ()))
        static = static_bytes(model, (x,), {})
        return static, lower(joint, device=device, static_bytes=static).graph

    static, graph = sizes("cpu")
    assert (static["parameters"], static["inputs"]) == (4 * (15 + 5), 4 * 21)
    assert {v.bytes for v in graph.values if v.role == "output"} == {4 * 35}
    static, graph = sizes("meta")  # stands for a GPU, whose allocator gives out blocks of 512 bytes
    assert (static["parameters"], static["inputs"]) == (2 * 512, 512)
    assert {v.bytes for v in graph.values} == {512}
