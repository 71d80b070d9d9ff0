"""In place: which ops could write their result into an argument that nobody reads afterwards.

The joint graph is functional: where eager has `relu_`, or adds a gradient to another in place, a captured step makes a
new tensor. That takes up to three times as long (`clamp_min` of 4 MiB on the CPU: 1.4 ms, in place 0.4). Elementwise
kernels give the same bits in place, when result and argument have one shape, dtype and layout. Whether an argument's
storage is free to be written to is a matter of the schedule (`optimizer/emit.py`); here is what the graph says.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Elementwise operators, with the one that writes into the first argument and the one that writes into `out`, whose
# name differs. Only such as give the same bits and strides in every dtype and layout (`tests/test_in_place.py`):
# mul.Scalar rounds otherwise in half precision, and masked_fill has other strides (torch 2.13 on the CPU).
VARIANTS: Mapping[Any, tuple[Any, Any, str]] = {
    aten.relu.default: (aten.relu_.default, None, ""),
    aten.clamp_min.default: (aten.clamp_min_.default, None, ""),
    aten.hardtanh.default: (aten.hardtanh_.default, None, ""),
    aten.leaky_relu.default: (aten.leaky_relu_.default, None, ""),
    aten.silu.default: (aten.silu_.default, None, ""),
    aten.sigmoid.default: (aten.sigmoid_.default, None, ""),
    aten.tanh.default: (aten.tanh_.default, None, ""),
    aten.neg.default: (aten.neg_.default, None, ""),
    aten.add.Tensor: (aten.add_.Tensor, aten.add.out, "out"),
    aten.sub.Tensor: (aten.sub_.Tensor, aten.sub.out, "out"),
    aten.mul.Tensor: (aten.mul_.Tensor, aten.mul.out, "out"),
    aten.div.Tensor: (aten.div_.Tensor, aten.div.out, "out"),
    aten.pow.Tensor_Scalar: (aten.pow_.Scalar, None, ""),
    aten.where.self: (None, aten.where.self_out, "out"),
    aten.threshold_backward.default: (None, aten.threshold_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (None, aten.tanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (None, aten.sigmoid_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (None, aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (None, aten.gelu_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (None, aten.leaky_relu_backward.grad_input, "grad_input"),
}


@dataclass(frozen=True)
class InPlace:
    """A call that writes into one of its arguments.

    Attributes:
        target: the operator.
        out: name of the keyword under which it gets the argument once more; "" if it writes to its first argument.
    """

    target: Any
    out: str


def in_place_call(node: fx.Node, argument: fx.Node) -> InPlace | None:
    """How a call could write into `argument`; None if it cannot, or would not give the same."""
    own, with_out, name = VARIANTS.get(node.target, (None, None, ""))
    if not _alike(node.meta.get("val"), argument.meta.get("val")):
        return None
    if own is not None and node.args[0] is argument:
        return InPlace(own, "")
    return None if with_out is None else InPlace(with_out, name)


def _alike(result: object, argument: object) -> bool:
    """Whether two tensors have one layout and fill their storages."""
    if type(result) is not type(argument) or not isinstance(result, Tensor) or not isinstance(argument, Tensor):
        return False
    if result.layout != torch.strided or result.is_complex() or argument.is_neg():  # complex kernels round otherwise
        return False
    geometry = [(t.shape, t.stride(), t.dtype, t.device, t.storage_offset()) for t in (result, argument)]
    return geometry[0] == geometry[1] and result.untyped_storage().nbytes() == argument.untyped_storage().nbytes()


def candidates(node: fx.Node, base_of_value: Mapping[int, fx.Node], names: Names) -> Iterator[tuple[int, int, InPlace]]:
    """Values that a call could write its result into, the position of the argument that has each, and how.

    A value is none if the call reads it through a view, too; if it is no plain operator's result; or if something other
    than plain operators reads it, which might hold on to it.
    """
    if node.target not in VARIANTS:
        return
    for position, argument in enumerate(node.args):
        if not isinstance(argument, fx.Node):
            continue
        value = names.value_of_node.get(argument)
        if value is None or base_of_value.get(value) is not argument or not names.are_plain(value):
            continue
        if any(other is not argument and names.value_of_node.get(other) == value for other in node.all_input_nodes):
            continue
        if (how := in_place_call(node, argument)) is not None:
            yield value, position, how


class Names:
    """All nodes of a joint graph that show one storage: what made it, views, lists of views."""

    def __init__(self, value_of_node: Mapping[fx.Node, int]) -> None:
        self.value_of_node = value_of_node
        self._nodes: dict[int, list[fx.Node]] = {}
        for node, value in value_of_node.items():
            self._nodes.setdefault(value, []).append(node)

    def are_plain(self, value: int) -> bool:
        """Whether operators of PyTorch make a value, and nothing but such reads it, or is returned it."""
        nodes = self._nodes[value]
        return all(_is_plain(n) and all(map(_is_plain, n.users)) for n in nodes)


def _is_plain(node: fx.Node) -> bool:
    return _is_aten(node) or node.target is operator.getitem


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
