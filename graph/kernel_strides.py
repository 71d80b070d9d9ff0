"""Strides of CPU kernels' results where PyTorch's shape functions say others.

A trace believes shape functions. Where they are wrong, views that the trace found possible fail when the step runs,
and gradients of outputs are copied into strides that the outputs do not have, after which sums round otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from placemat.graph import torch_private
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.gradients import is_dense
from placemat.graph.sources import user_line
from placemat.graph.tensor_iterator import elementwise_strides

aten = torch.ops.aten
_Strides = tuple[int, ...]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _elementwise(*args: Any) -> _Strides:
    return elementwise_strides([a for a in args if isinstance(a, torch.Tensor)])


def _reversed(*args: Any) -> _Strides:
    """Of a kernel whose own arguments are in another order than the operator's first two."""
    first, second, *_ = args
    return _elementwise(second, first)


def _contiguous(shape: Sequence[int]) -> _Strides:
    return torch.empty(shape, device="meta").stride()


def _suggested(x: torch.Tensor, shape: Sequence[int] | None = None) -> _Strides:
    """`empty(shape, x.suggest_memory_format())`: contiguous or channels_last, whatever x is."""
    layout = suggested_format(x)
    return torch.empty(x.shape if shape is None else shape, device="meta").contiguous(memory_format=layout).stride()


def suggested_format(x: torch.Tensor) -> torch.memory_format:
    """`x.suggest_memory_format()` of C++."""
    return _CHANNELS_LAST[x.ndim] if _is_channels_last(x) else torch.contiguous_format


def _is_channels_last(x: torch.Tensor) -> bool:
    """As `suggest_memory_format` sees it, which is stricter than `is_contiguous` where dimensions have one entry."""
    if x.ndim not in _CHANNELS_LAST or 0 in x.shape:
        return False
    least = 0
    for dim in (1, *range(x.ndim - 1, 1, -1), 0):
        stride = x.stride(dim)
        if (stride == 0 and dim == 1) or stride < least or (dim == 0 and least == x.stride(1)):
            return False
        least = stride * max(x.shape[dim], 1)
    return True


