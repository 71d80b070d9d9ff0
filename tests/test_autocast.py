"""Autocast around and inside the forward: gradients are eager's bit for bit, or the step is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placemat

LOW = (torch.bfloat16, torch.float16)


class Region(nn.Module):
    """Three products; the middle one in a region of its own."""

    def __init__(self, region: Callable[[], torch.autocast]) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x))
        with self.region():
            y = F.gelu(self.middle(y if torch.is_autocast_enabled("cpu") else y.float()))
        return self.last(y)


def _full_precision() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def _low_precision() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def _gradients(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    with torch.autocast("cpu", dtype=dtype):
        output = model(x)
    output.float().pow(2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("region", [_full_precision, _low_precision])
def test_regions_inside_the_forward_keep_their_precision_in_backward(region, dtype):
    model, x = Region(region), torch.randn(64, 32)
    planned = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=dtype):
        placemat.optimize(planned, None, (x,), budget_fraction=0.0, time_limit_s=5)
    expected, got = _gradients(model, x, dtype), _gradients(planned, x, dtype)
    assert len(got) == 6
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))
    assert not planned.plan.runs_original


def test_backward_inside_autocast_is_refused_where_it_changes_gradients():
    model, x = Region(_full_precision), torch.randn(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        placemat.optimize(model, None, (x,), budget_fraction=0.0, time_limit_s=5)
        loss = model(x).float().pow(2).mean()
        with pytest.raises(placemat.UnsupportedFeature, match="after the autocast block"):
            loss.backward()


def test_backward_inside_autocast_runs_where_it_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(64, 32)
    planned = copy.deepcopy(model)
    for each in (model, planned):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if each is planned:
                placemat.optimize(each, None, (x,), budget_fraction=0.0, time_limit_s=5)
            each(x).float().pow(2).mean().backward()
    for expected, got in zip(model.parameters(), planned.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        assert torch.equal(expected.grad, got.grad)


def test_float16_with_a_scaler_that_meets_infinities():
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4)), torch.randn(8, 16)
    planned = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.float16):
        placemat.optimize(planned, None, (x,), budget_fraction=0.0, time_limit_s=5)
    scales = []
    for each in (model, planned):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = each(x)
            scaler.scale(output.float().pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] < 2.0**22
    for expected, got in zip(model.parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_a_parameter_changed_between_forward_and_backward_is_noticed():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(64, 32)
    placemat.optimize(model, None, (x,), budget_fraction=0.0, time_limit_s=5)
    loss = model(x).mean()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Shared(nn.Module):
    """One linear layer, used as a function of (module, input) says."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(32, 32), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def bf16(enabled: bool = True, cache: bool | None = None) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled, cache_enabled=cache)


def _twice_in_a_region(m, x):
    with bf16():
        return m.layer(torch.tanh(m.layer(x))).float() + m.layer(x)


def _in_two_regions_and_in_full(m, x):
    with bf16():
        y = m.layer(torch.tanh(m.layer(x)))
    y = m.layer(y.float())
    with bf16():
        y = m.layer(torch.tanh(m.layer(y)))
    return m.layer(y.float()).tanh() + m.layer(x)


def _in_a_region_without_cache(m, x):
    with bf16(cache=False):
        y = m.layer(torch.tanh(m.layer(x)))
    return y.float()


def _cast_by_hand(m, x):
    w = m.layer.weight
    with bf16():
        y = F.linear(F.linear(x, w.bfloat16()), w.bfloat16())
        y = F.linear(F.linear(y, w), w) + F.linear(x, w)
    return y.float()


def _in_two_regions_inside_a_disabled_one(m, x):
    with bf16(enabled=False):
        with bf16():
            y = m.layer(x)
        with bf16():
            y = m.layer(y)
    return y.float()


def _around_a_disabled_region(m, x):
    y = m.layer(torch.tanh(m.layer(x)))
    with bf16(enabled=False):
        y = m.layer(m.layer(y.float()).tanh())
    return m.layer(y) + m.layer(x)


SHARED = (
    _twice_in_a_region,
    _in_two_regions_and_in_full,
    _in_a_region_without_cache,
    _cast_by_hand,
    _in_two_regions_inside_a_disabled_one,
    _around_a_disabled_region,
)


@pytest.mark.parametrize("outer", [None, True, False])  # no region around the forward, or one with or without a cache
@pytest.mark.parametrize("forward", SHARED)
def test_a_weight_is_cast_as_often_as_in_eager(forward, outer):
    torch.manual_seed(0)
    model, leaf = Shared(forward), torch.randn(16, 32, requires_grad=True)
    planned, outcomes = copy.deepcopy(model), []
    for each in (model, planned):
        leaf.grad = None
        x = leaf * 1.0  # of a tensor that is no leaf autocast keeps no cast
        with bf16(enabled=outer is not None, cache=outer):
            if each is planned:
                placemat.optimize(each, None, (x,), budget_fraction=0.0, time_limit_s=5)
            output = each(x)
        output.float().pow(2).sum().backward()
        outcomes.append([output, *(p.grad for p in each.parameters()), leaf.grad])
    assert all(torch.equal(e, g) for e, g in zip(*outcomes, strict=True) if e is not None)
    assert not planned.plan.runs_original


@pytest.mark.parametrize("regions", ["one region", "one each", "no cache", "a backward each"])
def test_calls_that_share_casts_in_eager_are_not_summed_otherwise(regions):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(16, 32)
    planned, outcomes = copy.deepcopy(model), []
    with bf16(cache=regions != "no cache"):
        placemat.optimize(planned, None, (x,), budget_fraction=0.0, accumulate_grad=True, time_limit_s=5)
    for each in (model, planned):
        with bf16(cache=regions != "no cache"):
            first = each(x).float().sum()
            second = None if regions == "one each" else each(2 * x).float().pow(2).sum()
        if second is None:
            with bf16():
                second = each(2 * x).float().pow(2).sum()
        if regions == "a backward each":
            first.backward()
            second.backward()
        elif regions == "one region" and each is planned:
            with pytest.raises(placemat.UnsupportedFeature, match=r"several calls.*one torch.autocast region"):
                (first + second).backward()
            assert all(p.grad is None for p in each.parameters())
            return
        else:
            (first + second).backward()
        outcomes.append([p.grad for p in each.parameters()])
    assert all(torch.equal(e, g) for e, g in zip(*outcomes, strict=True))
