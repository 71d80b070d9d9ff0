"""Kinds of forwards and calls that the README's table names, three steps each: bitwise eager's, at the floor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placemat


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    x: Tensor
    scale: float = 2.0


class Net(nn.Module):
    """Two linear layers, a codebook, and a forward given as a function of (module, *arguments)."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16)
        self.register_buffer("codes", torch.randn(8, 16))
        self.run, self.calls = forward, 0

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def codebook(m, x):
    """Vector quantization with exponential moving averages and a counter."""
    m.calls += 1
    h = m.a(x)
    chosen = (h.detach()[:, None] - m.codes[None]).pow(2).sum(-1).argmin(1)
    m.codes.mul_(0.9).add_(F.one_hot(chosen, 8).float().t() @ h.detach(), alpha=0.1)
    return m.b((h + (m.codes[chosen] - h).detach()).tanh()) * m.calls


def randomized_relu(m, x):
    return m.b(F.rrelu(m.a(x), training=True)).tanh()


def pooling_with_indices(m, x):
    values, indices = F.max_pool2d(m.a(x).view(1, 6, 4, 4), 2, return_indices=True)
    return m.b(F.max_unpool2d(values, indices, 2).view(6, 16)).tanh()


def spectrum(m, x):
    return m.b(torch.fft.irfft(torch.fft.rfft(m.a(x)) * 1j, n=16).tanh())


def vmap_inside(m, x):
    return m.b(torch.vmap(lambda row: row.sin() * row.sum())(m.a(x)))


def named_tuples(m, pair):
    h = m.a(pair.first) + pair.second
    return Pair(m.b(h.tanh()), h.detach())


def dataclasses(m, batch):
    return Batch(m.b(m.a(batch.x).tanh()) * batch.scale, batch.scale)


def growing_cache(m, x, cache):
    h = m.a(x)
    cache.append(h.detach())
    return m.b(torch.cat(cache).tanh())


def changed_dict(m, x, state):
    state["steps"] = state.get("steps", 0) + 1
    state["mean"] = m.a(x).detach().mean()
    return m.b(m.a(x).tanh()) * state["steps"]


X = torch.linspace(-1, 1, 96).view(6, 16)
CASES: dict[Callable[..., Any], Callable[[], tuple[Any, ...]]] = {
    codebook: lambda: (X,),
    randomized_relu: lambda: (X,),
    pooling_with_indices: lambda: (X,),
    spectrum: lambda: (X,),
    vmap_inside: lambda: (X,),
    named_tuples: lambda: (Pair(X, X.cos()),),
    dataclasses: lambda: (Batch(X),),
    growing_cache: lambda: (X, []),
    changed_dict: lambda: (X, {}),
}


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in tensors(value)]
    if isinstance(tree, (list, tuple)):
        return [t for value in tree for t in tensors(value)]
    return tensors(vars(tree)) if hasattr(tree, "__dict__") else [torch.tensor(tree)]


def three_steps(model: nn.Module, args: tuple[Any, ...]) -> tuple[list[type], list[Tensor]]:
    torch.manual_seed(5)
    types, seen = [], []
    for _ in range(3):
        model.zero_grad()
        output = model(*args)
        types.append(type(output))
        torch.stack([t.pow(2).sum() for t in tensors(output) if t.requires_grad]).sum().backward()
        seen += [t.detach().clone() for t in (*tensors(output), *tensors(args))]
        seen += [p.grad for p in model.parameters() if p.grad is not None]
    return types, [*seen, *model.buffers(), torch.tensor(getattr(model, "calls", 0)), torch.rand(2)]


@pytest.mark.parametrize("forward", CASES)
def test_three_steps_are_eagers(forward):
    torch.manual_seed(0)
    model = Net(forward)
    planned = copy.deepcopy(model)
    expected_types, expected = three_steps(model, CASES[forward]())
    placemat.optimize(planned, None, CASES[forward](), budget_fraction=0.0, time_limit_s=5)
    types, got = three_steps(planned, CASES[forward]())
    assert types == expected_types
    assert len(got) == len(expected)
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))
    assert not planned.plan.runs_original


def test_parameters_given_by_functional_call_get_the_gradients():
    torch.manual_seed(0)
    model, outcomes = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), []
    for each in (model, placemat.optimize(copy.deepcopy(model), None, (X,), budget_fraction=0.0, time_limit_s=5)):
        given = {name: (2 * p.detach()).requires_grad_() for name, p in each.named_parameters()}
        torch.func.functional_call(each, given, (X,)).pow(2).sum().backward()
        outcomes.append([p.grad for p in given.values()])
        assert all(p.grad is None for p in each.parameters())
    assert all(torch.equal(e, g) for e, g in zip(*outcomes, strict=True))
