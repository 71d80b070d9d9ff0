"""Calls other than the planned one: what a refusal says of them; gradients that a plan was not told of."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import placemat
from tests.steps import run_step


class Optional(nn.Module):
    """Attention with an optional context and a number of repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.c = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None, *, repeat: int = 0) -> torch.Tensor:
        context = x if context is None else context
        for _ in range(repeat + 1):
            x = x + F.scaled_dot_product_attention(self.q(x), self.c(context), context)
        return x.sum()


X, CONTEXT = torch.randn(2, 4, 8), torch.randn(2, 6, 8)


def optional_at_its_floor() -> nn.Module:
    torch.manual_seed(0)
    model, example = Optional(), ((X,), {"context": CONTEXT})
    return placemat.optimize(model, placemat.minimum_budget(model, *example), *example)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((X,), {"context": CONTEXT, "repeat": 3}, r"argument repeat is extra \(3\)"),
        # By position: still the same argument.
        pytest.param((X, CONTEXT), {"repeat": 3}, r"argument repeat is extra \(3\)", marks=pytest.mark.slow),
        ((X.repeat(4, 1, 1),), {}, r"argument context is not given \(planned: float32 \(2, 6, 8\) on cpu\)"),
        ((X.repeat(4, 1, 1),), {"context": CONTEXT.repeat(4, 1, 1)}, r"x is float32 \(8, 4, 8\).*planned: float32 \(2"),
        pytest.param(
            *((X.clone().requires_grad_(),), {"context": CONTEXT, "repeat": 3}, "x is .*requires a gradient"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_call_that_does_not_fit_the_budget_is_compared_with_the_planned_one(args, kwargs, words):
    model = optional_at_its_floor()
    with pytest.raises(placemat.BudgetTooSmall, match=words) as caught:
        model(*args, **kwargs)
    assert caught.value.minimum_budget_bytes > model.plan.budget_bytes
    assert str(caught.value.minimum_budget_bytes) in str(caught.value)


def test_state_that_changed_the_forward_is_named_when_arguments_did_not():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    placemat.optimize(model, placemat.minimum_budget(model, (X,)), (X,))
    model(X)
    model[2].weight = nn.Parameter(torch.randn(64, 8))
    model[2].bias = nn.Parameter(torch.randn(64))
    with pytest.raises(placemat.BudgetTooSmall, match="Python state outside of them"):
        model(X)


@pytest.fixture(scope="module")
def applied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    return placemat.apply(model, placemat.plan(model, None, (X,), budget_fraction=0.0, time_limit_s=5))


@pytest.mark.parametrize(
    ("x", "autocast", "training", "words"),
    [
        (X, True, True, r"autocast on cpu is bfloat16 \(planned: off\)\. Remedy: the torch\.autocast that"),
        (X, False, False, r"modules in training is 0 of 4 \(planned: 4 of 4\)\. Remedy: model\.train\(\) or"),
        (X[:1], False, True, r"argument input is float32 \(1, 4, 8\).*Remedy: a DataLoader's last"),
        (
            X[:, :3],
            False,
            True,
            r"argument input is float32 \(2, 3, 8\).*Remedy: give argument input the planned shape",
        ),
        (X.double(), False, True, r"argument input is float64.*Remedy: give argument input as torch\.float32; plan"),
    ],
)
def test_call_that_an_applied_plan_is_not_for_gets_the_remedy_that_fits(applied, x, autocast, training, words):
    applied.train(training)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), pytest.raises(placemat.PlanMismatch) as caught:
        applied(x)
    message = str(caught.value)
    assert re.match(r"This call is not one that was planned", message)
    assert re.search(words, message)
    assert ("drop_last" in message) == (len(x) < len(X))
    assert "graph" not in message or x.dtype == torch.float64  # a double meets float weights: there is no graph at all


def test_state_that_changed_the_graph_of_an_applied_plan_is_named(applied):
    changed = copy.deepcopy(applied).train()
    changed[1].p = 0.25
    with pytest.raises(placemat.PlanMismatch, match=r"Python state outside of them.*gives graph \w+\. Remedy: plan"):
        changed(X)
    other = dataclasses.replace(applied.plan, torch_version="1.0")
    with pytest.raises(placemat.PlanMismatch, match=r"^The plan was made with torch 1\.0, and this is torch 2"):
        placemat.apply(placemat.restore(changed), other)(X)


def accumulated(declared: bool) -> list[warnings.WarningMessage]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    placemat.optimize(model, None, (X,), budget_fraction=0.0, accumulate_grad=declared, time_limit_s=5)
    run_step(model, (X,), loss_fn=torch.sum)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", placemat.UndeclaredGradients)
        for _ in range(3):
            model(X).sum().backward()
    return [w for w in told if w.category is placemat.UndeclaredGradients]


def test_gradients_that_were_not_declared_are_told_of_once():
    (warning,) = accumulated(declared=False)
    assert "gradients of 576 bytes" in str(warning.message)
    assert "accumulate_grad=True" in str(warning.message)
    assert re.search(r"up to \d+ with them, \d+ more than the budget of \d+", str(warning.message))
    assert warning.filename == __file__


def test_gradients_that_come_between_forward_and_backward_are_told_of():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    loss = model(X).sum()
    sum(p.square().sum() for p in model.parameters()).backward()
    with pytest.warns(placemat.UndeclaredGradients):
        loss.backward()


def test_declared_gradients_are_nothing_to_warn_of():
    assert accumulated(declared=True) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(F.gelu(self.inside(x)), self.inside.weight)).sum()


def test_one_backward_through_two_calls_tells_of_the_weights_that_are_used_twice():
    model = placemat.optimize(Tied(), example_args=(X,), budget_fraction=0.0, time_limit_s=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", placemat.RoundingDiffers)
        for _ in range(2):
            model(X).backward()  # a backward for each call is eager's
            model.zero_grad()
    with pytest.warns(placemat.RoundingDiffers, match=r"several calls .* inside\.weight several times.*Remedy"):
        (model(X) + model(2 * X)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", placemat.RoundingDiffers)  # told once
        model.zero_grad()
        (model(X) + model(2 * X)).backward()


def test_one_backward_through_two_calls_of_a_module_without_tied_weights_is_not_told_of():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    placemat.optimize(model, example_args=(X,), budget_fraction=0.0, time_limit_s=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", placemat.RoundingDiffers)
        (model(X) + model(2 * X)).sum().backward()


@pytest.mark.parametrize(("budget", "num_warnings"), [({"budget_fraction": 0.5}, 1), ({"budget_bytes": "1 MiB"}, 0)])
def test_gradients_cleared_after_forward_are_told_of_if_there_is_no_room_for_both(budget, num_warnings):
    x = torch.randn(16, 32)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())))
    placemat.optimize(model, example_args=(x,), **budget, recompute=["1"], time_limit_s=5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", placemat.UndeclaredGradients)
        for _ in range(3):
            loss = model(x).sum()
            model.zero_grad(set_to_none=True)
            loss.backward()
    assert [w.category for w in told] == [placemat.UndeclaredGradients] * num_warnings
