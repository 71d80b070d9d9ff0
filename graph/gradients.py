"""What reaches the gradients: tangents that are absent, and copies that autograd makes at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from placemat.graph import eager_ops
from placemat.graph.joint import JointGraph
from placemat.graph.order import ancestors
from placemat.graph.storages import storage_key, tensors_of

aten = torch.ops.aten

_SUMS = (aten.add.Tensor,)
# Their gradients are zeros, whatever arrives: nothing in a graph says then through which tangents something arrives.
_BLIND = (aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
_ARRIVES_WITH = "placemat_arrives_with"  # in a node's meta: names of the tangents


def mark_blind_gradients(joint: JointGraph) -> None:
    """Let zeros that are a gradient whatever arrives say with which tangents it does, for `prune_tangents`."""
    graph = joint.graph_module.graph
    behind: dict[int, set[str]] = {}
    for tangent in joint.tangents:
        for node in ancestors([joint.output_of(tangent)]):
            if node.target in _BLIND and "seq_nr" in node.meta:
                behind.setdefault(node.meta["seq_nr"], set()).add(tangent.name)
    for zeros in graph.find_nodes(op="call_function", target=aten.zeros.default):
        if zeros.meta.get("partitioner_tag") == "is_backward" and zeros.meta.get("seq_nr") in behind:
            zeros.meta[_ARRIVES_WITH] = frozenset(behind[zeros.meta["seq_nr"]])


def hand_out(handed: Sequence[Any]) -> NoReturn:
    """The mark of a segment's end in emitted graphs, with the gradients that are handed out (None: there is none)."""
    raise AssertionError("generated code yields in its place")


def prune_tangents(graph: fx.Graph, absent: Sequence[fx.Node]) -> list[fx.Node]:
    """Take tangents that are not there out of a graph with a backward, in place.

    AOTAutograd stands in zeros for the gradient of an output that the loss does not reach, so parameters that eager
    leaves without gradient get zeros, and memory and time are spent on them. A backward is linear in its tangents:
    a call whose tangent-dependent inputs are all absent has absent results; a sum with one absent term is the other
    term; anything else gets zeros of the right shape. Gradients that are absent become None, as in eager.

    The placeholders stay: the caller passes None for them. Returned are terms that took the place of sums which had
    other strides (see `arriving.take_as_they_come`).
    """
    moved: list[fx.Node] = []
    if not absent:
        return moved
    gone = set(absent)
    dependent = {n for n in graph.find_nodes(op="placeholder") if n in gone or n.name.startswith("tangents")}
    for node in graph.find_nodes(op="call_function", target=aten.zeros.default):
        if (tangents := node.meta.get(_ARRIVES_WITH)) is not None:
            dependent.add(node)
            gone.update({node} if tangents <= {n.name for n in absent} else ())
    for node in list(graph.nodes):
        if node.op == "output":
            node.args = (_without(node.args[0], gone),)
            continue
        if node.op == "placeholder":
            continue
        if node.target is hand_out:
            node.args = (tuple(_without(node.args[0], gone)),)
            continue
        needed = [n for n in node.all_input_nodes if n in dependent]
        if not needed:
            continue
        dependent.add(node)
        missing = [n for n in needed if n in gone]
        if node in gone or len(missing) == len(needed):
            gone.add(node)
        elif missing and node.target is eager_ops.BACKWARD:
            gone.update(eager_ops.drop_absent_grads(node, gone))
        elif missing and not _take_other_term(node, gone, moved):
            for source in missing:
                with graph.inserting_before(node):
                    node.replace_input_with(source, _zeros_like(graph, source))
    _erase_dead(graph, dependent)
    return moved


