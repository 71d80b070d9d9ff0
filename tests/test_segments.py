"""Backwards in segments: the same bits, gradients that arrive early, and a peak that is promised with that."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import placemat
from placemat.graph.static import static_bytes
from placemat.graph.torch_private import TANGENTS_ARE_FREED
from placemat.installed import handle_of
from placemat.training_state import same_bits
from tests.steps import make_step, run_step

PLANNING: dict[str, Any] = {"time_limit_s": 0.3, "progress": False}


class Chain(nn.Module):
    """Wide layers on few rows, so that gradients are what takes memory; the first weight is used again at the end."""

    def __init__(self, depth: int = 5, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x, nn.functional.linear(x, self.layers[0].weight)


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].sum() + outputs[1].pow(2).sum()


def make(**options: Any) -> tuple[Chain, Tensor]:
    torch.manual_seed(3)
    model, x = Chain(), torch.randn(8, 64)
    if options:
        placemat.optimize(model, None, (x,), loss_fn=loss_of, **{"budget_fraction": 0.0, **PLANNING, **options})
        assert not model.plan.runs_original
    return model, x


def gradients(model: nn.Module, x: Tensor, loss: Any = loss_of, steps: int = 1) -> list[Tensor | None]:
    torch.manual_seed(4)
    for _ in range(steps):
        loss(model(x)).backward()
    return [*(p.grad for p in model.parameters()), torch.get_rng_state()]


def same(ours: list[Tensor | None], others: list[Tensor | None]) -> bool:
    pairs = zip(ours, others, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and same_bits(a, b)) for a, b in pairs)


def handed_out(plan: placemat.Plan) -> list[int]:
    return [len(op.inputs) for op, label in zip(plan.problem.ops, plan.labels.ops, strict=True) if is_end(label.target)]


def is_end(target: str) -> bool:
    return target in ("placemat.hand_out", "placemat.accumulate")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branches", "attention"])
def test_same_bits_on_steps_with_random_numbers_and_statistics(name: str) -> None:
    model, args = make_step(name)
    expected = run_step(model, args)
    placemat.optimize(model, None, args, budget_fraction=0.0, segments=3, **PLANNING)
    assert 2 <= len(handed_out(model.plan)) <= 3
    assert run_step(model, args).same_as(expected)
    assert run_step(model, args).same_as(expected)


def test_a_tied_weight_is_handed_out_in_the_last_segment_that_adds_to_it() -> None:
    eager, x = make()
    model, _ = make(segments=4, accumulate_grad=True)
    assert same(gradients(model, x), gradients(eager, x))
    assert len(handed_out(model.plan)) == 4
    assert same(gradients(model, x, steps=2), gradients(eager, x, steps=2))  # accumulates


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[str] = []

    def hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.entries.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.entries.append(str(func))
        return func(*args, **(kwargs or {}))


def test_hooks_of_late_layers_run_before_early_layers_are_recomputed() -> None:
    orders = []
    planning: dict[str, Any] = {"accumulate_grad": True, "recompute": ["aten.tanh"]}
    for options in ({}, {"segments": 1, **planning}, {"segments": 3, **planning}):
        model, x = make(**options)
        gradients(model, x)
        log = Log()
        for i, layer in enumerate(model.layers):
            layer.weight.register_post_accumulate_grad_hook(log.hook(f"layer {i}"))
        loss = loss_of(model(x))
        with log:
            loss.backward()
        orders.append(log.entries)
    assert [order.index("layer 4") < last_op(order) for order in orders] == [True, False, True]
    assert max(i for i, entry in enumerate(orders[2]) if entry == "layer 0") > last_op(orders[2])
    recomputed = [i for i, entry in enumerate(orders[2]) if entry == "aten.tanh.default"]
    assert orders[2].index("layer 4") < recomputed[-1]


def last_op(order: list[str]) -> int:
    """Position of the last op of a backward but for those that accumulate gradients."""
    return max(i for i, entry in enumerate(order) if not entry.startswith(("layer", "aten.add", "aten.detach")))


def measured(model: nn.Module, x: Tensor, **kwargs: Any) -> int:
    loss_of(model(x)).backward()  # compiles
    if not kwargs.get("accumulate"):
        model.zero_grad(set_to_none=True)
    static = sum(static_bytes(model, (x,), {}, accumulate_grad=kwargs.get("accumulate", False)).values())

    def step() -> None:
        loss = loss_of(outputs := model(x))
        loss.backward()
        del outputs

    return static + placemat.measure(step).peak_bytes


def test_promised_and_measured_peak_fall_where_gradients_are_added_to_those_that_exist() -> None:
    promised: list[int] = []
    found: list[int] = []
    for segments in (1, 4):
        model, x = make(segments=segments, accumulate_grad=True)
        promised.append(model.plan.predicted_peak_bytes)
        found.append(measured(model, x, accumulate=True))
    assert promised[1] < promised[0]
    assert all(f <= p for f, p in zip(found, promised, strict=True))
    if TANGENTS_ARE_FREED:  # else the promise has the output's gradient to the end of backward, which is too long
        assert found == promised


@pytest.mark.slow
def test_peak_falls_where_hooks_use_gradients_up() -> None:
    def step_and_drop(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-1e-3)
        parameter.grad = None

    found = []
    for segments in (1, 4):
        model, x = make(segments=segments)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_and_drop)
        found.append(measured(model, x))
        assert found[-1] <= model.plan.predicted_peak_bytes
    assert found[1] < found[0]


@pytest.mark.slow
def test_kept_gradients_are_promised_to_the_byte() -> None:
    model, x = make(segments=3)
    assert measured(model, x) == model.plan.predicted_peak_bytes


@pytest.mark.slow
def test_a_graph_is_kept_and_run_again() -> None:
    eager, x = make()
    model, _ = make(segments=3, accumulate_grad=True)
    for network in (eager, model):
        torch.manual_seed(4)
        loss = loss_of(network(x))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


@pytest.mark.slow
def test_a_part_of_the_gradients_leaves_nothing_behind() -> None:
    eager, x = make()
    model, _ = make(segments=4)
    results = []
    for network in (eager, model):
        torch.manual_seed(4)
        loss = loss_of(network(x))
        results.append(list(torch.autograd.grad(loss, [network.layers[4].weight, network.layers[3].bias])))
    assert same(*results)
    gc.collect()
    suspended = [g for g in gc.get_objects() if type(g).__name__ == "generator" and g.__name__ == "backward"]
    assert not suspended
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore::placemat.RoundingDiffers")
@pytest.mark.slow
def test_two_calls_before_one_backward_and_losses_that_reach_one_output() -> None:
    eager, x = make()
    model, _ = make(segments=3)
    for loss in (lambda out: out[0].sum(), lambda out: out[1].sum()):
        for network in (eager, model):
            network.zero_grad()
        assert same(gradients(model, x, loss), gradients(eager, x, loss))
    for network in (eager, model):
        torch.manual_seed(4)
        network.zero_grad()
        sum(network(y)[0].sum() for y in (x, x.flip(0))).backward()
    ours, others = ([p.grad for p in network.parameters()] for network in (model, eager))
    assert same(ours[1:], others[1:])  # the first weight is used twice in each call: see RoundingDiffers


class Shared(nn.Module):
    """Gradients that autograd copies: of two parameters at once, and expanded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ParameterList(torch.randn(48, 48) * 0.1 for _ in range(4))
        self.right = nn.ParameterList(torch.randn(48, 48) * 0.1 for _ in range(4))
        self.alone = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x = torch.tanh(x @ (left + right))
        return x.sum() + self.alone.sum()


