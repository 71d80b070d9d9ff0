"""Where a step passes from the module to its caller and back: outputs, the loss, tangents, gradients."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from placemat.graph.ir import Role
from placemat.graph.op_builder import Builder, append, new_value, pseudo_op, values_behind
from placemat.graph.storages import storage_key, tensors_of


def mark_outputs(build: Builder) -> None:
    """The caller holds the outputs (and AOT the bases of view outputs) until the step is over."""
    mutated = build.joint.mutated_inputs
    for i, node in enumerate(build.joint.forward_outputs):
        if i not in mutated and isinstance(node, fx.Node):
            for value in values_behind(build.value_of_node, node):
                _pin(build, value, "output")


def _pin(build: Builder, value: int, role: Role) -> None:
    build.values[value] = replace(build.values[value], pinned=True, role=role)


def add_copy_back(build: Builder) -> None:
    """New contents of overwritten inputs live until the forward has returned, when they are copied back."""
    outputs = build.joint.forward_outputs
    nodes = [outputs[i] for i in build.joint.mutated_inputs if isinstance(outputs[i], fx.Node)]
    values = tuple(sorted({v for n in nodes for v in values_behind(build.value_of_node, n)}))
    if not values:
        return
    for value in values:
        if not build.values[value].pinned:
            build.values[value] = replace(build.values[value], role="mutation")
    append(build, pseudo_op(build, "copy_back", "forward", values, ()), None)


def add_border(build: Builder) -> int:
    """The caller's turn: the loss and its gradient, which become the tangents."""
    outputs = tuple(sorted({v.index for v in build.values if v.pinned}))
    index = len(build.ops)
    tangents, copied_bytes = _add_tangents(build, index)
    if copied_bytes and build.loss.tangents_held:
        tangents.append(new_value(build, "copied_tangents", copied_bytes, index, "tangent", pinned=True))
    if view_bytes := _view_gradient_bytes(build):
        tangents.append(new_value(build, "gradients_of_views", view_bytes, index, "gradient", pinned=True))
    if build.loss.held_bytes:
        tangents.append(new_value(build, "loss", build.loss.held_bytes, index, "output", pinned=True))
    passing_bytes = 0 if build.loss.tangents_held else copied_bytes
    workspace_bytes = max(build.loss.workspace_bytes, passing_bytes)
    op = pseudo_op(build, "border", "border", outputs, tuple(tangents), known_workspace_bytes=workspace_bytes)
    append(build, op, None)
    return index


def _add_tangents(build: Builder, border: int) -> tuple[list[int], int]:
    """Values of the tangents that the loss sends, and the bytes of those that backward reads a sum of.

    Where an output is returned several times, every occurrence may have a tangent, and the backward has their sum.
    """
    tangents: list[int] = []
    copied_bytes = 0
    times_returned = build.joint.times_returned or (1,) * len(build.joint.tangents)
    for i, (node, times) in enumerate(zip(build.joint.tangents, times_returned, strict=True)):
        if i not in build.loss.used_tangents:
            continue
        (tensor,) = tensors_of(node)
        assert tensor is not None
        nbytes = tensor.numel() * tensor.element_size()  # dense, whatever the output is
        is_copied = times > 1
        copied_bytes += times * nbytes if is_copied else 0
        pinned = build.loss.tangents_held and not is_copied
        value = new_value(build, node.name, nbytes, border, "tangent", pinned=pinned, tensor=tensor)
        build.value_of_storage[storage_key(tensor)] = value
        build.value_of_node[node] = value
        build.base_of_value[value] = node
        tangents.append(value)
    return tangents, copied_bytes


def _view_gradient_bytes(build: Builder) -> int:
    """Bytes of gradients that autograd makes for inputs of which the forward returns views.

    Such views are made outside of the captured region. Their backward runs before the region's own, and makes gradients
    as large as the inputs, which wait for what the region adds. Every view may have a gradient, too.
    """
    joint = build.joint
    trained = [n for n, known in zip(joint.primals, joint.inputs, strict=True) if known.requires_grad]
    inputs = {storage_key(t): t for n in trained for t in tensors_of(n) if t is not None}
    views = [n for i, n in enumerate(joint.forward_outputs) if isinstance(n, fx.Node) and i not in joint.mutated_inputs]
    seen = [t for n in views if n.op == "call_function" for t in tensors_of(n) if t is not None]
    of_inputs = [t for t in seen if storage_key(t) in inputs]
    whole = {storage_key(t): inputs[storage_key(t)] for t in of_inputs}
    return sum(t.numel() * t.element_size() for t in (*of_inputs, *whole.values()))
