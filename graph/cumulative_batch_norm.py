"""BatchNorm(momentum=None): the averaging factor of its running statistics is read where the module runs.

Its forward computes 1 / float(num_batches_tracked), a Python number that no graph can hold: each step would need a
graph of its own, if tracing allowed it at all. While placemat traces a step, the forward calls an operator instead: it
has the counter as a tensor and reads it when it runs. Kernel, order and results are those of the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

aten = torch.ops.aten

_ORIGINAL = _BatchNorm.forward
_Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("placemat_ops::cumulative_batch_norm", mutates_args=())
def cumulative_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    count: Tensor,
    eps: float,
) -> _Statistics:
    """aten._native_batch_norm_legit_functional with momentum 1 / count; its results, in its order.

    Args:
        x: (N, C, ...).
        weight, bias, running_mean, running_var: (C).
        training: True; the argument is there so that positions are those of the aten operator.
        count: 0-dim, how many batches were seen, this one included.
        eps: added to the variance.
    """
    factor = 1.0 / float(count)
    results = aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, training, factor, eps
    )
    return tuple(results)


@cumulative_batch_norm.register_fake
def _fake(*args: Any) -> _Statistics:
    *tensors_and_mode, _count, eps = args
    return tuple(aten._native_batch_norm_legit_functional(*tensors_and_mode, 1.0, eps))


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Statistics) -> None:
    x, weight, *_, eps = inputs
    ctx.eps = eps
    ctx.save_for_backward(x, weight, output[1], output[2])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """The formula of derivatives.yaml; the running statistics have no part in it when the batch's own are used."""
    x, weight, mean, invstd = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    grads = aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, ctx.eps, mask)
    present = (g if wanted else None for g, wanted in zip(grads, mask, strict=True))
    return (*present, None, None, None, None, None)


cumulative_batch_norm.register_autograd(_backward, setup_context=_save)

CUMULATIVE = torch.ops.placemat_ops.cumulative_batch_norm.default


def _forward(self: _BatchNorm, input: Tensor) -> Tensor:
    """_BatchNorm.forward; with the operator above where Dynamo traces a module in training that has no momentum."""
    counts = self.training and self.track_running_stats and self.num_batches_tracked is not None
    if not counts or self.momentum is not None or not torch.compiler.is_dynamo_compiling():
        return _ORIGINAL(self, input)
    self._check_input_dim(input)
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    assert count is not None
    assert mean is not None
    assert var is not None
    count.add_(1)
    result, _, _, new_mean, new_var = CUMULATIVE(input, self.weight, self.bias, mean, var, True, count, self.eps)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return result


@contextlib.contextmanager
def read_at_run_time() -> Iterator[None]:
    """Let Dynamo trace modules without a momentum; modules that run eagerly do what they always do.

    A forward that somebody else put into PyTorch's class stays.
    """
    present = _BatchNorm.forward
    if present is _ORIGINAL:
        _BatchNorm.forward = _forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = present  # type: ignore[method-assign]
