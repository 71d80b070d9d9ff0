"""Synthetic inputs: from an op's signature to real tensors on which it can be run, alone and without its model.

- Layout: shapes, strides (expanded and transposed ones too) and dtypes are those of the signature.
- Floating values lie between 0.1 and 0.9: they are probabilities, positive, neither infinite nor denormal (a CPU takes
  a hundred times longer for those), and vary, so that comparisons cannot be predicted.
- Indices are in range and spread over it (`_BOUNDS`). Other integers are 0, which is in range wherever an op
  takes an index that we do not know of, and 1 where an op divides by them. Booleans are half True.
- No generator of PyTorch's is touched: values come from a generator of our own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from placemat.cost_models.operands import argument, base_target, input_tensors, storage_bytes, tensor
from placemat.graph.ir import OpSignature, TensorSpec

# Elements of the pattern that fills a tensor; a prime, so that rows of common sizes differ.
_PATTERN = 8191
_LOW, _HIGH = 0.1, 0.9

Bounds = dict[int, int]  # position of an argument -> its integers lie in [0, bound)
_DIVIDING = frozenset(("cumulative_batch_norm", "div", "floor_divide", "fmod", "remainder", "gcd", "lcm"))


def overload(target: str) -> torch._ops.OpOverload:
    """The operator of a signature's target: "aten.mm.default" -> torch.ops.aten.mm.default.

    Raises:
        AttributeError: there is no such operator here, or the target is no operator.
    """
    if target.count(".") != 2:
        raise AttributeError(f"{target} is no operator")
    namespace, packet, name = target.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), name)
    return found


def arguments(signature: OpSignature, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments on which the op can be called, tensors on `device` where the signature has them on its type."""
    schema = overload(signature.target)._schema.arguments
    by_name = {parameter.name: parameter for parameter in schema}
    name = _short_name(signature)
    rule = _BOUNDS.get(name)
    bounds = rule(signature) if rule is not None else {}
    fill = 1 if name in _DIVIDING else 0
    args = [
        _make(value, schema[i] if i < len(schema) else None, bounds.get(i), fill, device)
        for i, value in enumerate(signature.args)
    ]
    kwargs = {key: _make(value, by_name.get(key), None, fill, device) for key, value in signature.kwargs}
    return args, kwargs


def _short_name(signature: OpSignature) -> str:
    return base_target(signature.target).partition(".")[2].removesuffix("_")


def _make(value: Any, parameter: Any, bound: int | None, fill: int, device: torch.device) -> Any:
    if isinstance(value, TensorSpec):
        return make_tensor(value, device, bound, fill)
    if isinstance(value, tuple):
        return [_make(v, parameter, bound, fill, device) for v in value]
    if isinstance(value, str) and parameter is not None:
        return _from_text(value, str(parameter.real_type), device)
    return value


def _from_text(value: str, kind: str, device: torch.device) -> Any:
    """Dtypes, layouts, memory formats and devices are text in a signature."""
    if "ScalarType" in kind or "Layout" in kind or "MemoryFormat" in kind:
        return getattr(torch, value)
    if "Device" in kind:
        return device if torch.device(value).type == device.type else torch.device(value)
    return value


def make_tensor(spec: TensorSpec, device: torch.device, bound: int | None = None, fill: int = 0) -> Tensor:
    """A tensor of this layout; integers are indices in [0, bound) if a bound is given, otherwise all `fill`."""
    place = device if spec.device == device.type else torch.device(spec.device)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    count = storage_bytes(spec) // spec.itemsize
    pattern = _pattern(dtype, bound, fill, place)
    flat = torch.empty(count, dtype=dtype, device=place)
    whole = count - count % _PATTERN
    flat[:whole].view(-1, _PATTERN).copy_(pattern)
    flat[whole:].copy_(pattern[: count - whole])
    return flat.as_strided(spec.shape, spec.strides)


def _pattern(dtype: torch.dtype, bound: int | None, fill: int, device: torch.device) -> Tensor:
    uniform = _uniform().to(device)
    if dtype == torch.bool:
        return uniform < (_LOW + _HIGH) / 2
    if dtype.is_complex:
        return torch.complex(uniform, uniform.flip(0)).to(dtype)
    if dtype.is_floating_point:
        return uniform.to(dtype)
    if bound is None:
        return torch.full((_PATTERN,), fill, dtype=dtype, device=device)
    share = (uniform - _LOW) / (_HIGH - _LOW)
    return (share * bound).floor().clamp(0, max(0, bound - 1)).to(dtype)


