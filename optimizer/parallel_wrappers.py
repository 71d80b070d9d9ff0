"""Modules that other code spreads over processes or devices: which can be optimized, and which are refused by name.

A plan is made of one graph of plain tensors on one device. DistributedDataParallel around an optimized module leaves it
so; FSDP does for the module that is one of its units, whose parameters its hooks gather before the forward and again
before the backward. Whatever would put communication *into* the forward that is captured is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from placemat.graph import torch_private
from placemat.graph.errors import UnsupportedFeature


def refuse_parallel(model: nn.Module, *, is_called: bool) -> None:
    """Refuse a module with a parallel wrapper in it, or with parameters that are not whole.

    Args:
        model: the module to optimize.
        is_called: a call is captured now; otherwise parameters that FSDP has sharded at the moment are fine, as they
            are whole when the module is called.

    Raises:
        UnsupportedFeature: names the module or the parameter.
    """
    for path, module in model.named_modules():
        if (reason := _wrapper(path, module)) is not None:
            raise UnsupportedFeature(reason)
    sharded = next((name for name, p in model.named_parameters() if is_distributed_tensor(p)), None)
    is_unit = is_unit_of_fsdp(model)
    if sharded is not None and is_unit and is_called:
        raise UnsupportedFeature(
            f"parameter {sharded} is sharded by fully_shard() outside of a forward, so the call cannot be captured. "
            "Remedy: plan before fully_shard(), or optimize() without example inputs, which plans on the first "
            "training call, when the parameters are whole."
        )
    if sharded is not None and not is_unit:
        raise UnsupportedFeature(
            f"parameter {sharded} is a DTensor (tensor parallelism, or a fully_shard() around a larger module): its "
            "operators communicate, and a plan is for plain tensors. Remedy: optimize the modules whose parameters are "
            "plain, or, with FSDP, each module that fully_shard() is called on."
        )


def is_distributed_tensor(tensor: Any) -> bool:
    return isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor"))


def is_unit_of_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule"))


def _wrapper(path: str, module: nn.Module) -> str | None:
    """Why a module, at a path from the one that is optimized, is in the way of a plan; None if it is not."""
    where = f"{path} is a {type(module).__name__}" if path else f"the model is a {type(module).__name__}"
    inner = f"model.{path}" if path else "model"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return (
            f"{where}, whose forward talks to other ranks; that is no part of a plan. Remedy: optimize the module in "
            f"it, before or after wrapping: DistributedDataParallel(placemat.optimize(model, ...)), or "
            f"placemat.optimize({inner}.module, ...)."
        )
    if isinstance(module, nn.DataParallel):
        return (
            f"{where}, which runs copies of its module on several devices; a plan is for one. Remedy: "
            "DistributedDataParallel with one process per device."
        )
    if isinstance(module, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")):
        return f"{where}. {FSDP1}"
    if path and is_unit_of_fsdp(module):
        return (
            f"{path} is sharded by fully_shard() on its own: its parameters are gathered and freed inside of the "
            "forward that would be one graph. Remedy: placemat.distributed.optimize_units(model, budget), with one "
            "budget for all of them; or optimize each module that fully_shard() is called on."
        )
    if torch_private.is_flat_fsdp(module):
        return f"{where} inside of a FullyShardedDataParallel. {FSDP1}"
    if torch_private.has_ddp_casts(module):
        return (
            f"{where} inside of a DistributedDataParallel(mixed_precision=...), which exchanges the contents of its "
            "parameters while they are in use. Remedy: torch.autocast instead."
        )
    if isinstance(module, nn.SyncBatchNorm) and module.training and _num_ranks(module.process_group) > 1:
        return (
            f"{where}: it exchanges statistics with other ranks in the middle of the forward, which a plan does not "
            "do. Remedy: BatchNorm with the statistics of each rank, or optimize the modules around it."
        )
    return None


def _num_ranks(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


FSDP1 = (
    "FSDP1 replaces parameters by views of one flat tensor while the forward runs, which a plan made for the module "
    "does not know. Remedy: fully_shard() (FSDP2) on each optimized module, or DistributedDataParallel."
)


def _loaded(module: str, name: str) -> Any:
    """A class, or () if nobody has imported its module: then nothing is an instance of it."""
    return getattr(sys.modules.get(module), name, ())
