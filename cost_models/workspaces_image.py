"""CPU workspaces of pooling, resizing, padding and other image ops.

Formulas reproduce, to the byte unless their docstring says "upper bound", the events that torch.profiler reports for
torch 2.13 on CPU; the named source files of aten/src/ATen/native say where the bytes come from.
"""

from __future__ import annotations

from collections.abc import Callable

from placemat.cost_models.operands import (
    argument,
    contiguous_copy_bytes,
    input_tensors,
    is_channels_last,
    is_contiguous,
    output_tensors,
    tensor,
    transpose_buffer_bytes,
)
from placemat.graph.ir import OpSignature, TensorSpec

Formula = Callable[[OpSignature, int], int]

_INDEX_BYTES = 8


def _layout_copy(spec: TensorSpec, channels_last: bool) -> int:
    dense = is_channels_last(spec) if channels_last else is_contiguous(spec)
    return 0 if dense else spec.nbytes + transpose_buffer_bytes(spec)


def _pool(signature: OpSignature, num_threads: int) -> int:
    """Pooling copies an input that is neither contiguous nor channels_last (MaxPoolKernel.cpp, AvgPoolKernel.cpp)."""
    x = tensor(signature, 0)
    return 0 if is_channels_last(x) else _layout_copy(x, channels_last=False)


def _pool_backward(signature: OpSignature, num_threads: int) -> int:
    """Gradient and indices in the input's layout; a mismatch also makes a second input gradient.

    An upper bound then.
    """
    grad, x = tensor(signature, 0), tensor(signature, 1)
    channels_last = is_channels_last(x) and not is_contiguous(x)
    int64 = [t for t in input_tensors(signature)[2:] if t.dtype == "int64"]
    copies = sum(_layout_copy(t, channels_last) for t in (grad, *int64))
    return copies + (x.nbytes if copies and channels_last else 0)


def _upsample_weights(signature: OpSignature) -> int:
    """Per output position of each dimension: source index and weight, once per tap of the kernel."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    taps = 4 if "bicubic" in signature.target else 2 if "linear" in signature.target else 1
    return sum(out.shape[2:]) * taps * (_INDEX_BYTES + x.itemsize)


def _upsample(signature: OpSignature, num_threads: int) -> int:
    """Small two-dimensional images go through channels_last copies of input and output, others through index tables.

    Source: `_use_vectorized_kernel_cond_2d` and upsample_generic_Nd_kernel_impl in UpSampleKernel.cpp; an upper bound,
    the larger of both where the choice depends on the build.
    """
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    tables = _upsample_weights(signature)
    copy = 0 if is_contiguous(x) or is_channels_last(x) else x.nbytes
    two_dimensional = len(x.shape) == 4 and "bicubic" not in signature.target
    if two_dimensional and is_channels_last(x) and x.shape[1] > 3:
        return 0
    if not two_dimensional or is_channels_last(x) or sum(out.shape[2:]) > 128:
        return tables + copy
    return max(tables, x.nbytes + out.nbytes)


def _upsample_backward(signature: OpSignature, num_threads: int) -> int:
    """The gradient in one of both dense layouts; bicubic copies channels_last too."""
    grad = tensor(signature, 0)
    if is_channels_last(grad) and "bicubic" not in signature.target:
        return 0
    return contiguous_copy_bytes(grad)


def _upsample_antialias(signature: OpSignature, num_threads: int) -> int:
    """One intermediate image per resized dimension, and the filters. An upper bound."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    return x.nbytes + out.nbytes + 16 * _upsample_weights(signature)


def _contiguous_inputs(signature: OpSignature, num_threads: int) -> int:
    """Ops that copy operands which are not contiguous. An upper bound."""
    return contiguous_copy_bytes(*input_tensors(signature))


def _input_copy(signature: OpSignature, num_threads: int) -> int:
    """Ops that work in a full copy of their input."""
    return tensor(signature, 0).nbytes


def _col2im(signature: OpSignature, num_threads: int) -> int:
    """The result keeps a storage of the input's size."""
    return max(0, tensor(signature, 0).nbytes - output_tensors(signature)[0].nbytes)


def _unfold_backward(signature: OpSignature, num_threads: int) -> int:
    sizes, dim = argument(signature, 1, "input_sizes"), argument(signature, 2, "dim")
    return int(sizes[dim]) * _INDEX_BYTES


def _zero(signature: OpSignature, num_threads: int) -> int:
    return 0


def _named(formula: Formula, names: str) -> dict[str, Formula]:
    return {f"aten.{name}": formula for name in names.split()}


_POOL = """max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d
_adaptive_avg_pool3d adaptive_max_pool2d"""
_POOL_BACKWARD = """max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward
avg_pool3d_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward"""
_UPSAMPLE = """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d"""
_CONTIGUOUS_INPUTS = """reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d reflection_pad1d_backward
reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward grid_sampler_2d
grid_sampler_2d_backward"""

FORMULAS: dict[str, Formula] = {
    **_named(_pool, _POOL),
    **_named(_pool_backward, _POOL_BACKWARD),
    **_named(_upsample, _UPSAMPLE),
    **_named(_upsample_backward, " ".join(f"{name}_backward" for name in _UPSAMPLE.split())),
    **_named(_upsample_antialias, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    **_named(_contiguous_inputs, _CONTIGUOUS_INPUTS),
    **_named(_input_copy, "roll im2col"),
    **_named(_zero, "pixel_shuffle pixel_unshuffle"),
    "aten.col2im": _col2im,
    "aten.unfold_backward": _unfold_backward,
}
