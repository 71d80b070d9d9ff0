"""The loss that the caller computes between forward and backward: which outputs it reaches, and what it holds.

The forward is captured once more with the loss behind it. Marks (identity operators) on the forward's outputs tell in
the joint graph where the model ends and the loss begins, and which outputs get a gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from placemat.graph import gradients, torch_private
from placemat.graph.capture import capture
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.joint import JointGraph
from placemat.graph.loss_region import LossRegion
from placemat.graph.order import ancestors, split_phases
from placemat.graph.storages import storage_bytes, storage_key, tensors_of


@torch.library.custom_op("placemat::mark", mutates_args=())
def _mark(x: torch.Tensor, index: int) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("placemat::mark_gradient", mutates_args=())
def _mark_gradient(g: torch.Tensor, index: int) -> torch.Tensor:
    return g.clone()


_mark.register_fake(lambda x, index: torch.empty_like(x))
_mark_gradient.register_fake(lambda g, index: torch.empty_like(g))
_mark.register_autograd(
    lambda ctx, g: (_mark_gradient(g, ctx.index), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "index", inputs[1]),
)
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)
_NUMBER_BYTES = 8  # int64 or float64 (`wrapped_scalar_tensor`)
_MARK = torch.ops.placemat.mark.default
_MARK_GRADIENT = torch.ops.placemat.mark_gradient.default


def capture_loss(
    joint: JointGraph,
    forward: Callable[..., Any],
    loss_fn: Callable[[Any], torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: KeptModules | None = None,
) -> LossRegion:
    """What `loss_fn(forward(...))` does at the border of `joint`, the capture of `forward` alone. Nothing is executed.

    Raises:
        CaptureError: the loss cannot be captured.
        UnsupportedFeature: the loss does not depend on the model's outputs, or their type is opaque to PyTorch; loss_fn
            does not take one argument.
    """
    _check_signature(loss_fn)

    def with_loss(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(output)
        marked = [_mark(t, i) if isinstance(t, torch.Tensor) and t.requires_grad else t for i, t in enumerate(leaves)]
        return loss_fn(
            pytree.tree_unflatten(marked, structure)
        ), leaves  # leaves: so that no part of the model is left out

    whole = capture(with_loss, args, kwargs, kept)
    graph = whole.graph_module.graph
    loss_outputs = _outputs_behind_marks(whole)
    if not loss_outputs:
        raise UnsupportedFeature(
            "loss_fn(output) does not depend on any differentiable tensor that the model returns. Remedy: check "
            "loss_fn; if the output is an object of your own class, register it with "
            "torch.utils._pytree.register_pytree_node."
        )
    others = [t for t in whole.tangents if whole.output_of(t) not in loss_outputs]
    gradients.prune_tangents(graph, others)
    if len(loss_outputs) != 1 or any(t is None or t.numel() != 1 for n in loss_outputs for t in tensors_of(n)):
        raise UnsupportedFeature(
            "loss_fn must return one tensor with one element. Remedy: reduce it, with sum() or mean()."
        )
    is_output = any(n.target is _MARK for n in loss_outputs)
    losses = [] if is_output else [(n, t) for n in loss_outputs for t in tensors_of(n) if t is not None]
    loss_bytes = sum(storage_bytes(n, t) for n, t in losses)
    return LossRegion(
        used_tangents=_used_tangents(joint, whole),
        workspace_bytes=_workspace_bytes(whole, {storage_key(t) for _, t in losses}),
        held_bytes=loss_bytes + sum(t.numel() * t.element_size() for _, t in losses),  # and what backward() starts from
        tangents_held=is_output or not torch_private.TANGENTS_ARE_FREED,
    )


def _check_signature(loss_fn: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(None)
    except TypeError:
        raise UnsupportedFeature(
            f"loss_fn takes {signature}, and is called with one argument, what the model returns. Remedy: "
            "loss_fn=lambda output: your_loss(output, targets), with targets made from the output's shape."
        ) from None


def _outputs_behind_marks(whole: JointGraph) -> set[fx.Node]:
    outputs = [n for n in whole.forward_outputs if isinstance(n, fx.Node)]
    return {n for n in outputs if any(a.target is _MARK for a in ancestors([n]))}


def _used_tangents(joint: JointGraph, whole: JointGraph) -> frozenset[int]:
    """Tangents of `joint` whose outputs the loss sends a gradient into.

    The model's calls come first and in the same order in both graphs, so positions identify them.
    """
    positions = {node: i for i, node in enumerate(_calls(joint))}
    by_position = dict(enumerate(_calls(whole)))
    reached = {n.args[1] for n in whole.graph_module.graph.find_nodes(op="call_function", target=_MARK_GRADIENT)}
    sources = [
        n.args[0] for n in whole.graph_module.graph.find_nodes(op="call_function", target=_MARK) if n.args[1] in reached
    ]
    storages = {storage_key(t) for n in sources for t in tensors_of(n) if t is not None}
    used = set()
    for i, tangent in enumerate(joint.tangents):
        output = joint.output_of(tangent)
        twin = by_position.get(positions.get(output, -1), output)
        assert twin.target == output.target, "the model was captured differently with its loss"
        if any(t is not None and storage_key(t) in storages for t in tensors_of(twin)):
            used.add(i)
    return frozenset(used)


def _calls(joint: JointGraph) -> list[fx.Node]:
    """Calls that an output of the forward needs; what only a backward reads depends on which tangents there are."""
    needed = ancestors([n for n in joint.forward_outputs if isinstance(n, fx.Node)])
    return [n for n in split_phases(joint)[0] if n in needed and n.target is not _MARK]


def _workspace_bytes(whole: JointGraph, losses: set[int]) -> int:
    """Most bytes that the loss holds beside itself (`losses`: its storages) and the gradients it returns.

    An upper bound on what eager does: every intermediate of the loss lives until the loss is computed, and on until its
    last use in the loss's backward if that reads it. What one node of autograd makes and reads lives until it returns.
    """
    forward, backward = split_phases(whole)
    inside = _after([n for n in forward if n.target is _MARK], forward)
    wanted = ancestors([n for n in backward if n.target is _MARK_GRADIENT])
    steps = [n for n in forward if n in inside] + [
        n for n in backward if n in wanted and n.target is not _MARK_GRADIENT
    ]
    outside = {
        storage_key(t) for n in whole.graph_module.graph.nodes if n not in steps for t in tensors_of(n) if t is not None
    }
    last_use = {
        storage_key(t): i
        for i, n in enumerate(steps)
        for m in (n, *n.all_input_nodes)
        for t in tensors_of(m)
        if t is not None
    }
    returned = {
        storage_key(t)
        for n in whole.graph_module.graph.find_nodes(op="call_function", target=_MARK_GRADIENT)
        for t in tensors_of(n.args[0])
        if t is not None
    }
    live: dict[int, int] = {}
    peak = 0
    num_forward = sum(n in inside for n in forward)
    saved_numbers = sum(_number_bytes(n) for n in steps[:num_forward])
    for i, node in enumerate(steps):
        for tensor in tensors_of(node):
            if tensor is not None and (key := storage_key(tensor)) not in outside:
                live[key] = storage_bytes(node, tensor)
        held = saved_numbers + sum(size for k, size in live.items() if k not in returned and k not in losses)
        peak = max(peak, held + _number_bytes(node))
        if i >= num_forward - 1 and _ends_autograd_node(steps, i):
            for key in [k for k in live if last_use[k] <= i and k not in returned]:
                del live[key]
    return peak


def _number_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that eager wraps Python numbers into: autograd saves those that are factors."""
    if node.target not in _PRODUCTS:
        return 0
    return sum(_NUMBER_BYTES for a in node.args[:2] if isinstance(a, (int, float)))


def _ends_autograd_node(steps: Sequence[fx.Node], index: int) -> bool:
    """Whether the next call belongs to another node of autograd: calls of one share its sequence number."""
    if index + 1 == len(steps):
        return True
    present, following = (steps[i].meta.get("seq_nr") for i in (index, index + 1))
    return present is None or present != following


def _after(marks: Iterable[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Calls that are computed from a mark, marks left out."""
    marked = set(marks)
    inside: set[fx.Node] = set()
    for node in nodes:
        if node not in marked and any(n in inside or n in marked for n in node.all_input_nodes):
            inside.add(node)
    return inside
