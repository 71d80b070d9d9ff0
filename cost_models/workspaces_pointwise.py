"""CPU workspaces of pointwise ops, copies and random ops.

Source of the rules: `TensorIteratorBase::compute_types` (aten/src/ATen/TensorIterator.cpp) casts every CPU operand
whose dtype is not the common one into a temporary of its own, all alive until the loop ends; a Python number that a
kernel wraps into a tensor costs 8 bytes and a cast of its own (`wrapped_scalar_tensor`). Formulas reproduce the events
that torch.profiler reports for torch 2.13 on CPU to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from placemat.cost_models.operands import (
    argument,
    contiguous_copy_bytes,
    input_tensors,
    is_contiguous,
    output_tensors,
    overload,
    tensor,
    tensors,
    transpose_buffer_bytes,
)
from placemat.graph.ir import OpSignature, TensorSpec

Number = bool | int | float | complex
Formula = Callable[[OpSignature, int], int]

NUMBER_BYTES = 8  # a Python int or float as a tensor: int64 or float64


def _category(dtype: str) -> int:
    """Rank in type promotion: bool < integer < floating < complex."""
    if dtype == "bool":
        return 0
    return 3 if dtype.startswith("complex") else 2 if "float" in dtype else 1


def _promote(dtypes: Iterable[str]) -> str | None:
    common: torch.dtype | None = None
    for name in dtypes:
        dtype: torch.dtype = getattr(torch, name)
        common = dtype if common is None else torch.promote_types(common, dtype)
    return None if common is None else str(common).removeprefix("torch.")


def _number_dtype(number: Number) -> str:
    if isinstance(number, bool):
        return "bool"
    return "int64" if isinstance(number, int) else "float32"


def result_dtype(operands: Iterable[TensorSpec | Number]) -> str:
    """Type promotion: tensors with dimensions first, then 0-dimensional ones, then numbers, by category.

    Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc.
    """
    listed = list(operands)
    groups = [
        _promote(t.dtype for t in listed if isinstance(t, TensorSpec) and t.shape),
        _promote(t.dtype for t in listed if isinstance(t, TensorSpec) and not t.shape),
        _promote(_number_dtype(n) for n in listed if not isinstance(n, TensorSpec)),
    ]
    common: str | None = None
    for group in groups:
        if group is not None and (common is None or _category(group) > _category(common)):
            common = group
    assert common is not None, "an elementwise op without operands"
    return common


def dtype_itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def cast_bytes(operands: Iterable[TensorSpec | Number], common: str) -> int:
    size = dtype_itemsize(common)
    total = 0
    for operand in operands:
        if isinstance(operand, TensorSpec):
            total += operand.numel * size if operand.dtype != common else 0
        else:
            natural = "bool" if isinstance(operand, bool) else "int64" if isinstance(operand, int) else "float64"
            total += dtype_itemsize(natural) + (size if natural != common else 0)
    return total


def _unary(signature: OpSignature, num_threads: int) -> int:
    """Casts of tensor operands to the output's dtype; numbers are passed by value."""
    out = output_tensors(signature)[0]
    return cast_bytes(input_tensors(signature), out.dtype)


def _binary(signature: OpSignature, num_threads: int) -> int:
    """As `_unary`, and numbers among the first two arguments are wrapped into tensors."""
    out = output_tensors(signature)[0]
    return cast_bytes([a for a in signature.args[:2] if a is not None], out.dtype)


def _comparison(signature: OpSignature, num_threads: int) -> int:
    """As `_binary`; the output is bool whatever the common dtype of the operands."""
    operands = signature.args[:2]
    return cast_bytes(operands, result_dtype(operands))


def _where(signature: OpSignature, num_threads: int) -> int:
    out = output_tensors(signature)[0]
    values = signature.args[1:3]
    numbers = sum(not isinstance(v, TensorSpec) for v in values)  # made in the output's dtype at once
    return cast_bytes([v for v in values if isinstance(v, TensorSpec)], out.dtype) + numbers * out.itemsize


def _pow_scalar(signature: OpSignature, num_threads: int) -> int:
    """pow(number, tensor): a base of 1 is a fill."""
    return 0 if signature.args[0] == 1 else _binary(signature, num_threads)


