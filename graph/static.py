"""Static bytes: what is alive during the whole step, whatever the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from placemat.graph.allocator import allocated_bytes
from placemat.graph.joint import JointInput


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Tensor leaves of arguments or outputs, looking into dataclasses too."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])


def static_bytes(model: nn.Module, args: Any, kwargs: Any, *, accumulate_grad: bool = False) -> Mapping[str, int]:
    """Category -> bytes of distinct storages, as their allocator rounds them.

    Parameters, buffers, inputs, and gradients that exist already; of what is sharded over processes the own shard.
    """
    seen: set[int] = set()
    parameters = [local_part(p) for p in model.parameters()]
    trained = [p for p in parameters if p.requires_grad] if accumulate_grad else []
    existing = sum(allocated_bytes(p.numel() * p.element_size(), p.device.type) for p in trained)
    return {
        "parameters": _storage_bytes(parameters, seen),
        "buffers": _storage_bytes(map(local_part, model.buffers()), seen),
        "inputs": _storage_bytes(tensors_in((args, kwargs)), seen),
        "existing gradients": existing,
    }


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: its shard of a DTensor, and the tensor itself of any other."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def graph_static_bytes(
    known: Sequence[JointInput], tensors: Sequence[torch.Tensor], *, accumulate_grad: bool
) -> Mapping[str, int]:
    """The same for the inputs of a graph whose module is not known: what the graph does not read is not there."""
    pairs = list(zip(known, tensors, strict=True))
    parameters = [t for k, t in pairs if k.is_parameter]
    buffers = [t for k, t in pairs if not k.is_parameter and "_buffers" in k.name]
    seen: set[int] = set()
    trained = [p for p in parameters if p.requires_grad] if accumulate_grad else []
    return {
        "parameters": _storage_bytes(parameters, seen),
        "buffers": _storage_bytes(buffers, seen),
        "inputs": _storage_bytes(tensors, seen),
        "existing gradients": sum(allocated_bytes(p.numel() * p.element_size(), p.device.type) for p in trained),
    }


def _storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.layout != torch.strided:
            total += sum(_storage_bytes([part], seen) for part in _sparse_parts(tensor))
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += allocated_bytes(storage.nbytes(), tensor.device.type)
    return total


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.crow_indices(), tensor.col_indices(), tensor.values()] if tensor.layout == torch.sparse_csr else []


def devices_of(model: nn.Module, args: Any, kwargs: Any) -> set[torch.device]:
    """Devices of the model's parameters, buffers and tensor inputs (0-dim CPU tensors may join any device)."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    return {t.device for t in tensors if not (t.device.type == "cpu" and t.dim() == 0)} or {torch.device("cpu")}
