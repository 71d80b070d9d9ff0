"""Floating-point operations, bytes moved and random numbers drawn of an op, from its signature alone.

FLOPs (a multiply-add counts 2) come from the registry that `torch.utils.flop_counter.FlopCounterMode` uses, and from
formulas of our own for what it lacks (attention on CPU, products with vectors) or counts too high (the weight gradient
of a grouped convolution). Elementwise ops, normalisations and reductions count 0: bytes bound them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from placemat.cost_models.modes import outside_dispatch_modes
from placemat.cost_models.operands import (
    argument,
    base_target,
    input_tensors,
    output_tensors,
    storage_bytes,
    tensor,
)
from placemat.cost_models.workspaces import is_view
from placemat.graph.ir import OpSignature, TensorSpec

FlopFormula = Callable[[OpSignature], int]


def _convolution_backward(signature: OpSignature) -> int:
    """Either gradient costs as much as the forward: 2 x weight elements x positions.

    Every weight element meets, for each sample, each position of the output (of the input if transposed); both
    gradients are the same sums over the same products. torch's formula agrees for one group and counts the weight
    gradient `groups` times too high otherwise.
    """
    grad, x, weight = tensor(signature, 0), tensor(signature, 1), tensor(signature, 2)
    transposed, mask = argument(signature, 7, "transposed"), argument(signature, 10, "output_mask")
    positions = prod((x if transposed else grad).shape[2:])
    gradients = int(mask[0]) + int(mask[1])
    return gradients * 2 * weight.numel * positions * x.shape[0]


def _attended(rows: int, columns: int, causal: bool) -> int:
    """Scores that the CPU kernel computes per head: whole blocks of rows up to the diagonal if causal.

    Block rule: `num_keys = is_causal ? min(m + qBlockSize, kvSize) : kvSize` in FlashAttentionKernel.cpp.
    """
    if not causal:
        return rows * columns
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return sum(
        min(block, rows - start) * min(start + min(block, rows - start), columns) for start in range(0, rows, block)
    )


def _cpu_attention(signature: OpSignature) -> int:
    """Q K^T and P V: 4 x scores x head size (Dao 2023, FlashAttention-2, algorithm 1). q is (B, H, T, E)."""
    q, k, causal = tensor(signature, 0), tensor(signature, 1), argument(signature, 4, "is_causal", False)
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * _attended(q.shape[2], k.shape[2], causal)


def _cpu_attention_backward(signature: OpSignature) -> int:
    """Five products: Q K^T again, dO V^T, P^T dO, dS K, dS^T Q (FlashAttention-2, algorithm 2)."""
    q, k, causal = tensor(signature, 1), tensor(signature, 2), argument(signature, 7, "is_causal", False)
    return 10 * q.shape[0] * q.shape[1] * q.shape[3] * _attended(q.shape[2], k.shape[2], causal)


def _matrix_vector(index: int) -> FlopFormula:
    """2 x elements of the argument at `index`: every one of them is used once."""

    def formula(signature: OpSignature) -> int:
        return 2 * tensor(signature, index).numel

    return formula


def _grouped_products(count: int) -> FlopFormula:
    """Each row meets the weight of one group: 2 x rows x weight elements of a group, in each of `count` products."""

    def formula(signature: OpSignature) -> int:
        rows, weight = tensor(signature, 0), tensor(signature, 1)
        return count * 2 * rows.shape[0] * weight.shape[1] * weight.shape[2]

    return formula


_OWN: dict[str, FlopFormula] = {
    "aten.convolution_backward": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "aten.mv": _matrix_vector(0),
    "transformers.grouped_mm_fallback": _grouped_products(1),
    "transformers.grouped_mm_fallback_backward": _grouped_products(2),
    "aten.dot": _matrix_vector(0),
    "aten.addmv": _matrix_vector(1),
}


def _meta(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return torch.empty_strided(value.shape, value.strides, dtype=getattr(torch, value.dtype), device="meta")
    if isinstance(value, tuple):
        return [_meta(v) for v in value]
    return value


def _registered(target: str) -> Callable[..., int] | None:
    namespace, _, name = base_target(target).partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None) if name else None
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return formula


def flops(signature: OpSignature) -> int:
    """FLOPs of one run; 0 for ops that no formula covers."""
    own = _OWN.get(base_target(signature.target))
    if own is not None:
        return own(signature)
    formula = _registered(signature.target)
    if formula is None:
        return 0
    with outside_dispatch_modes():
        outputs = [_meta(o) for o in signature.outputs]
        out_val = outputs[0] if len(outputs) == 1 else outputs
        kwargs = {name: _meta(value) for name, value in signature.kwargs}
        return int(formula(*[_meta(a) for a in signature.args], **kwargs, out_val=out_val))


# Ops that look at shapes only, and ops that read a few rows of their first argument.
_CREATION = frozenset(
    f"aten.{name}"
    for name in """full_like zeros_like ones_like empty_like rand_like randn_like new_empty new_zeros new_ones new_full
    new_empty_strided""".split()
)
_UNTOUCHED = frozenset(("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty"))
_ROWS = frozenset(("aten.embedding", "aten.index_select", "aten.gather", "aten.index", "aten._unsafe_index"))
_FREE = frozenset(("placemat.border", "placemat.rng_state"))


def bytes_moved(signature: OpSignature) -> int:
    """Bytes read plus bytes written: storages of tensor inputs (an expanded one costs its storage) and outputs.

    Views move nothing. Lookups read as much as they write, and the indices. A loss on class indices reads one score
    per target.
    """
    base = base_target(signature.target)
    if is_view(signature.target) or base in _UNTOUCHED or signature.target in _FREE:
        return 0
    inputs = input_tensors(signature)
    written = sum(t.nbytes for t in output_tensors(signature))
    if base in _CREATION:
        return written
    if base in _ROWS:
        return 2 * written + sum(storage_bytes(t) for t in inputs[1:])
    if base in ("aten.nll_loss_forward", "aten.nll_loss2d_forward"):
        scores, target = inputs[:2]
        return written + target.numel * (scores.itemsize + target.itemsize)
    return written + sum(storage_bytes(t) for t in inputs)


def compute_dtype(signature: OpSignature) -> str:
    """Dtype of the arithmetic: the first floating one among the inputs, otherwise among the outputs, else float32."""
    for spec in (*input_tensors(signature), *output_tensors(signature)):
        if "float" in spec.dtype:
            return spec.dtype
    return "float32"


_RANDOM = frozenset(
    f"aten.{name}"
    for name in """native_dropout bernoulli rand rand_like randn randn_like randint uniform normal exponential
    rrelu_with_noise""".split()
)


def random_numbers(signature: OpSignature) -> int:
    """Random numbers that one run draws: one per output element; a dropout outside of training draws none."""
    base = base_target(signature.target)
    if base not in _RANDOM or (base == "aten.native_dropout" and argument(signature, 2, "train") is False):
        return 0
    return output_tensors(signature)[0].numel
