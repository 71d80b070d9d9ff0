"""Lower: from a JointGraph to an OpGraph, with the map back to FX that the emitter needs.

What becomes what:
- a call whose results all share storage with its inputs (views, detach, getitem of a view) is no op: it folds into the
  storage that it views, and is applied again wherever it is needed;
- every other call is an op; each storage that it creates is a value, freed on its own;
- inputs of the graph (parameters, buffers, user tensors, constants) are static: they are alive anyway.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from placemat.graph import autocast, batch_norm, eager_lower, gradients, purity
from placemat.graph.allocator import allocated_bytes
from placemat.graph.arriving import take_as_they_come
from placemat.graph.border import add_border, add_copy_back, mark_outputs
from placemat.graph.handing_out import Positions, add_handouts
from placemat.graph.in_place import Names
from placemat.graph.ir import Op, OpGraph, Phase
from placemat.graph.joint import JointGraph
from placemat.graph.loss_region import LossRegion
from placemat.graph.module_calls import CALL, IN_PLACE, UNNAMED
from placemat.graph.op_builder import Builder, append, new_value, pseudo_op, values_behind
from placemat.graph.order import split_phases, writes
from placemat.graph.signature import signature
from placemat.graph.sources import module_paths, user_line
from placemat.graph.storages import storage_bytes, storage_key, tensors_of

# Bytes of a saved generator state: the Mersenne twister of the CPU, (seed, offset) of the CUDA generator
# (torch.default_generator.get_state(), torch 2.9 to 2.14). A model on the meta device stands for one on a GPU.
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16, "meta": 16}


@dataclass(frozen=True)
class Lowering:
    """An OpGraph and, for the emitter, the FX node behind every op and the storage behind every node.

    `node_of_op` has None for pseudo-ops; `value_of_node` maps a node (op result, getitem or view) to the value it
    lives in, and is silent for nodes that live in static storages; `base_of_value` is the node to save for a value.
    `handouts` maps the pseudo-ops at which autograd gets gradients to primals; it is empty for a step of one segment.
    """

    joint: JointGraph
    graph: OpGraph
    node_of_op: tuple[fx.Node | None, ...]
    value_of_node: Mapping[fx.Node, int]
    base_of_value: Mapping[int, fx.Node]
    state_of_op: Mapping[int, int]  # random op -> value that holds its generator state
    fake_rng_state: torch.Tensor
    planned_tangents: frozenset[int]  # tangents that the lowered backward reads
    handouts: Mapping[int, Positions] = field(default_factory=dict)

    @functools.cached_property
    def names(self) -> Names:
        return Names(self.value_of_node)

    @functools.cached_property
    def op_of_node(self) -> Mapping[fx.Node, int]:
        return {node: i for i, node in enumerate(self.node_of_op) if node is not None}


def lower(
    joint: JointGraph,
    *,
    device: str,
    static_bytes: Mapping[str, int],
    loss: LossRegion | None = None,
    accumulate_grad: bool = False,
    segments: int = 1,
) -> Lowering:
    """Lower a joint graph.

    Args:
        joint: as captured. Its BatchNorm backwards are edited (see `batch_norm`).
        device: device type that the budget is about; all values are taken to live there.
        static_bytes: category -> bytes alive during the whole step (see `static.static_bytes`).
        loss: the caller's loss; by default every differentiable output gets a gradient that the caller holds.
        accumulate_grad: gradients of the parameters exist already and are added to.
        segments: in how many parts the backward hands out gradients, at most (see `handing_out`).
    """
    loss = loss or LossRegion(frozenset(range(len(joint.tangents))))
    graph = joint.graph_module.graph
    _merge_results(graph)
    cached = [i for i, known in enumerate(joint.inputs) if known.is_leaf]
    autocast.merge_weight_casts(graph, [joint.primals[i] for i in cached], [joint.gradients[i] for i in cached])
    batch_norm.drop_running_statistics(graph)
    batch_norm.drop_statistics_copies(graph)
    moved = gradients.prune_tangents(graph, [t for i, t in enumerate(joint.tangents) if i not in loss.used_tangents])
    take_as_they_come(graph, moved)
    eager_lower.check_sums(graph)
    build = Builder(joint, loss)
    _bind_static(build)
    forward, backward = split_phases(joint)
    paths = module_paths(graph)
    for node in forward:
        purity.check_draw_order(node)
        _add_call(build, node, "forward", device, paths[node])
    mark_outputs(build)
    add_copy_back(build)
    border = add_border(build)
    for node in backward:
        _add_call(build, node, "backward", device, paths[node])
    handouts = add_handouts(build, segments, accumulate_grad)
    op_graph = OpGraph(
        ops=tuple(build.ops),
        values=tuple(replace(v, bytes=allocated_bytes(v.bytes, device)) for v in build.values),
        border=border,
        static_bytes=dict(static_bytes),
        device=device,
        fingerprint=joint.fingerprint,
        notes=eager_lower.notes(graph, device),
        modules=joint.modules,
    )
    return Lowering(
        joint=joint,
        graph=op_graph,
        node_of_op=tuple(build.nodes),
        value_of_node=build.value_of_node,
        base_of_value=build.base_of_value,
        state_of_op=build.state_of_op,
        fake_rng_state=_fake_rng_state(joint, device),
        planned_tangents=loss.used_tangents,
        handouts=handouts,
    )


def _fake_rng_state(joint: JointGraph, device: str) -> torch.Tensor:
    """Stand-in for a saved generator state, as AOTAutograd wants one for every output of a forward."""
    example = next(t for n in joint.placeholders for t in tensors_of(n) if t is not None)
    with getattr(example, "fake_mode", contextlib.nullcontext()):
        return torch.empty(RNG_STATE_BYTES[device], dtype=torch.uint8)


def _merge_results(graph: fx.Graph) -> None:
    """Let every result of an op have one name: a second getitem of the same index is the first."""
    for node in list(graph.nodes):
        first: dict[Any, fx.Node] = {}
        for user in list(node.users):
            if user.target is operator.getitem and user.args[0] is node:
                kept = first.setdefault(user.args[1], user)
                if kept is not user:
                    user.replace_all_uses_with(kept)
                    graph.erase_node(user)


def _bind_static(build: Builder) -> None:
    joint = build.joint
    overwritten = set(joint.mutated_inputs.values())
    for i, node in enumerate(joint.primals):
        for tensor in tensors_of(node):
            if tensor is not None:
                build.value_of_storage[storage_key(tensor)] = None
        if i in overwritten:
            build.mutated_reads[node] = f"input {joint.inputs[i].name}"
    for node in joint.graph_module.graph.find_nodes(op="get_attr"):
        for tensor in tensors_of(node):
            if tensor is not None:
                build.value_of_storage[storage_key(tensor)] = None


def _add_call(build: Builder, node: fx.Node, phase: Phase, device: str, path: str) -> None:
    """Add a call as an op, or fold it into the storage that it views."""
    mutated = next((build.mutated_reads[n] for n in node.all_input_nodes if n in build.mutated_reads), None)
    if _is_view(build, node) or node.target is operator.getitem:  # storages of results were registered with their op
        _alias(build, node)
        if mutated is not None:
            build.mutated_reads[node] = mutated
        return
    inputs = _reads(build, node)
    recompute_inputs, extra = inputs, 0
    reads_overwritten = mutated if not batch_norm.replays_without_statistics(node) else _other_mutated(build, node)
    why_not = "it runs in the backward" if phase == "backward" else purity.why_not_recomputable(node, reads_overwritten)
    if phase == "forward" and why_not is None and purity.is_random(node):
        state = _add_rng_state(build, node, device)
        recompute_inputs, extra = (*inputs, state), RNG_STATE_BYTES[device]
    op = Op(
        index=len(build.ops),
        name=node.name,
        signature=signature(node),
        phase=phase,
        inputs=inputs,
        recompute_inputs=recompute_inputs,
        outputs=_new_values(build, node, len(build.ops)),
        recomputable=why_not is None,
        why_not=why_not,
        module_path=path,
        source=user_line(node.meta.get("stack_trace")),
        known_workspace_bytes=eager_lower.workspace_bytes(node),
        known_runtime_s=eager_lower.runtime_s(node),
        known_recompute_workspace_bytes=extra,
        autograd_node=_autograd_node(node),
        overwrites=_overwrites(build, node, inputs) if phase == "forward" else None,
        is_unnamed=bool((node.meta.get("custom") or {}).get(UNNAMED)),
        call=(node.meta.get("custom") or {}).get(CALL),
        reads_static=any(_is_static(build, n) for n in node.all_input_nodes),
    )
    append(build, op, node)


def _other_mutated(build: Builder, node: fx.Node) -> str | None:
    """The overwritten input that a BatchNorm reads beside its running statistics, if any."""
    running = {node.args[3], node.args[4]}
    return next(
        (build.mutated_reads[n] for n in node.all_input_nodes if n in build.mutated_reads and n not in running), None
    )


def _autograd_node(node: fx.Node) -> int | None:
    """Sequence number of the node of autograd that a call belongs to; sums of gradients belong to none."""
    if node.meta.get("is_gradient_acc"):
        return None
    number: int | None = node.meta.get("seq_nr")
    return number


def _overwrites(build: Builder, node: fx.Node, inputs: tuple[int, ...]) -> int | None:
    """The value in whose storage eager writes a result, if it has one."""
    if not (node.meta.get("custom") or {}).get(IN_PLACE) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    value = build.value_of_node.get(node.args[0])
    return value if value in inputs else None


def _is_static(build: Builder, node: fx.Node) -> bool:
    return node not in build.value_of_node and any(
        t is not None and build.value_of_storage.get(storage_key(t), 0) is None for t in tensors_of(node)
    )


def _is_view(build: Builder, node: fx.Node) -> bool:
    """Whether every result of the call lives in a storage that was there before, and nothing was written to it."""
    tensors = tensors_of(node)
    known = [t is not None and storage_key(t) in build.value_of_storage for t in tensors]
    return bool(known) and all(known) and not writes(node) and node.target is not operator.getitem


def _alias(build: Builder, node: fx.Node) -> None:
    for tensor in tensors_of(node):
        value = None if tensor is None else build.value_of_storage.get(storage_key(tensor))
        if value is not None:
            build.value_of_node[node] = value
            if node.target is operator.getitem and not isinstance(node.meta["val"], (list, tuple)):
                build.base_of_value.setdefault(value, node)


def _reads(build: Builder, node: fx.Node) -> tuple[int, ...]:
    """Values that a call reads, each once, in order of index."""
    return tuple(sorted({v for n in node.all_input_nodes for v in values_behind(build.value_of_node, n)}))


def _new_values(build: Builder, node: fx.Node, op_index: int) -> tuple[int, ...]:
    """Register the storages that a call creates."""
    created: list[int] = []
    tensors = tensors_of(node)
    single = not isinstance(node.meta.get("val"), (list, tuple))
    for tensor in tensors:
        if tensor is None:
            continue
        key = storage_key(tensor)
        if key in build.value_of_storage:
            if single and build.value_of_storage[key] is not None:  # an op that writes to a value and returns it
                build.value_of_node[node] = build.value_of_storage[key]  # type: ignore[assignment]
            continue
        value = new_value(build, node.name, storage_bytes(node, tensor), op_index, "activation", tensor=tensor)
        build.value_of_storage[key] = value
        created.append(value)
        if single:
            build.value_of_node[node] = value
            build.base_of_value[value] = node
    return tuple(created)


def _add_rng_state(build: Builder, node: fx.Node, device: str) -> int:
    """A pseudo-op before a random op that saves the generator's state, for replays."""
    state = new_value(build, f"{node.name}_rng_state", RNG_STATE_BYTES[device], len(build.ops), "rng_state")
    op = replace(pseudo_op(build, "rng_state", "forward", (), (state,)), name=f"{node.name}_rng_state")
    build.state_of_op[op.index + 1] = state
    append(build, op, None)
    return state
