"""Selective activation checkpointing: blocks are checkpointed, but what matrix products and convolutions made is kept.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` with the policy of its documentation (keep what is
compute-intensive) and the one of torchtitan (keep every second matrix product as well as attention).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from benchmarks.peers.contender import Setting, nothing_known
from benchmarks.peers.torch_checkpoint import wrap_blocks
from benchmarks.work import Work
from tests.models import Workload

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_OTHERS = frozenset(
    {
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
    }
)
_EVERY = {1: "keep every product", 2: "keep every second product"}


def _contexts(every: int) -> tuple[Any, Any]:
    """Contexts of one checkpoint: attention, convolutions and every `every`-th matrix product are kept."""
    products = 0

    def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal products
        products += op in _PRODUCTS
        is_kept = op in _OTHERS or (op in _PRODUCTS and products % every == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Selective:
    """Every block is checkpointed; the policy says what of it is kept."""

    name = "selective checkpointing"

    def settings(self, work: Work) -> Sequence[Setting]:
        return [Setting(label, self.name, {"every": every}) for every, label in _EVERY.items()]

    def prepare(self, work: Work, workload: Workload, setting: Setting) -> Callable[[], str]:
        contexts = functools.partial(_contexts, int(setting.values["every"]))
        wrap_blocks(workload.model, work.block_paths(workload.model), contexts)
        return nothing_known