def _indexed(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> _Strides:
    """Of `x[indices]`: x goes into the kernel with stride 0 along the dimensions that the indices have."""
    given = [d for d, index in enumerate(indices) if index is not None]
    common = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    rest = [d for d in range(x.ndim) if d not in given]
    before = given[0] if given == list(range(given[0], given[-1] + 1)) else 0  # else the new dimensions come first
    shape = (*(x.shape[d] for d in rest[:before]), *common, *(x.shape[d] for d in rest[before:]))
    strides = (*(x.stride(d) for d in rest[:before]), *[0] * len(common), *(x.stride(d) for d in rest[before:]))
    ones = (1,) * before, (1,) * (len(rest) - before)
    broadcast = [i.expand(common).reshape(*ones[0], *common, *ones[1]) for i in indices if i is not None]
    return _elementwise(torch.empty_strided(shape, strides, device="meta"), *broadcast)


def _like(x: torch.Tensor) -> _Strides:
    return torch.empty_like(x, device="meta").stride()


# Strides of the first result, from the shape and the arguments (torch 2.13: BinaryOps.cpp, Activation.cpp, Loss.cpp,
# Dropout.cpp, Normalization.cpp, layer_norm.cpp, SoftMax.cpp, ReplicationPadding.cpp, MaxUnpooling.cpp; all measured).
_RULES: dict[Any, Callable[..., _Strides]] = {
    aten.threshold_backward.default: lambda shape, grad, x, *_: _reversed(grad, x),
    aten.leaky_relu_backward.default: lambda shape, grad, x, *_: _reversed(grad, x),
    aten.rsub.Tensor: lambda shape, x, other, *_: _reversed(x, other),
    aten.elu_backward.default: lambda shape, grad, alpha, scale, input_scale, is_result, x: _elementwise(grad, x),
    aten.native_dropout_backward.default: lambda shape, grad, mask, scale: _elementwise(grad, mask),
    aten.huber_loss.default: lambda shape, x, *_: _like(x) if tuple(x.shape) == shape else _contiguous(shape),
    aten.binary_cross_entropy.default: lambda shape, x, *_: _like(x) if len(shape) else _contiguous(shape),
    aten.binary_cross_entropy_backward.default: lambda shape, grad, x, *_: _like(x),
    aten._prelu_kernel_backward.default: lambda shape, grad, x, weight: _elementwise(x, weight, grad),
    aten._prelu_kernel.default: lambda shape, x, weight: _like(x),
    aten._native_batch_norm_legit_functional.default: lambda shape, x, *_: _suggested(x),
    aten._native_batch_norm_legit_no_training.default: lambda shape, x, *_: _suggested(x),
    aten._native_batch_norm_legit.no_stats: lambda shape, x, *_: _suggested(x),
    aten.native_batch_norm.default: lambda shape, x, *_: _suggested(x),
    aten.native_batch_norm_backward.default: lambda shape, grad, x, *_: _suggested(x),
    aten.batch_norm_backward.default: lambda shape, grad, x, *_: _suggested(x),
    aten.replication_pad2d_backward.default: lambda shape, grad, x, *_: _suggested(x),
    aten.replication_pad3d_backward.default: lambda shape, grad, x, *_: _suggested(x),
    aten.max_unpool2d.default: lambda shape, x, *_: _suggested(x, shape),
    aten.rrelu_with_noise_backward.default: lambda shape, grad, x, noise, lower, upper, training, *_: (
        _elementwise(noise, grad) if training else _reversed(grad, x)
    ),
    aten.roll.default: lambda shape, x, *_: _suggested(x),
    aten.index.Tensor: lambda shape, x, indices: _indexed(x, indices),
    aten.channel_shuffle.default: lambda shape, x, groups: _suggested(x),
    aten.ldexp.Tensor: lambda shape, x, other: _elementwise(x, torch.empty(other.shape, device="meta")),
}
_CONTIGUOUS = frozenset(
    {
        aten.pow.Scalar,
        aten.masked_fill.Scalar,
        aten.log_sigmoid_forward.default,
        aten.normal.Tensor_Tensor,
        aten.normal.float_Tensor,
        aten._standard_gamma.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
        aten.native_layer_norm_backward.default,
        aten._log_softmax_backward_data.default,
    }
)
# Elementwise kernels that PyTorch does not tag as such.
_ELEMENTWISE = frozenset(
    {
        aten.complex.default,
        aten.polar.default,
        aten.floor_divide.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.log_sigmoid_backward.default,
        aten.mish_backward.default,
        aten.softplus_backward.default,
        aten.softshrink_backward.default,
    }
)
# They are tagged as elementwise, but their shape functions are right, and the rule for elementwise kernels is not.
_OTHERS = frozenset(
    {
        aten.bernoulli.p,
        aten.clone.default,
        aten.equal.default,
        aten.float_power.Tensor_Tensor,
        aten.grid_sampler_2d.default,
        aten.grid_sampler_3d.default,
        aten.masked_fill.Tensor,
        aten.mvlgamma.default,
    }
)
_UNREDUCED_LOSSES = frozenset({aten.mse_loss.default, aten.smooth_l1_loss.default})


def _strides(op: Any, shape: tuple[int, ...], args: Sequence[Any]) -> _Strides | None:
    """Strides of an operator's first result on the CPU, or None if its shape function says them."""
    if op in _RULES:
        return _RULES[op](shape, *args)
    if op in _CONTIGUOUS:
        return _contiguous(shape)
    if op in _UNREDUCED_LOSSES:
        return _elementwise(*args[:2]) if len(shape) else None
    if op not in _OTHERS and (op in _ELEMENTWISE or torch.Tag.pointwise in op.tags):
        return _elementwise(*args)
    return None


@contextlib.contextmanager
def true_strides() -> Iterator[None]:
    """Trace with the strides that CPU kernels give, and that tensors keep that are written in place."""
    with torch_private.fake_strides(_strides), torch_private.strides_of_written():
        yield


# Results of their forms without a write are contiguous, whatever the layout of what they overwrite (measured). Eager's
# rrelu is contiguous; the one without a write to its noise, which a trace has, is not.
_MAKES_CONTIGUOUS = frozenset(
    """masked_fill_ masked_scatter_ index_copy_ index_add_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ cumsum_
    tril_ triu_ renorm_ addmm_ rrelu_ rrelu""".split()
)


def refuse_permuted_writes(dynamo_graph: fx.Graph) -> None:
    """Refuse writes in place that leave a tensor in another order of memory than in eager.

    In a trace a write becomes a new tensor. If that has other strides than the permuted one that eager writes to, what
    reads it sums in another order.

    Raises:
        UnsupportedFeature: with the method and the user's line.
    """
    for node in dynamo_graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name not in _MAKES_CONTIGUOUS or not node.args:
            continue
        written = node.args[0].meta.get("example_value") if isinstance(node.args[0], fx.Node) else None
        if isinstance(written, torch.Tensor) and _is_reordered(name, written):
            where = user_line(node.meta.get("stack_trace")) or "an unknown line"
            instead = f"{name[:-1]}() without the underscore, or " if name.endswith("_") else ""
            raise UnsupportedFeature(
                f"the forward calls {name}() at {where} on a tensor that is not contiguous (strides "
                f"{tuple(written.stride())}): a captured step has a new tensor there, in another order of memory than "
                f"eager's, and what reads it would round otherwise. Remedy: {instead}.contiguous() before it."
            )


def _is_reordered(name: str, written: torch.Tensor) -> bool:
    """Whether the trace's new tensor has another order of memory than eager's.

    A write to a part of a permuted tensor goes back to where it was in both; rrelu of a part is a tensor of its own.
    """
    if name == "rrelu":
        return not torch.empty_like(written).is_contiguous()
    return not written.is_contiguous() and is_dense(written)
