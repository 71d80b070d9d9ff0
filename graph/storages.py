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
# They clone their first argument with the whole storage under it (clone_preserve_strides in TensorShape.cpp and
# FunctionalInverses; measured, torch 2.13), where shape propagation says the part that the argument shows.
_WHOLE_STORAGE = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.copy.default,
)
# Normalisations save float32 statistics of a 16-bit input if their parameters are float32 (`param_scalar_type` in
# aten/src/ATen/native/mixed_data_type.h), where shape propagation says 16-bit: position of the weight.
_MIXED_STATISTICS = {
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
    aten._native_batch_norm_legit_functional.default: 1,
    aten._native_batch_norm_legit.no_stats: 1,
}
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

    Fake tensors know them, but for kernels that clone a storage of which they are shown a part, and CPU kernels that
    shrink a larger result in place and keep its storage, or save wider statistics.
    """
    nbytes = int(tensor.untyped_storage().nbytes())
    if node.target in _WHOLE_STORAGE:
        nbytes = max(nbytes, _bytes_behind(node.args[0]))  # type: ignore[arg-type]
    if tensor.device.type != "cpu":
        return nbytes
    if node.target in _SHRUNK and argument(node, "reduction", None) != _NONE:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        nbytes = max(nbytes, source.meta["val"].numel() * tensor.element_size())
    if node.target in _MIXED_STATISTICS and any(tensor is t for t in tensors_of(node)[1:3]):
        weight = node.args[_MIXED_STATISTICS[node.target]]
        if isinstance(weight, fx.Node):
            nbytes = max(nbytes, tensor.numel() * weight.meta["val"].element_size())
    return nbytes


def _bytes_behind(node: fx.Node) -> int:
    """Bytes of the storage in which a node's tensor lives: those of the call that made it, before all views."""
    tensor = node.meta["val"]
    key = storage_key(tensor)
    while True:
        earlier = (
            n for n in node.all_input_nodes if any(t is not None and storage_key(t) == key for t in tensors_of(n))
        )
        source = next(earlier, None)
        if source is None:
            return storage_bytes(node, tensor)
        node = source


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
