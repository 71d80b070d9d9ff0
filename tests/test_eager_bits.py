"""Where tracing takes other kernels, orders or layouts than eager, placemat's bits and peaks are eager's all the same.

One small module a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placemat
from placemat.training_state import same_bits
from tests.steps import Applied

F = nn.functional


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _linear(width: int = 8, outputs: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(width, outputs, dtype=dtype)


def _resized(mode: str, **options: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x: F.interpolate(layer(x), size=(11, 6), mode=mode, **options)


def _frozen_over_slice(layer: nn.Module, x: Tensor) -> Tensor:
    trained, frozen = layer.children()
    return frozen(trained(x)[..., :2])


def _written_when_transposed(layer: nn.Module, x: Tensor) -> Tensor:
    narrow, wide = layer.children()
    row = x * 0.5
    row.t().relu_()
    return wide(narrow(row.transpose(-1, -2)))  # BLAS chooses its kernel by the stride of the one column


def _elu_of_permuted(layer: nn.Module, x: Tensor) -> Tensor:
    return F.elu(layer(x).view(3, 4, 8)).transpose(0, 1).reshape(12, 8).cos()


def _writes_with_a_factor(layer: nn.Module, x: Tensor) -> Tensor:
    """Dynamo would make several calls of each, which round otherwise."""
    y, positive = layer(x).sin(), x.square() + 1
    y = y.add_(x, alpha=0.1).addcmul_(x, positive, value=0.3).addcdiv_(x, positive, value=0.7)
    return torch.addcdiv(y, y.cos(), positive, value=0.7)


def _loss_of_attention(layer: nn.Module, x: Tensor) -> Tensor:
    out, _ = layer(x, x, x)  # transposed: (sequence, batch, width) in memory
    return F.smooth_l1_loss(out, torch.zeros_like(out)) + F.huber_loss(out, torch.ones_like(out))


CASES: dict[str, tuple[nn.Module, Callable[..., Tensor], Tensor]] = {
    "dropout": (_linear(), lambda layer, x: F.dropout(layer(x), 0.15), _numbers(64, 8)),
    "dropout in 16 bits": (
        _linear(dtype=torch.bfloat16),
        lambda layer, x: F.dropout(layer(x), 0.1),
        _numbers(64, 8, dtype=torch.bfloat16),
    ),
    "product of a slice": (
        nn.ModuleList([_linear(), _linear(2).requires_grad_(False)]),
        _frozen_over_slice,
        _numbers(3, 4, 8),
    ),
    "bilinear": (nn.Conv2d(3, 3, 3, padding=1), _resized("bilinear"), _numbers(2, 3, 7, 5)),
    "bicubic": (nn.Conv2d(3, 3, 3, padding=1), _resized("bicubic"), _numbers(2, 3, 7, 5)),
    "GRU cell": (nn.GRUCell(8, 8), lambda layer, x: layer(x, layer(x, x)), 3 * _numbers(512, 8)),
    "batch norm of a transposed input": (nn.BatchNorm1d(6), lambda layer, x: layer(x.t()), _numbers(6, 64)),
    "dropout of a permuted gradient": (
        _linear(),
        lambda layer, x: F.dropout(layer(x).view(3, 4, 8), 0.5).transpose(0, 1).reshape(12, 8).cos(),
        _numbers(12, 8),
    ),
    "ELU of a permuted gradient": (_linear(), _elu_of_permuted, _numbers(12, 8)),
    "writes with a factor": (_linear(), _writes_with_a_factor, _numbers(64, 8)),
    "composites that a device has kernels for": (_linear(), lambda layer, x: F.mish(F.silu(layer(x))), _numbers(64, 8)),
    "column written through a transposed view": (
        nn.ModuleList([_linear(1, 1), _linear(1, 4)]),
        _written_when_transposed,
        _numbers(1, 8),
    ),
    "loss whose gradient is contiguous": (
        nn.MultiheadAttention(8, 2, batch_first=True),
        _loss_of_attention,
        _numbers(2, 5, 8),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_step_has_eagers_bits(name):
    layer, function, x = CASES[name]
    model, x = Applied(layer, function), x.clone().requires_grad_()

    def step() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        torch.manual_seed(1)
        out = model(x)
        out.backward(torch.empty_like(out).copy_(_numbers(out.numel()).view(out.shape)))
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        return [out.detach(), x.grad, *grads, torch.get_rng_state()]

    expected = step()
    placemat.optimize(model, example_args=(x,), budget_fraction=0.0, time_limit_s=2)
    assert not model.plan.runs_original
    assert all(same_bits(a, b) for a, b in zip(step(), expected, strict=True))


def _permuted(layer: nn.Module, x: Tensor) -> Tensor:
    """An output in another order of memory than the product behind it, with a weight that is summed for."""
    return (layer(x).view(16, 4, 8).permute(2, 0, 1) * layer.bias[:4]).cos()


@pytest.mark.parametrize(
    "gradient",
    [
        lambda out: _numbers(*out.shape),
        lambda out: _numbers(*out.shape[::-1]).permute(2, 1, 0),
        lambda out: torch.tensor(0.3).expand(out.shape),
        lambda out: _numbers(*out.shape, 2)[..., 0],
        lambda out: torch.empty_like(out).copy_(_numbers(*out.shape)),
        lambda out: nn.Parameter(_numbers(*out.shape)),
    ],
    ids=["contiguous", "permuted", "expanded", "with gaps", "as the output", "a parameter"],
)
def test_gradients_of_outputs_are_taken_in_the_memory_format_that_they_come_in(gradient):
    model, x = Applied(_linear(), _permuted), _numbers(64, 8).requires_grad_()

    def step() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        out = model(x)
        out.backward(gradient(out))
        return [out.detach(), x.grad, *(p.grad for p in model.parameters())]

    expected = step()
    placemat.optimize(model, example_args=(x,), budget_fraction=0.0, time_limit_s=5)
    assert not model.plan.runs_original
    assert all(same_bits(a, b) for a, b in zip(step(), expected, strict=True))


def test_gradient_that_cannot_be_viewed_is_copied():
    """The trace takes the product's output gradient for contiguous, and flattens it by a view."""
    model, x = Applied(_linear(), lambda layer, x: F.gelu(layer(x)).exp()), _numbers(4, 16, 8)

    def step():
        model.zero_grad()
        model(x).backward(_numbers(8, 16, 4).permute(2, 1, 0))
        return [model.layer.weight.grad, model.layer.bias.grad]

    expected = step()
    placemat.optimize(model, example_args=(x,), budget_fraction=0.0, time_limit_s=5)
    assert not model.plan.runs_original
    assert all(same_bits(a, b) for a, b in zip(step(), expected, strict=True))


