"""Storages of FX nodes, by their fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from placemat.graph.errors import UnsupportedFeature

aten = torch.ops.aten

# Their element-wise result is reduced into its own storage (aten/src/ATen/native/Loss.cpp, Col2Im.cpp; measured with
# the profiler's allocator events, torch 2.13): the first argument has as many elements as that storage.
_SHRUNK = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.col2im.default,
)
_NONE = 0  # at::Reduction::None: the element-wise result is the result


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a storage: fake tensors of one trace share storages exactly where the real ones will."""
    return int(tensor.untyped_storage()._cdata)


def argument(node: fx.Node, name: str, default: Any) -> Any:
    """Value of a named argument of an operator call, positional or by keyword."""
    if name in node.kwargs:
        return node.kwargs[name]
    for i, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name == name:
            return node.args[i] if i < len(node.args) else parameter.default_value
    return default


def storage_bytes(node: fx.Node, tensor: torch.Tensor) -> int:
    """Bytes of the storage that a result of a call will have.

    Fake tensors know them, but for CPU kernels that shrink a larger result in place and keep its storage.
    """
    nbytes = int(tensor.untyped_storage().nbytes())
    if tensor.device.type == "cpu" and node.target in _SHRUNK and argument(node, "reduction", None) != _NONE:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        nbytes = max(nbytes, source.meta["val"].numel() * tensor.element_size())
    return nbytes


def tensors_of(node: fx.Node) -> list[torch.Tensor | None]:
    """The node's results, flat; None for a result that is absent or no tensor."""
    return list(_flat(node.meta.get("val")))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise UnsupportedFeature(
            f"a tensor of layout {tensor.layout} appears in the step (a sparse gradient, a sparse operand): its "
            "memory cannot be planned. Remedy: dense tensors, for instance Embedding(sparse=False)."
        )
    return tensor


def _flat(value: Any) -> Iterator[torch.Tensor | None]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield _dense(value) if isinstance(value, torch.Tensor) else None
