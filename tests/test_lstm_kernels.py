"""One layer of nn.LSTM by its kernels: the bits, strides and saved bytes of its autograd graph."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placemat.graph import lstm_kernels
from placemat.graph.eager_facts import learn
from placemat.graph.eager_ops import ACTIVE, run_backward, run_forward
from placemat.graph.eager_run import Call

SUBSETS = [s for s in itertools.product((True, False), repeat=3) if any(s)]


def _call(needs_x: bool = True, is_grad_enabled: bool = True, hidden: bool = False) -> Call:
    leaves = (torch.zeros(1), (torch.zeros(1), torch.zeros(1))) if hidden else (torch.zeros(1),)
    flat, structure = pytree.tree_flatten((leaves, {}))
    count = len(flat)
    return Call("layer", structure, (None,) * count, (True,) * count, (needs_x,) * count + (True,) * 4, is_grad_enabled)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


class _Only:
    """A registry of one layer."""

    def __init__(self, layer: nn.Module, facts) -> None:
        self.layer, self.known = layer, facts

    def facts(self, key: str):
        return self.known

    def module(self, key: str) -> nn.Module:
        return self.layer


def _learnt(layer: nn.Module, x: Tensor, **kind: bool):
    return learn(layer, _call(**kind), [x, *layer.parameters()])


@pytest.mark.parametrize("shape", [(5, 7, 6), (1, 7, 6), (5, 1, 6)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", SUBSETS)
def test_gradients_are_those_of_the_graph(shape, batch_first, given):
    torch.manual_seed(0)
    layer = nn.LSTM(6, 9, batch_first=batch_first)
    x = _randn(*shape).requires_grad_()
    facts = _learnt(layer, x.detach())
    assert facts.by_kernels
    y, (h, c) = layer(x)
    cotangents = [_randn(*t.shape) if there else None for t, there in zip((y, h, c), given, strict=True)]
    pairs = [(t, g) for t, g in zip((y, h, c), cotangents, strict=True) if g is not None]
    expected = torch.autograd.grad([t for t, _ in pairs], [x, *layer.parameters()], [g for _, g in pairs])
    token = ACTIVE.set(_Only(layer, facts))
    try:
        *results, kept = run_forward("layer", [x.detach(), *layer.parameters()])
    finally:
        ACTIVE.reset(token)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(results, (y, h, c), strict=True))
    both = [x.detach(), *(p.detach() for p in layer.parameters()), *results]
    gradients = run_backward("layer", kept, cotangents, [both[i] for i in sorted(facts.owners)], [0, 1, 2, 3, 4])
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    storages = [t.untyped_storage().data_ptr() for t in gradients]
    assert len(set(storages)) == len(storages)


def test_what_it_holds_is_what_the_graph_holds():
    layer = nn.LSTM(6, 9, batch_first=True)
    x = _randn(5, 7, 6)
    facts = _learnt(layer, x)
    _, left = lstm_kernels.run(layer, facts.call, [x, *layer.parameters()], facts.owners)
    assert left.saved_bytes == facts.saved_bytes > x.nbytes


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.LSTM(6, 9, num_layers=2), {}),
        (lambda: nn.LSTM(6, 9, bidirectional=True), {}),
        (lambda: nn.LSTM(6, 9, bias=False), {}),
        (lambda: nn.LSTM(6, 9, proj_size=3), {}),
        (lambda: nn.LSTM(6, 9).double(), {}),
        (lambda: nn.LSTM(6, 9).eval(), {}),
        (lambda: nn.GRU(6, 9), {}),
        (lambda: nn.LSTM(6, 9), {"hidden": True}),
        (lambda: nn.LSTM(6, 9), {"is_grad_enabled": False}),
    ],
)
def test_other_calls_are_left_to_the_graph(make, kind):
    layer = make()
    parameters = list(layer.parameters())
    call = _call(**kind)
    arguments = [_randn(5, 7, 6).to(parameters[0].dtype), *(_randn(1, 7, 9) for _ in range(call.num_arguments - 1))]
    assert not lstm_kernels.is_for_kernels(layer, call, [*arguments, *parameters])


def test_without_onednn_the_layer_runs_as_it_does_then():
    layer = nn.LSTM(6, 9)
    x = _randn(5, 7, 6)
    facts = _learnt(layer, x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not lstm_kernels.is_for_kernels(layer, facts.call, [x, *layer.parameters()])


def test_a_layer_with_parameters_in_another_order_is_left_to_the_graph():
    layer = nn.LSTM(6, 9)
    weight = layer.weight_ih_l0
    del layer.weight_ih_l0
    layer.weight_ih_l0 = weight
    x = _randn(5, 7, 6)
    assert not _learnt(layer, x).by_kernels