def _native_dropout(signature: OpSignature, num_threads: int) -> int:
    """`output.mul_(mask).mul_(scale)`: the bool mask is cast to the output's dtype, then the scale is wrapped.

    Source: native_dropout_cpu in aten/src/ATen/native/Dropout.cpp.
    """
    x = tensor(signature, 0)
    if argument(signature, 2, "train") is False or x.numel == 0:
        return 0
    return max(x.nbytes, NUMBER_BYTES + x.itemsize)


def _native_dropout_backward(signature: OpSignature, num_threads: int) -> int:
    """`grad * mask * scale`: the first product is alive while the second is made."""
    grad = tensor(signature, 0)
    return grad.nbytes + NUMBER_BYTES + grad.itemsize


def _log_sigmoid_forward(signature: OpSignature, num_threads: int) -> int:
    return contiguous_copy_bytes(tensor(signature, 0))


def _normal(signature: OpSignature, num_threads: int) -> int:
    """Means that are a tensor and one deviation: a second tensor. Deviations that are a tensor: the check of their
    signs, an upper bound. Source: DistributionTemplates.h.
    """
    if len(signature.args) > 1 and isinstance(signature.args[1], TensorSpec):
        return 4 * NUMBER_BYTES + 1
    return output_tensors(signature)[0].nbytes if isinstance(signature.args[0], TensorSpec) else 0


def _copy(signature: OpSignature, num_threads: int) -> int:
    """A copy of a transposed matrix into a contiguous one of the same dtype needs a block buffer."""
    source, out = input_tensors(signature)[-1], output_tensors(signature)[0]
    if not is_contiguous(out) or source.dtype != out.dtype:
        return 0
    return transpose_buffer_bytes(source)


def _cat(signature: OpSignature, num_threads: int) -> int:
    """Inputs of another dtype than the result are copied one after another through a temporary of their own dtype."""
    out = output_tensors(signature)[0]
    return max((t.nbytes for t in tensors(signature.args[0]) if t.dtype != out.dtype), default=0)


def _zero(signature: OpSignature, num_threads: int) -> int:
    return 0


def _named(formula: Formula, names: str) -> dict[str, Formula]:
    return {f"aten.{name}": formula for name in names.split()}


_UNARY = """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac log log10 log1p
log2 neg reciprocal relu round rsqrt sgn sigmoid sign sin sinh sqrt square tan tanh trunc clamp clamp_min clamp_max
addcmul addcdiv lerp pow gelu gelu_backward silu silu_backward sigmoid_backward tanh_backward threshold_backward
elu elu_backward hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward softplus
softplus_backward mish mish_backward leaky_relu leaky_relu_backward _prelu_kernel _prelu_kernel_backward relu6
cumsum cumprod nan_to_num xlogy"""
_BINARY = """add sub mul div rsub remainder fmod floor_divide maximum minimum atan2 bitwise_and bitwise_or bitwise_xor
fmax fmin hypot"""
_COMPARISON = "eq ne lt le gt ge logical_and logical_or logical_xor"
_COPY = "clone _to_copy copy contiguous reshape slice_scatter select_scatter lift_fresh_copy"
_ZERO = """fill full full_like zeros zeros_like ones ones_like empty empty_like empty_strided new_empty new_zeros
new_ones new_full new_empty_strided arange scalar_tensor eye linspace tril triu bernoulli rand randn rand_like
randn_like randint uniform logical_not bitwise_not isnan isinf masked_fill
glu glu_backward log_sigmoid_backward constant_pad_nd flip"""

FORMULAS: dict[str, Formula] = {
    **_named(_unary, _UNARY),
    **_named(_binary, _BINARY),
    **_named(_comparison, _COMPARISON),
    **_named(_copy, _COPY),
    **_named(_zero, _ZERO),
    **_named(_cat, "cat stack"),
    "aten.normal": _normal,
    "aten.where": _where,
    "aten.native_dropout": _native_dropout,
    "aten.native_dropout_backward": _native_dropout_backward,
    "aten.log_sigmoid_forward": _log_sigmoid_forward,
}


def pointwise_formula(target: str) -> Formula | None:
    """Formula of an op of this family by its full target, None for others."""
    base = target.rsplit(".", 1)[0]
    if base == "aten.pow" and overload(target) == "Scalar":
        return _pow_scalar
    if base == "aten.pow" and overload(target) == "Tensor_Tensor":
        return _binary
    return FORMULAS.get(base)