def _take_other_term(node: fx.Node, gone: set[fx.Node], moved: list[fx.Node]) -> bool:
    """Replace a sum with an absent term by its other term, if that has the sum's shape and dtype."""
    if node.target not in _SUMS or node.kwargs.get("alpha", 1) != 1:
        return False
    (other,) = [a for a in node.args if not (isinstance(a, fx.Node) and a in gone)]
    if not isinstance(other, fx.Node):
        return False
    result, term = node.meta["val"], other.meta["val"]
    if result.shape != term.shape or result.dtype != term.dtype:
        return False
    views = [user for user in node.users if _shares_storage(user, result)]
    node.replace_all_uses_with(other)
    if result.stride() != term.stride():
        moved.append(other)
    for view in views:
        _follow(view, result)
    return True


def _shares_storage(node: fx.Node, tensor: torch.Tensor) -> bool:
    return any(t is not None and storage_key(t) == storage_key(tensor) for t in tensors_of(node))


def _follow(node: fx.Node, before: torch.Tensor) -> None:
    """Let a view, and views of it, be of what its argument is now; `before` is what it was a view of.

    What the trace took for a view is autograd's `reshape`, which copies where the strides are others and ask for it.
    """
    views = [user for user in node.users if _shares_storage(user, before)]
    call: Any = aten.reshape.default if node.target is aten.view.default else node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with before.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = call(*args, **kwargs)
    for view in views:
        _follow(view, before)


def _zeros_like(graph: fx.Graph, source: fx.Node) -> fx.Node:
    value = source.meta["val"]
    zeros = graph.call_function(
        aten.zeros.default,
        (list(value.shape),),
        {"dtype": value.dtype, "device": value.device},
    )
    with value.fake_mode:
        zeros.meta["val"] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    zeros.meta["partitioner_tag"] = "is_backward"
    return zeros


def _without(outputs: Any, gone: set[fx.Node]) -> list[Any]:
    return [None if isinstance(o, fx.Node) and o in gone else o for o in outputs]


def _erase_dead(graph: fx.Graph, candidates: set[fx.Node]) -> None:
    """Erase calls of the backward that nothing uses any more, and whatever only they used."""
    for node in reversed(list(graph.nodes)):
        if node in candidates and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def copied_bytes(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> int:
    """Most bytes of copies that autograd makes while it stores gradients into `.grad` of (primal, gradient) pairs.

    AccumulateGrad takes a gradient over if its layout is the parameter's and nobody else holds it, and copies it
    otherwise (torch/csrc/autograd/functions/accumulate_grad.h). The original is dropped after its copy, so one copy is
    alive beside its original at a time; a gradient that is returned for several parameters stays until its last copy.
    """
    single, shared = 0, 0
    held = _held_elsewhere(pairs)
    for gradient in copied(pairs):
        value = gradient.meta["val"]
        nbytes = value.numel() * value.element_size()
        if gradient in held:
            shared += nbytes * held[gradient]
        else:
            single = max(single, nbytes)
    return single + shared


def copied(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> frozenset[fx.Node]:
    """Gradients of (primal, gradient) pairs that autograd copies, see `copied_bytes`."""
    held = _held_elsewhere(pairs)
    return frozenset(g for p, g in pairs if g in held or not keeps_layout(g.meta["val"], p.meta["val"]))


def _held_elsewhere(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> dict[fx.Node, int]:
    """Gradients that somebody else holds when one of them is stored, and for how many primals they are."""
    uses = Counter(g for _, g in pairs)
    return {g: n for g, n in uses.items() if n > 1 or g.op == "placeholder"}


def keeps_layout(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether autograd takes a gradient over as it is: the layout contract of AccumulateGrad."""
    if gradient.layout != torch.strided or parameter.layout != torch.strided:
        return False
    if not is_dense(gradient):
        return False
    if is_dense(parameter):
        return all(
            g == p for g, p, n in zip(gradient.stride(), parameter.stride(), parameter.shape, strict=True) if n > 1
        )
    return gradient.is_contiguous()


def is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: a permutation of a contiguous tensor."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return expected == math.prod(s for s in tensor.shape if s > 1)
