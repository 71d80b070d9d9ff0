"""What the fuzzer found in peaks and roundings stays mended: one small module a kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placemat
from tests.steps import Applied, run_step

F = nn.functional


def _overwritten_part(layer: nn.Module, x: Tensor) -> Tensor:
    part = (x * 0.5)[:1]
    part[:1].fill_(0.5)
    return layer(part).square().mean()


def _halves(layer: nn.Module, x: Tensor) -> Tensor:
    left, right = layer(x).chunk(2, -1)
    return left.float().square().mean() + right.float().square().mean()


def _scattered(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = layer(x)
    return {"out": y.split(4, -1)[0].transpose(0, 1), "other": y.split(4, -1)[1].sin()}


def _noisy(layer: nn.Module, x: Tensor) -> Tensor:
    return (layer(x) * torch.normal(x, 0.5)).square().mean()


def _view_of_trained_input(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return [x[:, 1:], layer(x).sin()]


CASES = {
    "a view of an input that has a gradient": (
        lambda: nn.Linear(8, 8),
        _view_of_trained_input,
        torch.randn(64, 8).requires_grad_(),
        lambda out: out[0].square().mean() + out[1].square().mean(),
    ),
    "a part of a storage is overwritten": (lambda: nn.Linear(8, 4), _overwritten_part, torch.randn(16, 5, 8), None),
    "float32 statistics of a 16-bit norm": (lambda: nn.LayerNorm(8), _halves, torch.randn(64, 8).bfloat16(), None),
    "an output whose strides leave gaps": (
        lambda: nn.Linear(8, 8),
        _scattered,
        torch.randn(2, 5, 8),
        lambda out: out["out"].square().mean(),
    ),
    "a number and a tensor of means": (lambda: nn.Linear(8, 8), _noisy, torch.randn(64, 8), None),
    "numbers that the loss saves": (
        lambda: nn.Linear(8, 8),
        lambda layer, x: layer(x),
        torch.randn(2, 8),
        lambda out: (out * 0.3).square().mean() + (out * 0.7).square().mean(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_measured_peak_is_within_the_predicted_one(name):
    make_layer, function, x, loss_fn = CASES[name]
    model = Applied(make_layer(), function)
    is_mixed = x.dtype == torch.bfloat16

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            out = model(x)
        (loss_fn(out) if loss_fn is not None else out).backward()

    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        placemat.optimize(model, example_args=(x,), budget_fraction=0.0, loss_fn=loss_fn, time_limit_s=5)
    step()
    model.zero_grad()
    measured_bytes = placemat.measure(step).peak_bytes + sum(model.plan.static_bytes.values())
    assert measured_bytes <= model.plan.predicted_peak_bytes


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.9])
def test_part_of_an_input_that_is_overwritten_is_not_read_again(fraction):
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        left, right = x.split(4, -1)
        y = layer(left.tanh().exp())
        right.zero_()
        return (y * left.sin()).square().sum()

    model, make_x = Applied(nn.Linear(4, 4), forward), lambda: torch.randn(16, 8, generator=torch.manual_seed(1))
    expected = run_step(model, (make_x(),))
    placemat.optimize(model, example_args=(make_x(),), budget_fraction=fraction, time_limit_s=5)
    assert run_step(model, (make_x(),)).same_as(expected)


def _returns_view(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer(x) + layer(x.sin()), x.unfold(-1, 2, 1)


def _returns_slice_that_it_reads_twice(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    part = x[1:]
    return layer(part) + layer(part.sin()), part


def _returns_view_of_hooked_input(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x.float().register_hook(lambda g: g * 0.5)  # x itself; of x by its own name Dynamo hooks the tensor
    return layer(x.sin()).cos().sin(), x[1:]


@pytest.mark.parametrize("function", [_returns_view, _returns_slice_that_it_reads_twice, _returns_view_of_hooked_input])
def test_gradient_through_a_view_of_an_input_among_others_is_refused(function):
    model, x = Applied(nn.Linear(8, 8), function), torch.randn(4, 8, requires_grad=True)
    placemat.optimize(model, example_args=(x,), budget_fraction=0.0, time_limit_s=5)
    out, view = model(x)
    with pytest.raises(placemat.UnsupportedFeature, match=r"view of input .*test_fuzz_peaks\.py.*clone\(\)"):
        (out.sum() + view.square().sum()).backward()
    out, _ = model(x)
    out.sum().backward()  # a loss that does not reach it is none of this


def test_trained_products_are_refused():
    x = torch.randn(4, 8)
    for function in (lambda layer, x: layer(x).prod(-1).sum(), lambda layer, x: layer(x).cumprod(-1).sum()):
        with pytest.raises(placemat.UnsupportedFeature, match=r"prod.*test_fuzz_peaks\.py.*zeros"):
            placemat.optimize(
                Applied(nn.Linear(8, 8), function), example_args=(x,), budget_fraction=0.0, time_limit_s=5
            )
    untrained = Applied(nn.Linear(8, 8), lambda layer, x: (layer(x) * x.prod(-1, keepdim=True)).sum())
    placemat.optimize(untrained, example_args=(x,), budget_fraction=0.0, time_limit_s=5)


def test_bilinear_under_autocast_is_refused():
    def optimize(dtype_region: bool) -> None:
        model = Applied(nn.Bilinear(8, 8, 4), lambda layer, x: layer(x, x).float().sum())
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype_region):
            placemat.optimize(model, example_args=(torch.randn(4, 8),), budget_fraction=0.0, time_limit_s=5)

    optimize(False)
    with pytest.raises(placemat.UnsupportedFeature, match=r"Bilinear.*autocast"):
        optimize(True)
