"""Strides of CPU kernels' results where PyTorch's shape functions say others.

A trace believes shape functions. Where they are wrong, views that the trace found possible fail when the step runs,
and gradients of outputs are copied into strides that the outputs do not have, after which sums round otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from placemat.graph import torch_private

aten = torch.ops.aten
_Strides = tuple[int, ...]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _elementwise(*args: Any) -> _Strides:
    """TensorIterator's: the first tensor decides that is not ambiguous."""
    return torch_private.elementwise_strides([a for a in args if isinstance(a, torch.Tensor)])


def _suggested(x: torch.Tensor) -> _Strides:
    """`empty_like(x, x.suggest_memory_format())`: contiguous or channels_last, whatever x is."""
    layout = _CHANNELS_LAST.get(x.ndim)
    if layout is None or x.is_contiguous() or not x.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    return torch.empty(x.shape, device="meta").contiguous(memory_format=layout).stride()


# Strides of the first result, from the arguments (torch 2.13: BinaryOps.cpp, Dropout.cpp, Normalization.cpp).
_RULES: dict[Any, Callable[..., _Strides]] = {
    aten.elu_backward.default: lambda grad, alpha, scale, input_scale, is_result, x: _elementwise(grad, x),
    aten.native_dropout_backward.default: lambda grad, mask, scale: _elementwise(grad, mask),
    aten._native_batch_norm_legit_functional.default: lambda x, *_: _suggested(x),
    aten._native_batch_norm_legit.no_stats: lambda x, *_: _suggested(x),
    aten.native_batch_norm_backward.default: lambda grad, x, *_: _suggested(x),
}


@contextlib.contextmanager
def true_strides() -> Iterator[None]:
    """Trace with the strides that CPU kernels give."""
    with torch_private.fake_strides(_RULES):
        yield