@functools.cache
def _uniform() -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.empty(_PATTERN, dtype=torch.float32, device="cpu").uniform_(_LOW, _HIGH, generator=generator)


def _size(spec: Any, dim: int) -> int:
    return spec.shape[dim] if spec.shape else 1


def _embedding(signature: OpSignature) -> Bounds:
    return {1: tensor(signature, 0).shape[0]}


def _embedding_backward(signature: OpSignature) -> Bounds:
    return {1: argument(signature, 2, "num_weights")}


def _along_dim(signature: OpSignature) -> Bounds:
    """gather(self, dim, index), scatter(self, dim, index, src), index_add(self, dim, index, source), ..."""
    return {2: _size(tensor(signature, 0), argument(signature, 1, "dim"))}


def _selected_backward(signature: OpSignature) -> Bounds:
    """value_selecting_reduction_backward(grad, dim, indices, sizes, keepdim)"""
    return {2: argument(signature, 3, "sizes")[argument(signature, 1, "dim")]}


def _index_select_backward(signature: OpSignature) -> Bounds:
    """index_select_backward(grad, self_sizes, dim, index)"""
    return {3: argument(signature, 1, "self_sizes")[argument(signature, 2, "dim")]}


def _indexed(signature: OpSignature) -> Bounds:
    """index(self, indices), index_put(self, indices, values): the smallest indexed dimension bounds them all."""
    sizes = tensor(signature, 0).shape
    used = [n for n, index in zip(sizes, argument(signature, 1, "indices"), strict=False) if index is not None]
    return {1: min(used, default=1)}


def _classes(position: int) -> Callable[[OpSignature], Bounds]:
    """Class indices of a loss on scores (N, C, ...) or (C,): scores and target stand at `position` and after it."""

    def bounds(signature: OpSignature) -> Bounds:
        scores = tensor(signature, position)
        return {position + 1: scores.shape[1] if len(scores.shape) > 1 else scores.shape[0]}

    return bounds


def _pooled(self_position: int, index_position: int, dims: int) -> Callable[[OpSignature], Bounds]:
    """Backward of a max-pooling: an index points into the pooled input's last `dims` dimensions."""

    def bounds(signature: OpSignature) -> Bounds:
        return {index_position: prod(tensor(signature, self_position).shape[-dims:])}

    return bounds


def _unpooled(signature: OpSignature) -> Bounds:
    """max_unpool2d(self, indices, output_size)"""
    return {1: prod(argument(signature, 2, "output_size"))}


def _flat(signature: OpSignature) -> Bounds:
    """take(self, index), put(self, index, source)"""
    return {1: tensor(signature, 0).numel}


_BOUNDS: dict[str, Callable[[OpSignature], Bounds]] = {
    "embedding": _embedding,
    "embedding_renorm": _embedding,
    "_embedding_bag": lambda signature: {1: tensor(signature, 0).shape[0], 2: 1},
    "embedding_dense_backward": _embedding_backward,
    "value_selecting_reduction_backward": _selected_backward,
    "index_select_backward": _index_select_backward,
    "max_pool2d_with_indices_backward": _pooled(1, 7, 2),
    "max_pool3d_with_indices_backward": _pooled(1, 7, 3),
    "adaptive_max_pool2d_backward": _pooled(1, 2, 2),
    "adaptive_max_pool3d_backward": _pooled(1, 2, 3),
    "fractional_max_pool2d_backward": _pooled(1, 4, 2),
    "max_unpool2d": _unpooled,
    "max_unpool3d": _unpooled,
    **dict.fromkeys(("take", "put"), _flat),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"), _indexed),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _classes(0)),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward", "multi_margin_loss_backward"), _classes(1)),
    **dict.fromkeys(
        """gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill
        index_reduce""".split(),
        _along_dim,
    ),
}


def input_bytes(signature: OpSignature) -> int:
    """Memory that the synthetic inputs take."""
    return sum(map(storage_bytes, input_tensors(signature)))
