"""Recorded costs, and costs of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import placemat
from placemat.cost_models import CostFunction, CostTable, Measured, OpCost, Recorded, Roofline, device_spec
from placemat.cost_models.custom import as_cost_model
from placemat.cost_models.signature_text import signature_text
from placemat.graph.ir import Op, OpSignature, TensorSpec
from tests.test_cost_models_roofline import op_of, sign

aten = torch.ops.aten


def product(n: int = 8, device: str = "cpu") -> Op:
    spec = TensorSpec((n, n), (n, 1), "float32", device, 4)
    return op_of(OpSignature("aten.mm.default", (spec, spec), (), (spec,)))


def a_model() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Sigmoid()), torch.ones(32, 16)


def test_a_signature_reads_like_a_call() -> None:
    signature = sign(aten.mm.default, torch.ones(2, 3), torch.ones(4, 3).t())
    text = "aten.mm.default(float32[2, 3]{3, 1}, float32[3, 4]{1, 3}) -> float32[2, 4]{4, 1}"
    assert signature_text(signature) == text
    assert signature_text(product(device="cuda").signature) == signature_text(product().signature)
    assert signature_text(product(9).signature) != signature_text(product().signature)


def test_a_recording_gives_the_plan_that_was_measured(tmp_path: Path) -> None:
    model, x = a_model()
    measured = Measured("cpu", cache_dir=tmp_path)
    first = placemat.plan(model, None, (x,), budget_fraction=0.3, cost_model=measured)
    measured.recorded().save(tmp_path / "costs.json")
    recorded = Recorded.load(tmp_path / "costs.json")
    again = placemat.plan(model, None, (x,), budget_fraction=0.3, cost_model=recorded)
    assert again.schedule == first.schedule
    assert again.overhead == first.overhead
    assert again.predicted_peak_bytes == first.predicted_peak_bytes
    assert again.cost_source == f"recorded: {first.cost_source}"
    assert recorded.costs == measured.recorded().costs


def test_what_is_not_recorded_is_refused_or_estimated() -> None:
    recorded = Recorded({signature_text(product().signature): OpCost(2.0, 3)}, source="a test")
    assert recorded.op_cost(product()) == OpCost(2.0, 3)
    with pytest.raises(placemat.PlacematError, match=r"has no figures for .*float32\[9, 9\].*otherwise="):
        recorded.op_cost(product(9))
    base = Roofline(device_spec("L4"))
    cost = Recorded(recorded.costs, source="a test", otherwise=base).op_cost(product(9))
    assert cost.runtime_s == base.op_cost(product(9)).runtime_s
    assert cost.estimated == "they are not in the recording"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "version 1"),
        ('{"version": 9, "costs": {}}', "version 1"),
        ('{"version": 1}', "no table"),
        ('{"version": 1, "costs": {"aten.mm": [1.0]}}', r"must be \[seconds, workspace bytes\]"),
        ('{"version": 1, "costs": {"aten.mm": [-1.0, 0]}}', "finite, not negative"),
        ('{"version": 1, "costs": {"aten.mm": [1.0, 0.5]}}', "an int"),
        ('{"version": 1, "costs": {"aten.mm": [NaN, 0]}}', "finite"),
    ],
)
def test_a_spoilt_recording_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "costs.json").write_text(content)
    with pytest.raises(placemat.PlacematError, match=message):
        Recorded.load(tmp_path / "costs.json")


def test_a_recording_is_for_people_to_read(tmp_path: Path) -> None:
    text = signature_text(product().signature)
    Recorded({text: OpCost(2e-3, 64)}, source="my machine", far_s_per_byte=5e-11).save(tmp_path / "costs.json")
    content = json.loads((tmp_path / "costs.json").read_text())
    assert content == {
        "version": 1,
        "source": "my machine",
        "far_s_per_byte": 5e-11,
        "costs": {text: [2e-3, 64]},
    }
    assert Recorded.load(tmp_path / "costs.json").far_s_per_byte == 5e-11


def test_a_function_of_the_user_decides_what_is_recomputed() -> None:
    model, x = a_model()
    dear = "aten.tanh.default"

    def cost(op: Op) -> tuple[float, int]:
        return (1.0 if op.target == dear else 1e-3, 0)

    plan = placemat.plan(model, None, (x,), budget_fraction=0.5, cost_model=cost)
    assert plan.cost_source.startswith("the function cost; otherwise")
    cheap = placemat.plan(model, plan.budget_bytes, (x,), cost_model=lambda op: (1e-3, 0))
    assert plan.forward_backward_seconds > 0.9
    assert cheap.forward_backward_seconds < 0.1


def test_a_table_of_the_user_is_by_operator_and_leaves_the_rest() -> None:
    base = Roofline(device_spec("L4"))
    table = CostTable({"aten.mm": (5.0, 7), "aten.tanh.default": (6.0, 8)}, base)
    assert table.op_cost(product()) == OpCost(5.0, 7)
    assert table.op_cost(op_of(sign(aten.tanh.default, torch.ones(3)))) == OpCost(6.0, 8)
    other = op_of(sign(aten.relu.default, torch.ones(3)))
    assert table.op_cost(other) == base.op_cost(other)


@pytest.mark.parametrize("figures", [(-1.0, 0), (float("nan"), 0), (1.0, -1), (1.0, 0.5), 3.0, ("1", 0), (True, 0)])
def test_figures_that_are_none_are_refused(figures: object) -> None:
    model = CostFunction(lambda op: figures, Roofline(device_spec("L4")))  # type: ignore[arg-type,return-value]
    with pytest.raises(placemat.PlacematError, match=r"aten\.mm\.default"):
        model.op_cost(product())


def test_what_a_cost_model_may_be() -> None:
    base = Roofline(device_spec("L4"))
    assert as_cost_model(base, lambda: base) is base
    assert isinstance(as_cost_model({}, lambda: base), CostTable)
    assert type(as_cost_model(lambda op: None, lambda: base)) is CostFunction
    with pytest.raises(placemat.PlacematError, match="got int"):
        as_cost_model(3, lambda: base)  # type: ignore[arg-type]
