"""Custom operators: what they draw is eager's, or their call is refused because tracing would leave it out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import placemat
from tests.steps import run_step


@torch.library.custom_op("placemat_tests::add_noise_", mutates_args=("x",))
def add_noise_(x: Tensor) -> None:
    x.add_(torch.rand(x.shape))


@torch.library.custom_op("placemat_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, grad: grad)


class Around(nn.Module):
    """Two linear layers and what a function of the middle does there."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)).tanh()).sum()


def written_and_read(y):
    noise = torch.zeros(8)
    add_noise_(noise)
    return y + noise


def written_and_not_read(y):
    add_noise_(torch.zeros(8))
    return y


def written_again_and_not_read(y):
    noise = torch.zeros(8)
    torch.ops.placemat_tests.add_noise_(noise)
    y = y + noise
    add_noise_(noise)
    return y


def returned_and_not_read(y):
    noisy(y)
    return noisy(y)


X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.mark.parametrize("middle", [noisy, written_and_read])
def test_what_a_custom_operator_draws_is_eagers(middle):
    model = Around(middle)
    expected = run_step(model, (X,))
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    assert run_step(model, (X,)).same_as(expected)
    assert not model.plan.runs_original


@pytest.mark.parametrize(
    ("middle", "calls"),
    [
        (written_and_not_read, r"placemat_tests.add_noise_ 1 time\(s\)"),
        (written_again_and_not_read, r"placemat_tests.add_noise_ 2 time\(s\)"),
        (returned_and_not_read, r"placemat_tests.noisy 2 time\(s\)"),
    ],
)
def test_custom_operator_that_nobody_reads_is_refused_with_its_line(middle, calls):
    with pytest.raises(placemat.UnsupportedFeature, match=rf"{calls}.*not read 1 time.*test_custom_ops.py:\d+"):
        placemat.optimize(Around(middle), None, (X,), budget_fraction=0.0, time_limit_s=5)
