"""CPU workspaces of softmax, normalisations, classification losses, embeddings and indexing.

Formulas reproduce, to the byte unless their docstring says "upper bound", the events that torch.profiler reports for
torch 2.13 on CPU; the named source files of aten/src/ATen/native say where the bytes come from.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from placemat.cost_models.operands import (
    REDUCED,
    argument,
    contiguous_copy_bytes,
    input_tensors,
    is_channels_last,
    is_contiguous,
    output_tensors,
    tensor,
    tensors,
)
from placemat.graph.ir import OpSignature, TensorSpec

Formula = Callable[[OpSignature, int], int]

_FLOAT_BYTES = 4
_INDEX_BYTES = 8


def _softmax(signature: OpSignature, num_threads: int) -> int:
    """(Log-)softmax and their backwards make their operands contiguous first (SoftMax.cpp)."""
    return contiguous_copy_bytes(*input_tensors(signature))


def _safe_softmax(signature: OpSignature, num_threads: int) -> int:
    """Softmax, then a bool mask of -inf, its reduction over the dimension and a 0-dimensional zero."""
    x, dim = tensor(signature, 0), argument(signature, 1, "dim")
    rows = x.numel // x.shape[dim] if x.numel else 0
    return max(contiguous_copy_bytes(x), x.numel + rows + x.itemsize)


def _nll_loss_forward(signature: OpSignature, num_threads: int) -> int:
    """Contiguous copies of scores, targets and class weights, unless nothing is reduced (LossNLL.cpp)."""
    scores, target, weight = tensor(signature, 0), tensor(signature, 1), argument(signature, 2, "weight")
    if argument(signature, 3, "reduction") == 0:
        return contiguous_copy_bytes(weight)
    return contiguous_copy_bytes(scores, target, weight)


def _nll_loss_backward(signature: OpSignature, num_threads: int) -> int:
    """Contiguous copies of the gradient, targets and class weights (LossNLL.cpp, LossNLL2d.cpp)."""
    return contiguous_copy_bytes(
        argument(signature, 0, "grad_output"), argument(signature, 2, "target"), argument(signature, 3, "weight")
    )


def _layer_norm(signature: OpSignature, num_threads: int) -> int:
    x, weight, bias = tensor(signature, 0), argument(signature, 2, "weight"), argument(signature, 3, "bias")
    return contiguous_copy_bytes(x, weight, bias)


def _layer_norm_backward(signature: OpSignature, num_threads: int) -> int:
    """Contiguous copies, and two rows per thread for the gradients of weight and bias (layer_norm_kernel.cpp)."""
    grad, x, shape = tensor(signature, 0), tensor(signature, 1), argument(signature, 2, "normalized_shape")
    weight, mask = argument(signature, 5, "weight"), argument(signature, 7, "output_mask")
    copies = contiguous_copy_bytes(grad, x, weight)
    if not (mask[1] or mask[2]):
        return copies
    kept = sum(t.nbytes for t in (grad, x, weight) if t is not None and not is_contiguous(t))
    return max(copies, kept + 2 * num_threads * int(prod(shape)) * x.itemsize)


def _channels_innermost(x: TensorSpec) -> bool:
    """Whether batch norm walks x with its channels innermost: channels_last, or one element per channel and sample."""
    return prod(x.shape[2:]) == 1 if is_contiguous(x) else is_channels_last(x)


def _batch_norm(signature: OpSignature, num_threads: int) -> int:
    """Two rows of per-channel statistics in the parameters' dtype, one float row per thread if channels are innermost;
    afterwards the two rows that scale and shift (batch_norm_kernel.cpp).
    """
    x, weight = tensor(signature, 0), argument(signature, 1, "weight")
    channels = x.shape[1]
    row = channels * (weight.itemsize if weight is not None else x.itemsize)
    no_stats = signature.target.endswith(".no_stats")
    training = argument(signature, 3 if no_stats else 5, "training")
    scale_shift = 2 * channels * max(_FLOAT_BYTES, x.itemsize)
    if not training:
        return scale_shift
    per_thread = num_threads * channels * max(_FLOAT_BYTES, x.itemsize) if _channels_innermost(x) else 0
    copy = 0 if is_contiguous(x) or is_channels_last(x) else x.nbytes
    return copy + max(2 * row + per_thread, scale_shift)


def _batch_norm_backward(signature: OpSignature, num_threads: int) -> int:
    """A second input gradient that is allocated and dropped, then two float rows per thread if channels are innermost.

    An input and a gradient of different layouts take a general path. Source: Normalization.cpp, batch_norm_kernel.cpp.
    """
    grad, x = tensor(signature, 0), tensor(signature, 1)
    training, mask = argument(signature, 7, "train"), argument(signature, 9, "output_mask")
    channels, reduced = x.shape[1], x.dtype in REDUCED
    row = channels * max(_FLOAT_BYTES, x.itemsize)
    same_layout = (is_contiguous(x) and is_contiguous(grad)) or (is_channels_last(x) and is_channels_last(grad))
    if not same_layout:
        return channels * x.itemsize + ((channels + x.numel) * _FLOAT_BYTES if reduced else 0)
    dropped = x.nbytes if mask[0] else 0
    rows = 0
    if _channels_innermost(x):
        rows = 2 * num_threads * row + (3 * row if reduced else 0 if training else row)
    return max(dropped, rows)


def _group_norm(signature: OpSignature, num_threads: int) -> int:
    """Channels_last keeps two float rows per sample (group_norm_kernel.cpp); other layouts are copied."""
    x = tensor(signature, 0)
    batch, channels = int(signature.args[3]), int(signature.args[4])
    if is_contiguous(x):
        return 0
    return 2 * batch * channels * _FLOAT_BYTES + (0 if is_channels_last(x) else x.nbytes)


def _group_norm_backward(signature: OpSignature, num_threads: int) -> int:
    """Two float rows per sample, and a gradient in the input's layout (group_norm_kernel.cpp)."""
    grad, x = tensor(signature, 0), tensor(signature, 1)
    batch, channels = int(signature.args[5]), int(signature.args[6])
    sums = 2 * batch * channels * max(_FLOAT_BYTES, x.itemsize)
    if is_contiguous(x):
        return contiguous_copy_bytes(grad) + sums
    copies = 0 if is_channels_last(x) else x.nbytes
    return copies + (0 if is_channels_last(grad) else grad.nbytes) + sums


