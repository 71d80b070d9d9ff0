"""JointGraph: the forward and backward of one training step as captured, before anything is decided about it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from placemat.graph.ir import ModuleCall
from placemat.graph.torch_private import is_tangent, mutated_input_of_output

# Key in `node.meta["custom"]`: which of autocast's caches a cast goes to (see `autocast.mark_casts`).
CAST_CACHE = "placemat_autocast_cache"


@dataclass(frozen=True)
class JointInput:
    """One non-tangent input of the joint graph: its name for people ("h.0.mlp.weight", "args[0]").

    `is_leaf`: for autograd it is a leaf and no view; autocast keeps casts of no other tensor.
    """

    name: str
    is_parameter: bool
    is_leaf: bool = False
    requires_grad: bool = False


@dataclass(frozen=True)
class JointGraph:
    """A functional ATen graph: inputs are (primals, tangents), outputs are (forward outputs, gradients of the primals).

    Attributes:
        graph_module: the FX graph. Its nodes are read by `lower` and copied by `emit`.
        num_forward_outputs: how many of the outputs belong to the forward.
        inputs: one per primal, in order.
        fingerprint: identity of the graph, equal in every process (see `fingerprint`).
        unread_bytes: what the forward's calls that make tensors for nothing take at most, see `unread`: they are not in
            the graph. None if that is not known.
        times_returned: how often the caller has the output of each tangent, and may send a gradient through it.
        modules: submodules that the forward calls.
    """

    graph_module: fx.GraphModule
    num_forward_outputs: int
    inputs: tuple[JointInput, ...]
    fingerprint: str
    unread_bytes: int | None = 0
    times_returned: tuple[int, ...] = ()
    modules: tuple[ModuleCall, ...] = ()

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph_module.graph.find_nodes(op="placeholder"))

    @property
    def primals(self) -> list[fx.Node]:
        return [n for n in self.placeholders if not is_tangent(n)]

    @property
    def tangents(self) -> list[fx.Node]:
        return [n for n in self.placeholders if is_tangent(n)]

    @property
    def output_node(self) -> fx.Node:
        (node,) = self.graph_module.graph.find_nodes(op="output")
        return node

    @property
    def outputs(self) -> list[Any]:
        return list(cast(Sequence[Any], self.output_node.args[0]))

    @property
    def forward_outputs(self) -> list[Any]:
        return self.outputs[: self.num_forward_outputs]

    @property
    def gradients(self) -> list[Any]:
        """One per primal; None where there is no gradient."""
        return self.outputs[self.num_forward_outputs :]

    def output_of(self, tangent: fx.Node) -> Any:
        """The forward output that a tangent is the gradient of."""
        return self.outputs[self.output_node.meta["desc"].index(tangent.meta["desc"].output)]

    @property
    def mutated_inputs(self) -> dict[int, int]:
        """Output position -> index of the primal whose new content it carries (copied back after the forward)."""
        descriptions = self.output_node.meta.get("desc") or [None] * self.num_forward_outputs
        pairs = ((i, mutated_input_of_output(d)) for i, d in enumerate(descriptions[: self.num_forward_outputs]))
        return {i: m for i, m in pairs if m is not None}


def fingerprint(graph_module: fx.GraphModule, num_forward_outputs: int) -> str:
    """sha256 over the nodes in order: op, target, arguments (nodes as indices), results, and the torch version.

    No names and no addresses, so that the same model gives the same text in every process and on every rank. Device
    ordinals count from the first one seen, so that ranks agree.
    """
    text: list[str] = [torch.__version__, str(num_forward_outputs)]
    _describe_graph(graph_module, text, {})
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _describe_graph(graph_module: fx.GraphModule, text: list[str], ordinals: dict[int, int]) -> None:
    position = {node: i for i, node in enumerate(graph_module.graph.nodes)}
    for node in graph_module.graph.nodes:
        target = node.target if node.op in ("call_function", "call_method") else node.op
        arguments = _describe((node.args, node.kwargs), position, ordinals)
        text.append(
            f"{node.op}|{_target_name(target)}|{arguments}|{_describe(node.meta.get('val'), position, ordinals)}"
        )
        if node.target is torch.ops.aten._to_copy.default and CAST_CACHE in (node.meta.get("custom") or {}):
            text.append(f"cached in {node.meta['custom'][CAST_CACHE]}")
        if node.op == "get_attr":
            attribute = _attribute(graph_module, str(node.target))
            if isinstance(attribute, fx.GraphModule):
                _describe_graph(attribute, text, ordinals)


def _describe(x: Any, position: dict[fx.Node, int], ordinals: dict[int, int]) -> str:
    if isinstance(x, fx.Node):
        return f"%{position[x]}"
    if isinstance(x, (list, tuple)):
        return "(" + ",".join(_describe(y, position, ordinals) for y in x) + ")"
    if isinstance(x, dict):
        return "{" + ",".join(f"{k}:{_describe(y, position, ordinals)}" for k, y in x.items()) + "}"
    if isinstance(x, torch.Tensor):
        layout = tuple(x.stride()) if x.layout == torch.strided else x.layout
        return f"T{tuple(x.shape)}{layout}{x.dtype}{_describe_device(x.device, ordinals)}{x.requires_grad}"
    if isinstance(x, torch.device):
        return _describe_device(x, ordinals)
    if x is None or isinstance(x, (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)):
        return repr(x)
    return type(x).__name__


def _describe_device(device: torch.device, ordinals: dict[int, int]) -> str:
    if device.index is None:
        return device.type
    return f"{device.type}:{ordinals.setdefault(device.index, len(ordinals))}"


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module
