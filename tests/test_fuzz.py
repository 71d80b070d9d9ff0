"""Random modules train as they do without placemat, or are refused by name; and what the fuzzer found stays mended."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import placemat
from tests.fuzz import judge
from tests.random_modules import random_programs
from tests.random_operators import StraightThrough
from tests.random_sketch import Program
from tests.steps import run_step

_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def _check(program: Program) -> None:
    verdict = judge(program)
    assert verdict.outcome != "fault", f"{verdict.kind}\n{program.source()}\n{verdict.detail}"


@settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=_CHECKS)
@given(random_programs())
def test_random_modules(program):
    _check(program)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("PLACEMAT_FUZZ_MODELS", "500")), deadline=None, suppress_health_check=_CHECKS)
@given(random_programs())
def test_many_random_modules(program):
    _check(program)


class Idle(nn.Module):
    """Draws random numbers for nothing, from values that nothing else needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        nn.functional.dropout(torch.tanh(y), 0.5)
        torch.bernoulli(torch.sigmoid(y.detach()))
        return nn.functional.dropout(y, 0.5).square().sum()


class RoundTrip(nn.Module):
    """Its input's gradient is the output's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return StraightThrough.apply(x)


class Indexed(nn.Module):
    """Backward reads a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).index_select(0, torch.tensor([1, 0, 1])).sigmoid().sum()


class DropsInPlace(nn.Module):
    """Dropout in place on an input, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.drop(x + 0.0)).sum()


@pytest.mark.parametrize("model_class", [Idle, Indexed])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_step_is_the_same_bit_by_bit(model_class, fraction):
    model, x = model_class(), torch.randn(4, 6)
    expected = run_step(model, (x,))
    placemat.optimize(model, example_args=(x,), budget_fraction=fraction, time_limit_s=5)
    assert run_step(model, (x,)).same_as(expected)


def test_gradient_that_is_an_output_gradient():
    model, x, gradient = RoundTrip(), torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    placemat.optimize(model, example_args=(x,), budget_fraction=0.0, time_limit_s=5)
    model(x).backward(gradient)
    assert torch.equal(x.grad, gradient)


def test_random_numbers_in_the_order_of_memory_are_refused():
    model = DropsInPlace()
    placemat.optimize(model, example_args=(torch.randn(6, 4),), budget_fraction=0.0, time_limit_s=5)
    with pytest.raises(placemat.UnsupportedFeature, match=r"not contiguous.*test_fuzz\.py"):
        placemat.optimize(DropsInPlace(), example_args=(torch.randn(4, 6).t(),), budget_fraction=0.0, time_limit_s=5)
