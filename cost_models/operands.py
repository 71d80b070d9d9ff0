"""Reading an op's operands: where an argument is, how a tensor lies in memory, what a copy of it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from placemat.graph.ir import OpSignature, TensorSpec

# at::internal::GRAIN_SIZE: below this many elements a CPU loop or reduction stays on one thread
# (aten/src/ATen/TensorIterator.h).
GRAIN_SIZE = 32768

REDUCED = frozenset({"float16", "bfloat16"})


def base_target(target: str) -> str:
    """The op without its overload: "aten.mm.default" -> "aten.mm"."""
    return target.rsplit(".", 1)[0] if target.count(".") >= 2 else target


def overload(target: str) -> str:
    """The overload alone: "aten.where.self" -> "self"."""
    return target.rsplit(".", 1)[1] if target.count(".") >= 2 else ""


def argument(signature: OpSignature, index: int, name: str, default: Any = None) -> Any:
    """Value of one parameter, given by position or by name; `default` is the schema's."""
    if index < len(signature.args):
        return signature.args[index]
    return dict(signature.kwargs).get(name, default)


def tensor(signature: OpSignature, index: int, name: str = "") -> TensorSpec:
    """A tensor argument that the op's schema requires."""
    spec = argument(signature, index, name)
    assert isinstance(spec, TensorSpec), f"{signature.target}: argument {index} is {spec!r}, not a tensor"
    return spec


def tensors(values: object) -> Iterator[TensorSpec]:
    """Every TensorSpec in nested tuples, in order."""
    if isinstance(values, TensorSpec):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


def input_tensors(signature: OpSignature) -> list[TensorSpec]:
    return [*tensors(signature.args), *tensors([v for _, v in signature.kwargs])]


def output_tensors(signature: OpSignature) -> list[TensorSpec]:
    return list(tensors(signature.outputs))


def device_type(signature: OpSignature) -> str:
    """Where the op runs: the device type of its first result, or of its first argument if it has none; else "cpu"."""
    specs = output_tensors(signature) or input_tensors(signature)
    return specs[0].device if specs else "cpu"


def storage_bytes(spec: TensorSpec) -> int:
    """Bytes between the first and the last element, both included: an expanded dimension costs nothing."""
    if spec.numel == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))) * spec.itemsize


def _has_strides(spec: TensorSpec, order: Sequence[int]) -> bool:
    """Dense in the given order of dimensions, innermost first; strides of single elements do not matter."""
    expected = 1
    for dim in order:
        if spec.shape[dim] != 1 and spec.strides[dim] != expected:
            return False
        expected *= spec.shape[dim]
    return True


def is_contiguous(spec: TensorSpec) -> bool:
    return spec.numel == 0 or _has_strides(spec, range(len(spec.shape) - 1, -1, -1))


def is_channels_last(spec: TensorSpec) -> bool:
    """Dense with channels innermost: torch.channels_last (4 dimensions) or channels_last_3d (5)."""
    ndim = len(spec.shape)
    return ndim in (4, 5) and _has_strides(spec, (1, *range(ndim - 1, 1, -1), 0))


def transpose_buffer_bytes(source: TensorSpec) -> int:
    """Block buffer of a copy from a transposed matrix into a contiguous one of the same dtype.

    Such copies go through one block of 60 x 60 elements (120 x 120 for uint8) once the matrix holds 3600 elements:
    `copy_transpose_valid` and `copy_same_type_transpose_` in aten/src/ATen/native/Copy.cpp.
    """
    if len(source.shape) != 2 or source.numel < 60 * 60 or source.strides != (1, source.shape[0]):
        return 0
    block = 120 if source.dtype == "uint8" else 60
    return block * block * source.itemsize


def contiguous_copy_bytes(*specs: TensorSpec | None) -> int:
    """Peak bytes of `.contiguous()` of several tensors one after another, all copies kept: 0 for contiguous ones."""
    copied = [s for s in specs if s is not None and not is_contiguous(s)]
    held = peak = 0
    for spec in copied:
        held += spec.nbytes
        peak = max(peak, held + transpose_buffer_bytes(spec))
    return peak
