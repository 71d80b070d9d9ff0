"""Storages of FX nodes, by their fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a storage: fake tensors of one trace share storages exactly where the real ones will."""
    return int(tensor.untyped_storage()._cdata)


def tensors_of(node: fx.Node) -> list[torch.Tensor | None]:
    """The node's results, flat; None for a result that is absent or no tensor."""
    return list(_flat(node.meta.get("val")))


def _flat(value: Any) -> Iterator[torch.Tensor | None]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value if isinstance(value, torch.Tensor) else None
