"""`verify` sees every difference between two steps, and leaves no trace."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from placemat.graph.errors import PlacematError
from placemat.measure import Measurement
from placemat.report import Report, Row
from placemat.verify import verify


class Net(nn.Module):
    """Draws from four generators, moves statistics, counts its calls, has an unused parameter and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Parameter(torch.ones(3))
        self.calls = 0
        self.cache = torch.zeros(2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        self.cache += 1
        self.last_input = x
        noise = random.random() + float(np.random.rand())
        hidden = torch.dropout(self.norm(self.first(x)), 0.5, self.training) * (scale + noise)
        return {"hidden": hidden, "sums": (self.second(hidden).sum(1), x.mean()), "calls": self.calls}


class Handle:
    """Stands in for an optimized forward: what `optimize` leaves in the module's `__dict__`."""

    bypassed = False

    def __init__(self, original: Callable[..., Any], change: Callable[[Any], Any] = lambda out: out) -> None:
        self.original = original
        self.change = change
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.bypassed:
            return self.original(*args, **kwargs)
        self.num_calls += 1
        return self.change(self.original(*args, **kwargs))


def handled(model: Any, change: Callable[[Any], Any] = lambda out: out) -> Any:
    model.__dict__["forward"] = model.__dict__["_placemat_handle"] = Handle(model.forward, change)
    return model


def statuses(report: Report) -> dict[str, str]:
    return {row.name: row.status for row in report.rows if row.status != "bitwise"}


@contextmanager
def unchanged(model: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """Everything that `verify` promises to leave alone: contents, versions, gradients, attributes, generators."""

    def facts() -> dict[str, Any]:
        state = [*model.parameters(), *model.buffers(), *tensors]
        return {
            "identity": [id(t) for t in state],
            "content": [t.tolist() for t in state],
            "grad": [(id(t.grad), None if t.grad is None else t.grad.tolist()) for t in state],
            "input versions": [t._version for t in tensors],
            "attributes": [{k: id(v) for k, v in m.__dict__.items()} for m in model.modules()],
            "rng": (torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())),
        }

    before = facts()
    yield
    after = facts()
    for name in before:
        assert before[name] == after[name], name


def test_equal_steps_are_bitwise_and_nothing_changes() -> None:
    model = handled(Net())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    x = torch.randn(5, 6, requires_grad=True)
    x.grad = torch.ones_like(x)
    with unchanged(model, x):
        report = verify(model, model, (x,), {"scale": 2.0})
    assert model.cache.tolist() == [0.0, 0.0]
    assert not hasattr(model, "last_input")
    assert report.ok, str(report)
    assert report.nondeterministic == ()
    assert model.__dict__["forward"].num_calls == 2
    names = {row.name for row in report.rows}
    assert {"output.hidden", "output.sums[0]", "output.calls", "output types", "gradient: first.weight"} <= names
    assert {"gradient: unused", "gradient: input.args[0]", "input.args[0] after", "buffer: norm.running_mean"} <= names
    assert {"rng: cpu", "rng: python", "rng: numpy"} <= names
    assert report.reference.peak_bytes == report.optimized.peak_bytes > 0


def test_a_second_module_starts_from_the_state_of_the_first() -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    other.eval()
    x = torch.randn(5, 6)
    with unchanged(model, x), unchanged(other, x):
        report = verify(model, other, (x,))
    assert report.ok, str(report)


def test_changed_outputs_show_in_outputs_and_gradients() -> None:
    def change(out: dict[str, Any]) -> dict[str, Any]:
        return {**out, "hidden": out["hidden"] * 3}

    report = verify(handled(Net(), change), (model := handled(Net(), change)), (torch.randn(5, 6),))
    assert model.__dict__["forward"].num_calls == 2
    assert not report.ok
    found = statuses(report)
    assert found["output.hidden"] == "different"
    assert found["gradient: first.weight"] == "different"
    assert "buffer: norm.running_mean" not in found
    assert "output.sums[0]" not in found
    row = next(row for row in report.rows if row.name == "output.hidden")
    assert row.max_abs_difference is not None
    assert row.max_abs_difference > 0.1


def test_last_bit_is_close_not_bitwise() -> None:
    model = handled(nn.Linear(4, 4), lambda out: out * (1 + 2**-23))
    report = verify(model, model, (torch.randn(3, 4),), loss_fn=lambda out: out.sum())
    assert not report.ok
    assert statuses(report)["output"] == "close"


def test_missing_gradients_and_moved_generators() -> None:
    def change(out: Tensor) -> Tensor:
        torch.rand(1)
        random.random()
        return out.detach() + 0 * model.bias

    model = handled(nn.Linear(4, 4), change)
    assert statuses(verify(model, model, (torch.randn(3, 4, requires_grad=True),))) == {
        "rng: cpu": "different",
        "rng: python": "different",
        "gradient: weight": "missing",
        "gradient: bias": "different",
        "gradient: input.args[0]": "missing",
    }


def test_output_types_are_compared() -> None:
    model = handled(nn.Linear(4, 4), lambda out: (out,))
    report = verify(model, model, (torch.randn(3, 4),))
    assert statuses(report)["output types"] == "different"


def test_buffers_and_inputs_that_the_step_changes() -> None:
    class Mutating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            self.seen = self.seen + x  # rebinds the buffer
            return (self.weight * x).sum()

    def change(out: Tensor) -> Tensor:
        model.seen.add_(1)
        return out

    model = handled(Mutating(), change)
    x = torch.randn(6)[::2]
    with unchanged(model, x):
        report = verify(model, model, (x,))
    assert statuses(report) == {"buffer: seen": "different"}
    inputs_after = [row for row in report.rows if row.name == "input.args[0] after"]
    assert [row.status for row in inputs_after] == ["bitwise"]


def test_parameters_that_a_hook_steps_are_compared_and_put_back() -> None:
    layer = nn.Linear(4, 4)

    def sgd(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(sgd)
    model = handled(layer)
    x = torch.randn(3, 4)
    with unchanged(model, x):
        report = verify(model, model, (x,))
    assert report.ok
    assert "parameter: weight" in {row.name for row in report.rows}


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.parametrize(
    ("wrap", "loss_fn", "has_loss"),
    [
        (lambda out: out, None, False),
        (lambda out: out.square().mean(), None, True),
        (lambda out: (out, out.sum(), torch.tensor(1.0)), None, True),
        (lambda out: (out.sum(), out.mean()), None, False),
        (lambda out: {"loss": out.sum(), "aux": out.mean()}, None, True),
        (lambda out: Output(out, out.sum()), None, True),
        (lambda out: Output(out), None, False),
        (lambda out: SimpleNamespace(loss=out.sum()), None, True),
        (lambda out: {"logits": out}, lambda out: out["logits"].square().sum(), True),
    ],
)
def test_what_is_differentiated(
    wrap: Callable[..., Any], loss_fn: Callable[..., Tensor] | None, has_loss: bool
) -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    model = handled(Wrapped(4, 4))
    report = verify(model, model, (torch.randn(3, 4),), loss_fn=loss_fn)
    assert report.ok
    assert ("loss" in {row.name for row in report.rows}) is has_loss
    gradient = next(row for row in report.rows if row.name == "gradient: weight")
    assert gradient.max_abs_difference == 0.0  # it exists


def test_optimized_module_inside_the_model_runs_its_original_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), handled(nn.Linear(4, 4), lambda out: out + 1))
    assert statuses(verify(model, model, (torch.randn(3, 4),)))["output"] == "different"


