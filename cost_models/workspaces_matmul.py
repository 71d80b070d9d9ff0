"""CPU workspaces of matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from placemat.cost_models.operands import REDUCED, is_contiguous, output_tensors, tensor, transpose_buffer_bytes
from placemat.graph.ir import OpSignature, TensorSpec

Formula = Callable[[OpSignature, int], int]

_FLOAT_BYTES = 4


def _gemm_copy_bytes(matrix: TensorSpec) -> int:
    """Bytes of the copy of a matrix whose strides BLAS cannot take.

    Accepted: one dimension of stride 1 and the other at least as long as the first is wide (`addmm_impl_cpu_` in
    aten/src/ATen/native/LinearAlgebra.cpp). Only the last two dimensions are looked at.
    """
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.strides[-2:]
    if column_stride == 1 and row_stride >= max(1, columns):
        return 0
    if row_stride == 1 and column_stride >= max(1, rows):
        return 0
    return rows * columns * matrix.itemsize


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block


def onednn_gemm_bytes(m: int, k: int, n: int, dtype: str, num_threads: int, batch: int = 1) -> int:
    """Scratchpad of oneDNN's product of an (m, k) and a (k, n) matrix in a 16-bit dtype. An upper bound.

    Per thread a packed block of either operand, at most 256 rows of the first and 512 columns of the second, and
    their product in float32; float16 operands are widened to float32 where the CPU has no float16 instructions. The
    block sizes were fitted to 1500 random shapes on a CPU with AMX (torch 2.13, oneDNN 3.12, 1 to 8 threads): none
    exceeded the bound. A batch reuses it. Products of up to 16^3 multiplications do not go through oneDNN
    (`mkldnn_gemm_min_size`, aten/src/ATen/native/mkldnn/Matmul.cpp).
    """
    if batch * m * k * n <= 16**3:
        return 0
    depth, rows, columns = _round_up(k, 64), min(_round_up(m, 64), 256), min(_round_up(n, 64), 512)
    packed_itemsize = _FLOAT_BYTES if dtype == "float16" else 2
    return num_threads * (packed_itemsize * depth * (rows + columns) + _FLOAT_BYTES * rows * columns + 32768)


def _product(a: TensorSpec, b: TensorSpec, num_threads: int) -> int:
    """Copies of operands that BLAS cannot take, and for 16-bit dtypes oneDNN's scratchpad."""
    copies = _gemm_copy_bytes(a) + _gemm_copy_bytes(b)
    if a.dtype not in REDUCED:
        return copies
    (m, k), n, batch = a.shape[-2:], b.shape[-1], prod(a.shape[:-2])
    scratch = onednn_gemm_bytes(m, k, n, a.dtype, num_threads, batch)
    return scratch + sum(t.nbytes for t in (a, b) if _gemm_copy_bytes(t))


def _mm(signature: OpSignature, num_threads: int) -> int:
    return _product(tensor(signature, 0), tensor(signature, 1), num_threads)


def _addmm(signature: OpSignature, num_threads: int) -> int:
    """The bias is copied into the result first, then the product is added."""
    bias, out = tensor(signature, 0), output_tensors(signature)[0]
    copy = transpose_buffer_bytes(bias) if bias.shape == out.shape else 0
    return max(copy, _product(tensor(signature, 1), tensor(signature, 2), num_threads))


def _bmm(signature: OpSignature, num_threads: int) -> int:
    """One gemm per matrix if MKL's batched call cannot take the strides; small float products use a plain loop.

    Source: `bmm_out_or_baddbmm_` in LinearAlgebra.cpp ("contraction_size * res_rows * res_cols < 400").
    """
    a, b = tensor(signature, 0), tensor(signature, 1)
    if a.dtype not in REDUCED and a.shape[1] * a.shape[2] * b.shape[2] < 400:
        return 0
    return _product(a, b, num_threads)


def _splits(q_length: int, kv_length: int) -> tuple[int, int]:
    """Rows of queries and of keys per block (`flash_attention_kernel_impl`, FlashAttentionKernel.cpp)."""
    q_split = 256 if q_length >= 768 else 64 if q_length >= 192 else 32
    return min(q_split, q_length), min(512, kv_length)


def _swap(x: TensorSpec) -> TensorSpec:
    """(B, H, T, E) as (B, T, H, E)."""
    order = (0, 2, 1, 3)
    return replace(x, shape=tuple(x.shape[d] for d in order), strides=tuple(x.strides[d] for d in order))


def _flash_attention(signature: OpSignature, num_threads: int) -> int:
    """Per thread: a block of scores, its row maxima and sums, and a block of results, in float32 for 16-bit dtypes.

    16-bit dtypes add the scores in their own dtype and, where the kernel packs keys and values for AMX, packed copies
    of both; the bound assumes that it does. Source: `cpu_flash_attention` in
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp. q is (B, H, T, E).
    """
    q, k = tensor(signature, 0), tensor(signature, 1)
    (batch, heads, kv_length, head_size), (rows, columns) = k.shape, _splits(q.shape[2], k.shape[2])
    accumulate = max(_FLOAT_BYTES, q.itemsize)
    per_thread = (rows * columns + 2 * rows + rows * head_size) * accumulate
    if q.dtype not in REDUCED:
        return num_threads * per_thread
    even_head, even_columns, even_kv = (_round_up(size, 2) for size in (head_size, columns, kv_length))
    per_thread += (rows * even_columns + columns * head_size) * q.itemsize
    per_thread += rows * even_head * q.itemsize if head_size % 2 else 0
    packed = batch * heads * (kv_length * even_head + even_kv * head_size) * q.itemsize
    return num_threads * per_thread + packed


def _flash_attention_backward(signature: OpSignature, num_threads: int) -> int:
    """Per thread blocks of scores and of their gradient; one row of sums; the gradient as (B, T, H, E) if it is not.

    For 16-bit dtypes an upper bound: both blocks in that dtype too, and the scratchpad of one product per thread.
    Source: `cpu_flash_attention_backward`, same file.
    """
    grad, q, k = tensor(signature, 0), tensor(signature, 1), tensor(signature, 2)
    rows, columns = _splits(q.shape[2], k.shape[2])
    accumulate = max(_FLOAT_BYTES, q.itemsize)
    copy = 0 if is_contiguous(_swap(grad)) else grad.nbytes
    if q.dtype not in REDUCED:
        return copy + num_threads * 2 * rows * columns * accumulate + rows * accumulate
    head_size = q.shape[3]
    product = max(
        onednn_gemm_bytes(*shape, q.dtype, num_threads)
        for shape in ((rows, head_size, columns), (columns, rows, head_size), (rows, columns, head_size))
    )
    per_thread = 2 * rows * columns * (accumulate + q.itemsize) + product
    return copy + num_threads * per_thread + rows * accumulate


FORMULAS: dict[str, Formula] = {
    "aten.mm": _mm,
    "aten.addmm": _addmm,
    "aten.bmm": _bmm,
    "aten._scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
}
