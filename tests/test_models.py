"""GPT-2, ResNet-50 and a U-Net at five budgets: eager's bits, and the allocator's peak within the budget.

Small versions by default; the full ones are marked slow. GPT-2 has no op whose workspace is only bounded, so its
predicted peak must be the measured one to the byte.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import placemat
from placemat.graph.static import static_bytes
from tests import models
from tests.steps import run_step

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
QUICK = (0.0,)  # of the small models; the other fractions are slow
SMALL: dict[str, Callable[[], models.Workload]] = {
    "gpt2": lambda: models.gpt2(layers=2, width=64, sequence=32, batch=2),
    "resnet": lambda: models.resnet(),
    "unet": lambda: models.unet(levels=3, width=8, size=32, batch=2),
}
FULL: dict[str, Callable[[], models.Workload]] = {
    "gpt2": lambda: models.gpt2(),
    "resnet50": lambda: models.resnet50(),
    "unet": lambda: models.unet(),
}
EXACT = ("gpt2",)


def check(name: str, work: models.Workload, fraction: float, time_limit_s: float) -> None:
    model, args, kwargs, loss_fn = work
    loss_fn = loss_fn or (lambda output: output.loss)
    expected = run_step(model, args, kwargs, loss_fn)
    placemat.optimize(model, None, args, kwargs, budget_fraction=fraction, loss_fn=loss_fn, time_limit_s=time_limit_s)
    plan = model.plan
    assert run_step(model, args, kwargs, loss_fn).same_as(expected)

    def step() -> None:
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        loss.backward()

    measured = sum(static_bytes(model, args, kwargs).values()) + placemat.measure(step).peak_bytes
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert measured <= plan.budget_bytes
    if name in EXACT:
        assert measured == plan.predicted_peak_bytes
        assert (plan.recompute_seconds > 0) == (fraction < 1)


@pytest.mark.parametrize("fraction", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FRACTIONS])
@pytest.mark.parametrize("name", SMALL)
def test_small_model(name, fraction):
    check(name, SMALL[name](), fraction, time_limit_s=5)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", FULL)
def test_full_model(name, fraction):
    check(name, FULL[name](), fraction, time_limit_s=30)


@pytest.mark.slow
def test_full_gpt2_below_the_floor_names_it():
    model, args, kwargs, _ = models.gpt2()
    floor = placemat.minimum_budget(model, args, kwargs)
    with pytest.raises(placemat.BudgetTooSmall, match=f"{floor} bytes") as caught:
        placemat.plan(model, floor - 1, args, kwargs)
    assert caught.value.source is not None
    assert "modeling_gpt2.py" in caught.value.source or "transformers" in caught.value.source
    plan = placemat.plan(model, floor, args, kwargs)
    assert plan.predicted_peak_bytes <= floor
    assert placemat.minimum_budget(model, args, kwargs) == plan.floor_bytes <= plan.predicted_peak_bytes