@pytest.mark.slow
def test_copies_that_autograd_makes_are_counted_where_they_are_made() -> None:
    torch.manual_seed(0)
    eager, x = Shared(), torch.randn(8, 48)
    model = copy.deepcopy(eager)
    plans = [
        placemat.plan(model, None, (x,), budget_fraction=0.0, segments=segments, **PLANNING) for segments in (1, 3)
    ]
    assert plans[1].predicted_peak_bytes < plans[0].predicted_peak_bytes  # copies are not all made at the end
    placemat.apply(model, plans[1])
    for network in (eager, model):
        network(x).backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    model.zero_grad()
    static = sum(static_bytes(model, (x,), {}).values())
    peak = static + placemat.measure(lambda: model(x).backward()).peak_bytes
    assert peak <= plans[1].predicted_peak_bytes


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x).tanh()).tanh().sum(), self.c(x).sum()


@pytest.mark.slow
def test_inputs_get_their_gradients_and_unused_parameters_none() -> None:
    results = []
    for segments in (None, 3):
        torch.manual_seed(3)
        model, x = Heads(), torch.randn(8, 16, requires_grad=True)
        if segments:
            placemat.optimize(model, None, (x,), budget_fraction=0.0, segments=segments, **PLANNING)
        model(x)[0].backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert results[0][-1] is None
    assert same(*results)


@pytest.mark.slow
def test_plans_carry_their_segments_to_files_and_older_files_have_one(tmp_path: Path) -> None:
    model, x = make()
    plan = placemat.plan(model, None, (x,), budget_fraction=0.0, segments=3, loss_fn=loss_of, **PLANNING)
    assert "3 segments" in plan.summary()
    plan.save(tmp_path / "plan.json")
    loaded = placemat.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    expected = gradients(model, x)
    other, _ = make()
    placemat.apply(other, loaded)
    assert same(gradients(other, x), expected)
    assert handle_of(other)._backend.runs == 1
    plain = placemat.plan(make()[0], None, (x,), budget_fraction=0.0, loss_fn=loss_of, **PLANNING)
    older = replace(plain, options={k: v for k, v in plain.options.items() if k != "segments"})
    older.save(tmp_path / "older.json")
    other, _ = make()
    placemat.apply(other, placemat.Plan.load(tmp_path / "older.json"))
    assert same(gradients(other, x), expected)


def test_what_cannot_be_is_refused() -> None:
    model, x = make()
    with pytest.raises(placemat.PlacematError, match="segments must be a whole number from 1 on, got 0"):
        placemat.optimize(model, "1 GiB", (x,), segments=0)
    with pytest.raises(placemat.UnsupportedFeature, match="segments=1"):
        placemat.optimize(model, "1 GiB", (x,), segments=2, compiler="inductor")
    plan = placemat.plan(model, None, (x,), budget_fraction=0.0, segments=2, loss_fn=loss_of, **PLANNING)
    with pytest.raises(placemat.UnsupportedFeature, match="without segments"):
        plan.checkpoint_modules()
