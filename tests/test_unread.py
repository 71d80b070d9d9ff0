"""Tensors that a forward makes for nothing: counted into what a step with the original forward takes, or not known."""

import pytest
import torch
from torch import Tensor, nn

import placemat
from tests.steps import Applied, run_step


def _plan(forward):
    return placemat.plan(Applied(nn.Linear(8, 8), forward), "1 GiB", (torch.randn(4, 8),))


def _plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sum()


def _factory(layer: nn.Module, x: Tensor) -> Tensor:
    unread = torch.arange(1000)  # noqa: F841
    return layer(x).sum()


def _chain_of_calls(layer: nn.Module, x: Tensor) -> Tensor:
    unread = (torch.ones(1000) * 2).view(10, 100)
    unread[1:3] = 0.5
    unread.add_(1)
    return layer(x).sum()


def _written_and_read(layer: nn.Module, x: Tensor) -> Tensor:
    read = torch.zeros(4, x.shape[-1])
    read[..., 1:] = x[..., :-1].clone()
    read.masked_fill_(read == 2, 0.0)
    return layer(read).sum()


def _write_by_number(layer: nn.Module, x: Tensor) -> Tensor:
    unread = torch.zeros(1000)
    unread[torch.arange(0, 1000, 2)] = torch.ones(500)
    return layer(x).sum()


def _scan(layer: nn.Module, x: Tensor) -> Tensor:
    unread = x.cumsum(-1)  # noqa: F841
    return layer(x).sum()


def _draw(layer: nn.Module, x: Tensor) -> Tensor:
    unread = torch.rand(1000)  # noqa: F841
    return layer(x).sum()


def _write_by_mask(layer: nn.Module, x: Tensor) -> Tensor:
    unread = torch.zeros(1000)
    unread[torch.ones(1000, dtype=torch.bool)] = 1.0
    return layer(x).sum()


@pytest.mark.parametrize(
    ("forward", "least_bytes"),
    [(_factory, 8000), (_chain_of_calls, 8000), (_written_and_read, 0), (_write_by_number, 10000)],
)
def test_plain_calls_are_counted_and_the_original_forward_runs(forward, least_bytes):
    plan = _plan(forward)
    assert plan.runs_original
    assert plan.eager_bound_bytes >= _plan(_plain).eager_bound_bytes + least_bytes


@pytest.mark.parametrize("forward", [_factory, _chain_of_calls, _written_and_read, _write_by_number])
def test_a_step_of_the_original_forward_takes_no_more_than_its_bound(forward):
    model, x = Applied(nn.Linear(8, 8), forward), torch.randn(4, 8)
    plan = placemat.plan(model, "1 GiB", (x,))
    placemat.optimize(model, plan.eager_bound_bytes, example_args=(x,))
    assert model.plan.runs_original
    static_bytes = sum(plan.static_bytes.values())
    assert placemat.measure(lambda: model(x).backward()).peak_bytes + static_bytes <= plan.eager_bound_bytes


@pytest.mark.parametrize("forward", [_scan, _draw, _write_by_mask])
def test_calls_that_may_take_any_amount_keep_the_original_forward_from_running(forward):
    plan = _plan(forward)
    assert not plan.runs_original
    assert plan.eager_bound_bytes is None


@pytest.mark.parametrize("forward", [_factory, _chain_of_calls, _written_and_read, _scan, _write_by_number])
def test_calls_for_nothing_change_no_bits(forward):
    def model():
        torch.manual_seed(0)
        return Applied(nn.Linear(8, 8), forward)

    x = torch.randn(4, 8)
    expected = run_step(model(), (x,))
    optimized = placemat.optimize(model(), example_args=(x,), budget_fraction=0.0)
    assert run_step(optimized, (x,)).same_as(expected)
