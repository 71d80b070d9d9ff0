"""Strides of CPU kernels' results where PyTorch's shape functions say others.

A trace believes shape functions. Where they are wrong, views that the trace found possible fail when the step runs,
and gradients of outputs are copied into strides that the outputs do not have, after which sums round otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from placemat.graph import torch_private
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.gradients import is_dense
from placemat.graph.sources import user_line

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
    aten.softplus_backward.default: lambda grad, x, beta, threshold: _elementwise(grad, x),
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


# Results of their forms without a write are contiguous, whatever the layout of what they overwrite (measured).
_MAKES_CONTIGUOUS = frozenset(
    """masked_fill_ masked_scatter_ index_copy_ index_add_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ cumsum_
    tril_ triu_ renorm_ addmm_ rrelu_""".split()
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
        if isinstance(written, torch.Tensor) and not written.is_contiguous() and is_dense(written):
            where = user_line(node.meta.get("stack_trace")) or "an unknown line"
            raise UnsupportedFeature(
                f"the forward calls {name}() at {where} on a tensor that is not contiguous (strides "
                f"{tuple(written.stride())}): a captured step has a new tensor there, in another order of memory, and "
                f"what reads it would round otherwise. Remedy: {name[:-1]}() without the underscore, or .contiguous() "
                "before it."
            )
