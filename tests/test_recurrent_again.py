"""Recurrent layers without dropout run again where the plan says so: their bits, their graphs, their lifetimes."""

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import placemat
from placemat.graph.eager_run import InnerGraph
from placemat.schedule import Compute
from tests.steps import run_step

X = torch.randn(6, 12, 16, generator=torch.Generator().manual_seed(1))
LAYERS = {
    "lstm": lambda: nn.LSTM(16, 16, batch_first=True),
    "gru": lambda: nn.GRU(16, 8, bidirectional=True),
    "rnn": lambda: nn.RNN(16, 16, num_layers=2),
}


class Stack(nn.Module):
    """Recurrent layers with residual connections; (batch, sequence, 16) to a scalar."""

    def __init__(self, make, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x.sin())[0]
        return x.square().mean()


def _optimized(name: str = "lstm", fraction: float = 0.0) -> Stack:
    model = Stack(LAYERS[name])
    return placemat.optimize(model, None, (X,), budget_fraction=fraction, time_limit_s=5)


def _runs_again(plan: placemat.Plan) -> list[str]:
    runs = Counter(step.op for step in plan.schedule.steps if isinstance(step, Compute))
    names = {index: plan.problem.ops[index].name for index, count in runs.items() if count > 1}
    return [name for name in names.values() if name.startswith("eager_forward")]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_again_with_eagers_bits_within_the_budget(name):
    expected = run_step(Stack(LAYERS[name]), (X,))
    model = _optimized(name)
    assert len(_runs_again(model.plan)) >= 3
    for _ in range(2):
        assert run_step(model, (X,)).same_as(expected)
    model.zero_grad()
    measured = placemat.measure(lambda: model(X).backward())
    assert measured.peak_bytes + sum(model.plan.static_bytes.values()) <= model.plan.budget_bytes


def test_no_layer_with_dropout_runs_again():
    model = Stack(lambda: nn.LSTM(16, 16, num_layers=2, dropout=0.3))
    expected = run_step(model, (X,))
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    assert not _runs_again(model.plan)
    assert run_step(model, (X,)).same_as(expected)


def test_a_second_backward_runs_them_once_more():
    model, expected = _optimized(), run_step(Stack(LAYERS["lstm"]), (X,))
    loss = model(X)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))
    assert run_step(model, (X,)).same_as(expected)


def test_a_parameter_that_changed_since_the_forward_is_noticed():
    model = _optimized()
    loss = model(X)
    with torch.no_grad():
        model.layers[1].weight_hh_l0.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_run_their_own_layers_again():
    model = _optimized()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    plain = Stack(LAYERS["lstm"])
    plain.load_state_dict(twin.state_dict())
    assert run_step(twin, (X,)).same_as(run_step(plain, (X,)))
    assert run_step(model, (X,)).same_as(run_step(Stack(LAYERS["lstm"]), (X,)))


def test_nothing_outlives_the_step_or_the_model():
    model = _optimized()
    run_step(model, (X,))
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, InnerGraph)]
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