def test_write_into_a_permuted_tensor_is_refused_where_its_copy_would_have_another_order():
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        permuted = layer(x).t()
        permuted.masked_fill_(permuted.detach() > 0.5, 0.2)
        return permuted.square().sum()

    with pytest.raises(
        placemat.UnsupportedFeature, match=r"masked_fill_\(\) at .*test_eager_bits\.py.*masked_fill\(\)"
    ):
        placemat.optimize(
            Applied(_linear(), forward), example_args=(_numbers(4, 8),), budget_fraction=0.0, time_limit_s=5
        )


@pytest.mark.parametrize("part", [slice(None), slice(1, None)])
def test_rrelu_of_a_permuted_tensor_is_refused(part):
    model = Applied(_linear(), lambda layer, x: F.rrelu(layer(x).t()[part], training=True).square().sum())
    with pytest.raises(
        placemat.UnsupportedFeature, match=r"rrelu\(\) at .*test_eager_bits\.py.*Remedy: \.contiguous\(\)"
    ):
        placemat.optimize(model, example_args=(_numbers(4, 8),), budget_fraction=0.0, time_limit_s=5)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_every_occurrence_of_an_output_has_room_for_a_gradient(fraction):
    def forward(layer: nn.Module, x: Tensor) -> dict[str, object]:
        hidden = layer(x).tanh()
        return {"last": hidden, "all": (hidden.cos(), hidden)}

    model, x = Applied(_linear(), forward), _numbers(256, 8)
    placemat.optimize(model, example_args=(x,), budget_fraction=fraction, time_limit_s=5)
    grads = [_numbers(256, 8) for _ in range(3)]

    def step() -> None:
        out = model(x)
        torch.autograd.backward([out["last"], *out["all"]], grads)

    held_bytes = sum(g.nbytes for g in grads)
    step()
    model.zero_grad()
    measured_bytes = placemat.measure(step).peak_bytes + held_bytes + sum(model.plan.static_bytes.values())
    assert measured_bytes <= model.plan.predicted_peak_bytes


def test_asking_for_the_autocast_region_takes_no_memory():
    model, x = Applied(_linear(6, 6), lambda layer, x: layer(x).float().square().mean()), _numbers(4, 6)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x).backward()

    with torch.autocast("cpu", torch.bfloat16):
        placemat.optimize(model, example_args=(x,), budget_fraction=0.0, time_limit_s=5)
    step()
    model.zero_grad()
    measured_bytes = placemat.measure(step).peak_bytes + sum(model.plan.static_bytes.values())
    assert measured_bytes <= model.plan.predicted_peak_bytes


def test_tensors_of_one_element_are_compared_whatever_their_strides():
    one = torch.ones(4).as_strided((1,), (4,))
    assert same_bits(one, torch.ones(1))
    assert not same_bits(one, torch.zeros(1))


class Shared(nn.Module):
    """The gradient of what two outputs are made from is a sum of two terms, and the input's gradient is views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _linear(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, x], -1)
        return both.sin(), self.layer(both)


def test_views_of_a_gradient_of_which_a_term_is_absent():
    model, x = Shared(), _numbers(2, 5, 8).requires_grad_()

    def loss_fn(out: tuple[Tensor, Tensor]) -> Tensor:
        return out[1].square().mean()

    def step() -> list[Any]:
        model.zero_grad()
        x.grad = None
        loss_fn(model(x)).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    expected = step()
    placemat.optimize(model, example_args=(x,), budget_fraction=0.0, loss_fn=loss_fn, time_limit_s=2)
    assert all(same_bits(a, b) for a, b in zip(step(), expected, strict=True))


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 2),
    "distances": lambda x: torch.cdist(x, x[:, :3].exp()),
    "complex": lambda x: torch.view_as_complex(x.sin().unflatten(1, (4, 2)).movedim(2, -1).contiguous()).abs(),
    "real": lambda x: torch.view_as_real(x * (1 + 2j)),
    "scattered": lambda x: torch.as_strided_scatter(x.sin(), x[0, 0, :3].exp(), (3,), (2,)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_that_a_formula_makes_contiguous(name):
    model, x = Applied(nn.Conv1d(8, 8, 1), lambda layer, x: FORMULAS[name](layer(x).tanh())), _numbers(6, 8, 6)
    shape = model(x).shape
    tangent = _numbers(*reversed(shape)).permute(*reversed(range(len(shape))))

    def step() -> list[Any]:
        model.zero_grad()
        model(x).backward(tangent)
        return [p.grad for p in model.parameters()]

    expected = step()
    placemat.optimize(model, None, (x,), budget_fraction=0.0, time_limit_s=2)
    assert not model.plan.runs_original
    assert all(same_bits(a, b) for a, b in zip(step(), expected, strict=True))
