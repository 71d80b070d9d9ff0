"""placemat.backend: graphs of the user's own torch.compile, planned under a budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placemat
from placemat.training_state import same_bits
from tests.steps import Branches, make_step, run_step

OPTIONS: dict[str, Any] = {"time_limit_s": 0.3, "progress": False}


def compiled(function: Any, backend: Any, **options: Any) -> Any:
    return torch.compile(function, **{"fullgraph": True, "dynamic": False, **options}, backend=backend)


def measured(model: nn.Module, step: Any) -> int:
    step()
    model.zero_grad()
    return placemat.measure(step).peak_bytes


def test_same_bits_under_the_budget_and_again_for_other_shapes_and_modes() -> None:
    model, args = make_step("branches")
    expected = run_step(model, args)
    backend = placemat.backend(budget_fraction=0.0, **OPTIONS)
    function = compiled(model, backend)
    assert backend.plan is None
    assert run_step(function, args).same_as(expected)
    plan = backend.plan
    assert plan.recompute_seconds > 0
    assert not plan.runs_original
    assert plan.static_bytes["parameters"] == sum(p.nbytes for p in model.parameters())
    peak = measured(model, lambda: function(*args).backward()) + sum(plan.static_bytes.values())
    assert peak <= plan.predicted_peak_bytes <= plan.budget_bytes
    shorter = (args[0][:32],)
    assert run_step(function, shorter).same_as(run_step(model, shorter))
    assert len(backend.plans) == 2
    with torch.no_grad():
        torch.manual_seed(0)
        value = function(*args)
        torch.manual_seed(0)
        assert same_bits(value, model(*args))


def test_a_function_with_its_loss_in_segments() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    model, x, y = copy.deepcopy(eager), torch.randn(64, 32), torch.randint(8, (64,))

    def step(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(x), y)

    backend = placemat.backend(budget_fraction=0.0, segments=2, **OPTIONS)
    compiled(step, backend)(model, x, y).backward()
    step(eager, x, y).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert "2 segments" in backend.plan.summary()


def test_an_ample_budget_runs_what_was_traced() -> None:
    model, args = make_step("branches")
    backend = placemat.backend("1 TiB", **OPTIONS)
    assert run_step(compiled(model, backend), args).same_as(run_step(model, args))
    assert backend.plan.runs_original


class Breaks(Branches):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.item() > 0 else -y


@pytest.mark.parametrize(
    ("make", "budget", "options", "kind", "message"),
    [
        (Branches, "10 KiB", {}, placemat.BudgetTooSmall, "10240 bytes"),
        (Branches, "1 GiB", {"fullgraph": False}, placemat.UnsupportedFeature, "fullgraph=True"),
        (Breaks, "1 GiB", {"fullgraph": False}, placemat.UnsupportedFeature, "fullgraph=True"),
        (Branches, "1 GiB", {"dynamic": True}, placemat.UnsupportedFeature, "dynamic=False"),
        (Branches, "1 GiB", {"mode": "max-autotune"}, placemat.UnsupportedFeature, "mode="),
    ],
    ids=["budget", "partial", "breaks", "dynamic", "mode"],
)
def test_refusals_have_our_names(make: Any, budget: str, options: Any, kind: Any, message: str) -> None:
    torch.manual_seed(0)
    function = compiled(make(), placemat.backend(budget, **OPTIONS), **options)
    for _ in range(2):
        with pytest.raises(kind, match=message) as caught:
            function(torch.randn(48, 64))
        assert not isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)


def test_arguments_are_checked() -> None:
    with pytest.raises(placemat.PlacematError, match="budget_fraction"):
        placemat.backend()
    with pytest.raises(placemat.PlacematError, match="segments"):
        placemat.backend("1 GiB", segments=0)
