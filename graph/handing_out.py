"""Where in the backward autograd gets which gradients: at the end all together, or segment by segment.

A gradient is finished when no op of the backward touches its storage any more. Handed out later, it would take memory
for nothing; handed out earlier, a hook that writes to `.grad` would change what a later op reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from placemat.graph import gradients
from placemat.graph.op_builder import Builder, append, new_value, pseudo_op, values_behind

Positions = tuple[int, ...]  # of primals, ascending


def add_handouts(build: Builder, segments: int, accumulate_grad: bool) -> Mapping[int, Positions]:
    """End the list of ops, whose backward is complete: pseudo-op -> primals whose gradients are handed out there.

    Segments share the gradients' bytes as evenly as the ops allow, whatever these cost, so that equal graphs have equal
    segments; there are `segments` of them at most. Where there is one, the mapping is empty: all gradients are returned
    at the end.

    What autograd keeps as `.grad` stays to the end of the step. What it adds to a `.grad` that is there already
    (`accumulate_grad`) goes when it is handed out, and so does what it copies; the copy stays.
    """
    finished = _finished(build)
    cuts = _cuts(build, finished, segments)
    ends = [*cuts, len(build.ops) - 1]
    parts = {end: tuple(p for p, op in finished.items() if ends[bisect_left(cuts, op)] == end) for end in ends}
    ops, nodes = build.ops, build.nodes
    build.values = [replace(v, producer=v.producer + bisect_left(cuts, v.producer)) for v in build.values]
    build.ops, build.nodes = [], []
    handouts: dict[int, Positions] = {}
    for op, node in zip(ops, nodes, strict=True):
        append(build, replace(op, index=len(build.ops)), node)
        if op.index in cuts:
            handouts[len(build.ops)] = parts[op.index]
            _add_segment_end(build, parts[op.index], accumulate_grad)
    if cuts:
        handouts[len(build.ops)] = parts[ends[-1]]
    _add_end(build, parts[ends[-1]], accumulate_grad, goes=bool(cuts) and accumulate_grad)
    return handouts


def _add_segment_end(build: Builder, positions: Positions, accumulate_grad: bool) -> None:
    """The end of a segment with another one behind it."""
    gradient_of = {p: build.joint.gradients[p] for p in positions}
    copied = () if accumulate_grad else gradients.copied(_pairs(build, positions))
    _mark(build, [p for p in positions if gradient_of[p] in copied], pinned=False)
    _mark(build, [p for p in positions if gradient_of[p] not in copied], pinned=not accumulate_grad)
    copies = [_num_bytes(g) for g in gradient_of.values() if g in copied]
    index = len(build.ops)
    outputs = (
        (new_value(build, f"copied_gradients_{index}", sum(copies), index, "gradient", pinned=True),) if copies else ()
    )
    op = pseudo_op(build, "hand_out", "backward", _values(build, positions), outputs)
    append(build, replace(op, name=f"hand_out_{index}"), None)


def _add_end(build: Builder, positions: Positions, accumulate_grad: bool, goes: bool) -> None:
    """The end of the step."""
    _mark(build, positions, pinned=not goes)
    copied_bytes = 0 if accumulate_grad else gradients.copied_bytes(_pairs(build, positions))
    values = _values(build, positions)
    append(build, pseudo_op(build, "accumulate", "backward", values, (), known_workspace_bytes=copied_bytes), None)


def _mark(build: Builder, positions: Iterable[int], pinned: bool) -> None:
    """Mark storages as gradients, unless they are outputs or tangents. Only gradients of parameters are added up."""
    for position in positions:
        stays = pinned or not build.joint.inputs[position].is_parameter
        for v in _values(build, (position,)):
            value = build.values[v]
            if value.role not in ("output", "tangent"):
                build.values[v] = replace(value, role="gradient", pinned=value.pinned or stays)


def _pairs(build: Builder, positions: Positions) -> list[tuple[fx.Node, fx.Node]]:
    primals, handed = build.joint.primals, build.joint.gradients
    return [(primals[p], handed[p]) for p in positions]


def _values(build: Builder, positions: Iterable[int]) -> tuple[int, ...]:
    handed = build.joint.gradients
    return tuple(sorted({v for p in positions for v in values_behind(build.value_of_node, handed[p])}))


def _finished(build: Builder) -> dict[int, int]:
    """Primal -> the last op that touches the storage of its gradient.

    A storage of the forward may be read by any recomputation: it counts as finished at the end.
    """
    border = next(op.index for op in build.ops if op.phase == "border")
    end = len(build.ops) - 1
    last_touch: dict[int, int] = {}
    for op in build.ops:
        last_touch.update(dict.fromkeys((*op.inputs, *op.outputs), op.index))
    finished = {}
    for position, gradient in enumerate(build.joint.gradients):
        if isinstance(gradient, fx.Node):
            touched = [
                last_touch[v] if build.values[v].producer >= border else end
                for v in values_behind(build.value_of_node, gradient)
            ]
            finished[position] = max(touched, default=end)
    return finished


def _cuts(build: Builder, finished: Mapping[int, int], segments: int) -> list[int]:
    """Ops behind which all segments but the last one end."""
    sizes = {position: _num_bytes(build.joint.gradients[position]) for position in finished}
    total = sum(sizes.values())
    cuts: list[int] = []
    handed = share = 0
    for op in sorted(set(finished.values()))[:-1]:
        handed += sum(sizes[position] for position, at in finished.items() if at == op)
        if handed * segments // total > share:
            share = handed * segments // total
            cuts.append(op)
    return cuts


def _num_bytes(gradient: fx.Node) -> int:
    tensor = gradient.meta["val"]
    return max(1, int(tensor.numel() * tensor.element_size()))
