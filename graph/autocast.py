"""Autocast casts a shared weight once: make the graph do the same.

In eager autocast keeps the low-precision copy of a weight for its next use, so the gradients of all uses meet in low
precision and are cast back once. The captured graph casts for every use and sums the gradients in the weight's own
precision: other bits. Equal casts of a weight are merged, and a sum of casts becomes the cast of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from placemat.graph.joint import JointGraph
from placemat.graph.order import split_phases
from placemat.graph.torch_private import has_autocast_rule

aten = torch.ops.aten
_CAST = aten._to_copy.default
_ADD = aten.add.Tensor
LOW_PRECISION = (torch.bfloat16, torch.float16)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def weight_cache_is_on() -> bool:
    """Whether autocast is active here and keeps its casts."""
    active = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return active and torch.is_autocast_cache_enabled()


def is_used(dynamo_graph: fx.Graph) -> bool:
    """Whether a forward runs under autocast, or opens a region of it."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return True
    return any(n.op == "call_function" and n.target is torch.amp._enter_autocast for n in dynamo_graph.nodes)


def sensitive_backward_op(joint: JointGraph, device: str, dtype: torch.dtype) -> str | None:
    """Name of a backward op that would run otherwise in a `backward()` under autocast to `dtype`; None if none would.

    Products are cast to `dtype`, which changes nothing where both operands are of it; other ops that autocast
    intercepts count as changed.
    """
    for node in split_phases(joint)[1]:
        if not has_autocast_rule(node.target, device):
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if node.target not in _PRODUCTS or any(t.is_floating_point() and t.dtype != dtype for t in operands):
            return str(node.target)
    return None


def merge_weight_casts(graph: fx.Graph, primals: Sequence[fx.Node], gradients: Sequence[Any]) -> None:
    """Merge casts of weights that the forward makes several times, in place; gradients are those of the primals."""
    for primal, gradient in zip(primals, gradients, strict=True):
        for dtype in LOW_PRECISION:
            casts = [u for u in primal.users if _is_autocast(u, dtype)]
            if len(casts) < 2:
                continue
            first, *others = casts
            for cast in others:
                cast.replace_all_uses_with(first)
                graph.erase_node(cast)
            if isinstance(gradient, fx.Node):
                terms = list(_terms(gradient))
                if len(terms) == 1 + len(others) and all(_source_dtype(t) == dtype for t in terms):
                    _sum_before_cast(graph, gradient)


def _is_autocast(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is _CAST and dict(node.kwargs) == {"dtype": dtype}


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """The summands of a gradient: what autograd added up, one for each use."""
    if node.target is _ADD and not node.kwargs and len(node.users) == 1:
        for term in node.args:
            assert isinstance(term, fx.Node)
            yield from _terms(term)
    else:
        yield node


def _source_dtype(node: fx.Node) -> torch.dtype | None:
    """Dtype before the cast, if the node is one that nothing else reads."""
    if node.target is not _CAST or len(node.users) != 1:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dtype: torch.dtype = source.meta["val"].dtype
    return dtype


def _sum_before_cast(graph: fx.Graph, gradient: fx.Node) -> None:
    """add(cast(a), cast(b)) -> cast(add(a, b)), for nested sums too."""
    replaced: list[fx.Node] = []
    low = _low_sum(graph, gradient, replaced)
    cast = next(n for n in replaced if n.target is _CAST)
    with graph.inserting_before(gradient):
        whole = graph.call_function(_CAST, (low,), dict(cast.kwargs))
    whole.meta = dict(gradient.meta)
    gradient.replace_all_uses_with(whole)
    for node in replaced:  # sums come before their terms
        graph.erase_node(node)


def _low_sum(graph: fx.Graph, node: fx.Node, replaced: list[fx.Node]) -> fx.Node:
    """The sum in low precision, beside the one in full precision; what it replaces is added to `replaced`."""
    replaced.append(node)
    terms = [a for a in node.args if isinstance(a, fx.Node)]
    if node.target is _CAST:
        return terms[0]
    left, right = (_low_sum(graph, term, replaced) for term in terms)
    with graph.inserting_before(node):
        total = graph.call_function(_ADD, (left, right))
    total.meta = dict(node.meta)
    with left.meta["val"].fake_mode:
        total.meta["val"] = left.meta["val"] + right.meta["val"]
    return total
