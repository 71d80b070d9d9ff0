"""Autocast casts a shared weight once: make the graph do the same.

In eager autocast keeps the low-precision copy of a weight until the outermost region ends, so the gradients of all uses
in it meet in low precision and are cast back once. The captured graph casts for every use and sums the gradients in the
weight's own precision: other bits. Casts that share a copy in eager are marked when they are traced (`mark_casts`) and
merged when the graph is lowered, and the sum of their gradients becomes the cast of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from placemat.graph.joint import CAST_CACHE, JointGraph
from placemat.graph.order import split_phases
from placemat.graph.torch_private import has_autocast_rule

aten = torch.ops.aten
_CAST = aten._to_copy.default
_ADD = aten.add.Tensor
LOW_PRECISION = (torch.bfloat16, torch.float16)
_CASTING_METHODS = frozenset({"to", "type", "type_as", "bfloat16", "half", "float"})
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def is_inside_region() -> bool:
    """Whether an autocast region is open here: casts of regions inside it are kept to its end, even if it is disabled.

    Dynamo has no guard on this.
    """
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0


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


def mark_casts(graph_module: fx.GraphModule) -> None:
    """Mark every call of a Dynamo graph with the cache that autocast's casts in it go to, if there is one.

    A cache lives from the entry into an outermost autocast region to its end; the one around the whole forward is
    number 0. The mark travels with `node.meta["custom"]` through AOTAutograd, to backward too. Casts that the user
    wrote keep no copy and get no mark.
    """
    is_outer = is_inside_region()
    cache, keeps = 0, [torch.is_autocast_cache_enabled()]
    for node in graph_module.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            if len(keeps) == 1 and not is_outer:
                cache += 1
            keep = node.args[3] if len(node.args) > 3 else None
            keeps.append(keeps[-1] if keep is None else bool(keep))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            keeps.pop()
        elif keeps[-1] and (is_outer or len(keeps) > 1) and not _is_users_cast(node):
            _set_mark(node, cache)
    nested = (m for m in graph_module.modules() if isinstance(m, fx.GraphModule) and m is not graph_module)
    for inner in nested if is_outer and keeps[0] else ():
        for node in inner.graph.nodes:
            if not _is_users_cast(node):
                _set_mark(node, 0)


def _is_users_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTING_METHODS


def _set_mark(node: fx.Node, cache: int) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), CAST_CACHE: cache}


def _mark(node: fx.Node) -> int | None:
    """The cache that a cast goes to in eager, or None."""
    mark: int | None = (node.meta.get("custom") or {}).get(CAST_CACHE)
    return mark


def casts_outlive_forward(primals: Sequence[fx.Node]) -> bool:
    """Whether autocast in eager keeps a cast of one of these tensors beyond the forward."""
    users = (user for primal in primals for user in primal.users)
    return any(_mark(user) == 0 and any(_is_autocast(user, dtype) for dtype in LOW_PRECISION) for user in users)


def merge_weight_casts(graph: fx.Graph, primals: Sequence[fx.Node], gradients: Sequence[Any]) -> None:
    """Merge casts of weights that share a copy in eager, in place; primals and gradients are in the same order."""
    for primal, gradient in zip(primals, gradients, strict=True):
        groups: dict[tuple[int, torch.dtype], list[fx.Node]] = {}
        for user in primal.users:
            cache = _mark(user)
            dtype = next((d for d in LOW_PRECISION if _is_autocast(user, d)), None)
            if cache is not None and dtype is not None:
                groups.setdefault((cache, dtype), []).append(user)
        shared = {key: casts for key, casts in groups.items() if len(casts) > 1}
        for first, *others in shared.values():
            for cast in others:
                cast.replace_all_uses_with(first)
                graph.erase_node(cast)
        if shared and isinstance(gradient, fx.Node):
            _sum_before_casts(graph, gradient, set(shared))


def _is_autocast(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is _CAST and dict(node.kwargs) == {"dtype": dtype}


def _sum_before_casts(graph: fx.Graph, gradient: fx.Node, shared: set[tuple[int, torch.dtype]]) -> None:
    """Sum what goes through one copy of the weight before it is cast back: once, when its last term has arrived.

    Autograd adds up what it has in the order of arrival, from the left. In eager the gradient of a shared copy arrives
    when the copy's first use in the forward has run backward, which is the last of its uses to do so.
    """
    terms = list(_terms(gradient))
    groups: dict[Any, list[fx.Node]] = {}
    for term in terms:
        key = (_mark(term), _source_dtype(term))
        groups.setdefault(key if key in shared else term, []).append(term)
    if all(len(group) == 1 for group in groups.values()):
        return
    # In order of each group's last term.
    arrived = sorted(groups.values(), key=lambda group: terms.index(group[-1]))
    sums = list(_sums(gradient))
    whole = _chain(graph, gradient, [_cast_sum(graph, gradient, group) for group in arrived])
    gradient.replace_all_uses_with(whole)
    for node in sums:  # before their terms
        graph.erase_node(node)
    for group in groups.values():
        for term in group if len(group) > 1 else ():
            graph.erase_node(term)


def _cast_sum(graph: fx.Graph, before: fx.Node, group: Sequence[fx.Node]) -> fx.Node:
    """The cast of the sum of what the terms of a group cast; a single term as it is."""
    if len(group) == 1:
        return group[0]
    low = _chain(graph, before, [_source(term) for term in group])
    with graph.inserting_before(before):
        cast = graph.call_function(_CAST, (low,), dict(group[-1].kwargs))
    cast.meta = dict(group[-1].meta)
    return cast


def _chain(graph: fx.Graph, before: fx.Node, terms: Sequence[fx.Node]) -> fx.Node:
    """Their sum, from the left, in the graph before a node whose metadata the sums get."""

    def add(left: fx.Node, right: fx.Node) -> fx.Node:
        with graph.inserting_before(before):
            total = graph.call_function(_ADD, (left, right))
        total.meta = dict(before.meta)
        with left.meta["val"].fake_mode:
            total.meta["val"] = left.meta["val"] + right.meta["val"]
        return total

    return reduce(add, terms)


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """The summands of a gradient: what autograd added up, one for each use."""
    if _is_sum(node):
        for term in node.args:
            assert isinstance(term, fx.Node)
            yield from _terms(term)
    else:
        yield node


def _sums(node: fx.Node) -> Iterator[fx.Node]:
    """The sums that `_terms` looks through, each before those that it adds up."""
    if _is_sum(node):
        yield node
        for term in node.args:
            assert isinstance(term, fx.Node)
            yield from _sums(term)


def _is_sum(node: fx.Node) -> bool:
    return node.target is _ADD and not node.kwargs and len(node.users) == 1


def _source(cast: fx.Node) -> fx.Node:
    source = cast.args[0]
    assert isinstance(source, fx.Node)
    return source


def _source_dtype(node: fx.Node) -> torch.dtype | None:
    """Dtype before the cast, if the node is one that nothing else reads."""
    if node.target is not _CAST or len(node.users) != 1:
        return None
    dtype: torch.dtype = _source(node).meta["val"].dtype
    return dtype