def test_nondeterminism_of_the_reference_is_told_apart() -> None:
    calls: list[int] = []

    class Drifting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x) * len(calls)

    model = handled(Drifting(4, 4))
    report = verify(model, model, (torch.randn(3, 4),))
    assert "gradient: weight" in report.nondeterministic
    assert "differs between two runs of the reference" in str(report)


def test_inputs_keep_their_strides_and_share_their_storage() -> None:
    seen: list[tuple[Any, ...]] = []

    class Looking(nn.Module):
        def forward(self, a: Tensor, b: Tensor, extra: dict[str, Tensor]) -> Tensor:
            same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
            seen.append((a.stride(), b.stride(), b.storage_offset(), same, extra["again"] is a))
            return (a.sum() + b.sum()).requires_grad_()

    base = torch.randn(4, 6)
    a, b = base.t()[:3], base[0, :1].expand(5)
    with unchanged(nn.Module(), base):
        verify(Looking(), Looking(), (a, b, {"again": a}))
    assert set(seen) == {((1, 6), (0,), 0, True, True)}


def test_refusals_leave_no_trace() -> None:
    model, wider = handled(nn.Linear(4, 4)), nn.Linear(4, 5)
    x, too_wide = torch.randn(3, 4), torch.randn(3, 5)
    with unchanged(model, x):
        with pytest.raises(PlacematError, match=r"Pass `\(x,\)`"):
            verify(model, model, x)  # type: ignore[arg-type]
        with pytest.raises(PlacematError, match="2 parameters or buffers differ: 'bias'"):
            verify(model, wider, (x,))
        with pytest.raises(PlacematError, match=r"one number that requires grad; got \(3, 4\)"):
            verify(model, model, (x,), loss_fn=lambda out: out)
        with pytest.raises(PlacematError, match="nothing to differentiate"):
            verify(nn.ReLU(), nn.ReLU(), (x,))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            verify(model, model, (too_wide,))
    assert isinstance(model.__dict__["forward"], Handle)


def test_bits_of_special_values() -> None:
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    report = verify(nn.Linear(3, 3), nn.Linear(3, 3), (nan,))
    assert report.ok
    assert "no module of it is optimized" in str(report)
    model = handled(nn.Identity(), lambda out: torch.where(out == 0, out.abs(), out))
    report = verify(model, model, (nan.requires_grad_(),), loss_fn=lambda out: out[1].square())
    assert statuses(report)["output"] == "close"  # -0.0 became 0.0


def test_report_text() -> None:
    report = Report(
        rows=(
            Row("loss", "bitwise", 0.0),
            Row("gradient: a.weight", "different", 0.25),
            Row("gradient: b", "missing", None, "None in the optimized step"),
        ),
        reference=Measurement(3 * 2**20, 0.5, 0, None, "cpu"),
        optimized=Measurement(2**20, 0.75, 0, None, "cpu"),
        nondeterministic=("gradient: a.weight",),
    )
    assert not report.ok
    assert repr(report) == "Report(ok=False: 1 bitwise, 0 close, 1 different, 1 missing)"
    assert str(report) == (
        "1 of 3 compared are bitwise equal, 1 different, 1 missing\n"
        "peak     3.0 MiB -> 1.0 MiB  allocated by the step, beside parameters, buffers and inputs\n"
        "seconds  0.5000 -> 0.7500  under the profiler on the CPU\n"
        "  gradient: a.weight  different  max |difference| 0.25    (differs between two runs of the reference)\n"
        "  gradient: b         missing    None in the optimized step"
    )
