"""Outputs that are views of inputs: AOTAutograd leaves their gradients out of the joint graph."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from placemat.graph.errors import UnsupportedFeature
from placemat.graph.joint import JointGraph
from placemat.graph.sources import user_line
from placemat.graph.storages import storage_key, tensors_of

aten = torch.ops.aten

# Views that show an element several times: their backward sums.
_REPEATING = (aten.unfold.default, aten.expand.default, aten.as_strided.default)

_BACKWARDS_OF_VIEWS = frozenset(
    {
        aten.slice_backward.default,
        aten.select_backward.default,
        aten.diagonal_backward.default,
        aten.cat.default,
        aten.stack.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten._to_copy.default,
    }
)


def hooked_inputs(dynamo_graph: fx.Graph) -> frozenset[int]:
    """Positions of the inputs of which the forward hooks a gradient (`register_hook`): their own, or that of a view."""
    hooked = {
        storage_key(tensor)
        for node in dynamo_graph.nodes
        if getattr(node.target, "__name__", node.target) == "register_hook" and isinstance(node.args[0], fx.Node)
        if isinstance(tensor := node.args[0].meta.get("example_value"), torch.Tensor)
    }
    inputs = [node.meta.get("example_value") for node in dynamo_graph.find_nodes(op="placeholder")]
    return frozenset(i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and storage_key(t) in hooked)


def split_gradients(joint: JointGraph, hooked: Container[str] = ()) -> Mapping[int, str]:
    """Position among the user's outputs of a view of an input -> what it is, where its gradient would be another.

    Such a view is made again outside the compiled region, and so is its backward: autograd adds what comes through it
    to the gradient of the input that the region returns. In eager it is one term among the others, in its turn. With
    two terms in all the sum is the same; with more, or if the view's own backward sums, it is not. Hooks that the
    forward registers are inside the region, too, and would not see what comes through the view (`hooked`: names).
    """
    mutated = joint.mutated_inputs
    inputs = {
        storage_key(t): (joint.inputs[i].name, gradient)
        for i, (primal, gradient) in enumerate(zip(joint.primals, joint.gradients, strict=True))
        if isinstance(gradient, fx.Node) or joint.inputs[i].name in hooked
        for t in tensors_of(primal)
        if t is not None
    }
    found: dict[int, str] = {}
    for position, node in enumerate(joint.forward_outputs):
        if position in mutated or not isinstance(node, fx.Node) or node.op == "placeholder":
            continue
        for tensor in tensors_of(node):
            name, gradient = inputs.get(storage_key(tensor), ("", None)) if tensor is not None else ("", None)
            is_split = isinstance(gradient, fx.Node) and (_is_sum(gradient) or _sums_twice(node))
            if is_split or name in hooked:
                where = user_line(node.meta.get("stack_trace")) or "an unknown line"
                found[position - len(mutated)] = f"a view of input {name}, made at {where}"
    return found


def _is_sum(gradient: fx.Node) -> bool:
    """Whether a gradient has several terms: in the input's shape, or in that of a view that the forward reads."""
    node = gradient
    while node.target in _BACKWARDS_OF_VIEWS:
        node = node.all_input_nodes[0]
    return node.target is aten.add.Tensor


def _sums_twice(view: fx.Node) -> bool:
    """Whether a view whose backward sums, or one on the way to it, is read inside the region, too."""
    node = view
    while node.op == "call_function":
        if node.target in _REPEATING:
            return len(view.users) > 1 or len(node.users) > 1
        node = node.all_input_nodes[0]
    return False


def guard_views(outputs: Any, split: Mapping[int, str]) -> None:
    """Let a backward that reaches one of these outputs of a call be refused."""
    for position, description in split.items():
        output = outputs[position]
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(_refusal(description))


def _refusal(description: str) -> Any:
    def refuse(grads: Any) -> None:
        raise UnsupportedFeature(
            f"the loss reaches an output of the model that is {description}, and the input has other gradients or "
            "hooks: they would be summed in another order than eager's, or left out. Remedy: return .clone() of that "
            "output, or leave it out of the loss."
        )

    return refuse
