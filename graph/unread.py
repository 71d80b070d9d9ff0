"""Unread calls: tensors that a forward makes for nothing. Eager makes them; the joint graph is without them.

A local variable may hold such a tensor during the whole forward, so what they take counts in the bound of a step with
the original forward. Libraries make them often: attention masks of transformers come with a `torch.arange(1)`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from placemat.graph import torch_private
from placemat.graph.order import ancestors
from placemat.graph.storages import storage_key

_aten = torch.ops.aten
# With pointwise operators and views, those whose kernels allocate nothing but their results and, at most, a copy of
# each tensor that they read or write in another dtype.
_PLAIN = frozenset(
    {
        _aten.arange,
        _aten.clone,
        _aten.copy_,
        _aten.empty,
        _aten.fill_,
        _aten.full,
        _aten.lift_fresh,
        _aten.masked_fill_,
        _aten.ones,
        _aten.scalar_tensor,
        _aten.zeros,
        _aten._to_copy,
    }
)
_WIDEST_BYTES = 16  # of an element: complex128


def unread_bytes(graph_module: fx.GraphModule) -> int | None:
    """Upper bound of what the unread calls of a Dynamo graph take, if all their results are held to the end.

    Returns:
        Bytes; 0 without such calls. None if one of them is no plain operator, or of tensors that cannot be made again
        here: its kernel may take any amount.
    """
    graph = graph_module.graph
    read = ancestors([n for n in graph.nodes if n.op == "output"])
    kept = [n for n in graph.nodes if n in read or n.op in ("placeholder", "get_attr")]
    there = {key for node in kept for key in _storages(node)}
    unread = [n for n in graph.nodes if n not in read and n.op not in ("placeholder", "get_attr")]
    if all(key in there for node in unread for key in _storages(node)):
        return 0
    ran = [node for node in unread if _tensors(node) or node.target is operator.setitem]
    return _bytes_of(ran)


def _bytes_of(calls: Sequence[fx.Node]) -> int | None:
    """Make the calls once more, of fake tensors, and add up what the operators inside them make."""
    if any(node.op not in ("call_function", "call_method") for node in calls):
        return None
    inputs = {source for node in calls for source in node.all_input_nodes}
    tensors = [t for node in (*inputs, *calls) for t in _tensors(node)]
    mode = torch_private.common_fake_mode(tensors)
    if mode is None:
        return None
    with torch.no_grad(), mode, _Counted() as counted:
        for node in calls:
            _call(node)
    return counted.made_bytes + counted.temporary_bytes if counted.is_plain else None


def _call(node: fx.Node) -> None:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("example_value"))
    function: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
    function(*args, **kwargs)


class _Counted(TorchDispatchMode):
    """Counts what operators make: results, which stay, and the largest temporaries of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.made_bytes = self.temporary_bytes = 0
        self.is_plain = True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.is_plain &= _is_plain(func) or _is_write_by_number(func, args)
        result = func(*args, **(kwargs or {}))
        there = {storage_key(t) for t in _leaves((args, kwargs))}
        self.made_bytes += sum(t.untyped_storage().nbytes() for t in _leaves(result) if storage_key(t) not in there)
        copies_bytes = _WIDEST_BYTES * sum(t.numel() for t in _leaves((args, kwargs, result)))
        self.temporary_bytes = max(self.temporary_bytes, copies_bytes)
        return result


def _is_plain(op: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if op.namespace == "prim":  # asks a tensor for its device and the like
        return True
    return op.is_view or torch.Tag.pointwise in op.tags or op.overloadpacket in _PLAIN


def _is_write_by_number(op: Any, args: Sequence[Any]) -> bool:
    """`x[i] = y` with int64 indices on the CPU: a loop over them. A mask becomes numbers first; CUDA may sort them."""
    if op is not _aten.index_put_.default or any(args[3:]):
        return False
    indices = _leaves(args[1])
    return all(i.dtype == torch.int64 and i.device.type == "cpu" for i in indices)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return _leaves(node.meta.get("example_value"))


def _storages(node: fx.Node) -> list[int]:
    return [storage_key(torch_private.below_transforms(t)) for t in _tensors(node)]


def _leaves(value: Any) -> list[torch.Tensor]:
    """Dense tensors; what makes others is no plain operator."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [t for t in tensors if t.layout == torch.strided]