def _fused_rms_norm(signature: OpSignature, num_threads: int) -> int:
    """Composite on CPU: squares, normalised input and, for 16-bit dtypes, float32 copies. An upper bound."""
    x = tensor(signature, 0)
    return 2 * x.numel * max(_FLOAT_BYTES, x.itemsize)


def _embedding(signature: OpSignature, num_threads: int) -> int:
    return contiguous_copy_bytes(argument(signature, 1, "indices"))


def _embedding_dense_backward(signature: OpSignature, num_threads: int) -> int:
    return contiguous_copy_bytes(tensor(signature, 0), tensor(signature, 1))


def _index(signature: OpSignature, num_threads: int) -> int:
    """Index tensors are converted to int64; a mask becomes one index tensor per dimension."""
    total = 0
    for index in tensors(argument(signature, 1, "indices")):
        if index.dtype in ("bool", "uint8"):
            total += index.numel * _INDEX_BYTES * len(index.shape)
        elif index.dtype != "int64":
            total += index.numel * _INDEX_BYTES
    return total


def _sort(signature: OpSignature, num_threads: int) -> int:
    """Each thread sorts one row of values and indices. An upper bound (SortingKernel.cpp)."""
    x = tensor(signature, 0)
    longest = max(x.shape, default=1)
    values = x.nbytes if signature.target.startswith("aten.argsort") else 0
    return values + num_threads * longest * (x.itemsize + _INDEX_BYTES)


def _repeat(signature: OpSignature, num_threads: int) -> int:
    """Bookkeeping tensors of one entry per dimension. An upper bound."""
    return 8 * _INDEX_BYTES * len(argument(signature, 1, "repeats"))


def _scatter(signature: OpSignature, num_threads: int) -> int:
    """A 16-bit result is made in float32 (ScatterGatherKernel.cpp); a mean counts, for which this is an upper bound."""
    result = output_tensors(signature)[0]
    wide = result.numel * _FLOAT_BYTES if result.dtype in REDUCED else 0
    if argument(signature, 4, "reduce") != "mean":
        return wide
    counts = (result.numel + tensor(signature, 2, "index").numel) * result.itemsize
    return wide + counts + result.numel + _FLOAT_BYTES + _INDEX_BYTES


def _index_add(signature: OpSignature, num_threads: int) -> int:
    """A copy of a result that is not contiguous, and a float32 one in 16-bit (TensorAdvancedIndexing.cpp). An upper
    bound.
    """
    result = output_tensors(signature)[0]
    copy = 0 if is_contiguous(tensor(signature, 0)) else result.nbytes
    return copy + (result.numel * _FLOAT_BYTES if result.dtype in REDUCED else 0)


def _zero(signature: OpSignature, num_threads: int) -> int:
    return 0


def _named(formula: Formula, names: str) -> dict[str, Formula]:
    return {f"aten.{name}": formula for name in names.split()}


_ZERO = """index_select index_copy slice_backward select_backward
diagonal_backward diagonal_scatter as_strided_scatter topk repeat_interleave 
masked_scatter bucketize"""

FORMULAS: dict[str, Formula] = {
    **_named(_softmax, "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"),
    **_named(_nll_loss_forward, "nll_loss_forward nll_loss2d_forward"),
    **_named(_nll_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    **_named(_batch_norm, "_native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm"),
    **_named(_index, "index _unsafe_index index_put _unsafe_index_put"),
    **_named(_sort, "sort argsort"),
    **_named(_scatter, "gather scatter scatter_add scatter_reduce"),
    **_named(_zero, _ZERO),
    "aten.index_add": _index_add,
    "placemat_ops.cumulative_batch_norm": _batch_norm,
    "aten._safe_softmax": _safe_softmax,
    "aten.native_layer_norm": _layer_norm,
    "aten.native_layer_norm_backward": _layer_norm_backward,
    "aten.native_batch_norm_backward": _batch_norm_backward,
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _group_norm_backward,
    "aten._fused_rms_norm": _fused_rms_norm,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_dense_backward,
    "aten.repeat": _repeat,
}
