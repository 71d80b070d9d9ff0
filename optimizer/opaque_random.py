"""Random ops in a form that a compiler leaves alone: it knows no kernel of its own for them, and keeps their order.

Inductor would decompose random ops, pick its own generator for some, move calls that it thinks independent, and leave
out those that nobody reads. So each drawing op of a graph becomes an operator of ours that calls it, with the tag by
which Inductor keeps random ops in a row (under `fallback_random`), and with the strides that were traced, since kernels
draw in the order of memory; and so does each operator of which nobody knows whether it draws.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from placemat import rng
from placemat.graph.purity import KNOWN_NAMESPACES, is_random

_LIBRARY = torch.library.Library("placemat_ops", "FRAGMENT")
_IN_ORDER = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)


def _defined(signature: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Any) -> Any:
    """The operator `placemat_ops::signature`."""
    name = signature.partition("(")[0]
    _LIBRARY.define(signature, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"placemat_ops::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.placemat_ops, name).default


@functools.cache
def state_op(num_bytes: int) -> Any:
    """`rng.save_state` of a device whose generator's state has so many bytes."""

    def fake(device_type: str, index: int | None) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    signature = f"rng_state_{num_bytes}(str device_type, int? index) -> Tensor"
    return _defined(signature, rng.save_state, fake, _IN_ORDER)


@functools.cache
def drawing(op: torch._ops.OpOverload) -> Any:
    """An operator that calls `op`, in its place among random ops."""
    return _defined(f"draw_{_name(op)}{_parameters(op)}", op, op, _IN_ORDER)


@functools.cache
def replaying(op: torch._ops.OpOverload) -> Any:
    """`rng.replay` of `op`: state, device type and ordinal come before its own arguments."""

    def run(state: torch.Tensor, device_type: str, index: int | None, *args: Any, **kwargs: Any) -> Any:
        return rng.replay(state, device_type, index, op, *args, **kwargs)

    def fake(state: torch.Tensor, device_type: str, index: int | None, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    own = "(Tensor rng_state, str rng_device_type, int? rng_index"
    parameters = _parameters(op).removeprefix("(")
    separator = "" if parameters.startswith(")") else ", "
    signature = f"replay_{_name(op)}{own}{separator}{parameters}"
    return _defined(signature, run, fake, (torch.Tag.needs_exact_strides,))


@functools.cache
def discarding(op: torch._ops.OpOverload) -> Any:
    """An operator that calls `op` and gives an empty tensor instead of the results, which nobody reads."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        op(*args, **kwargs)
        return torch.empty(0)

    parameters = _parameters(op).rpartition(" -> ")[0]
    return _defined(f"discard_{_name(op)}{parameters} -> Tensor", run, run, _IN_ORDER)


def make_opaque(graph: fx.Graph) -> None:
    """Let every op of an emitted graph that draws, or may draw, be one of these; in place.

    Draws that nobody reads move the generator on, and a compiler would leave them out: each gets an empty tensor as
    its result, which the graph then returns after what it returned before.
    """
    unread = [n for n in graph.nodes if may_draw(n) and all(_is_unread_result(u) for u in n.users)]
    for node in unread:
        for result in list(node.users):
            graph.erase_node(result)
        node.target = discarding(node.target)
        node.meta = {**node.meta, "val": torch.empty(0, device="meta")}
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], *unread),)
    done = set(unread)
    for node in (n for n in graph.nodes if n not in done):
        if node.target is rng.save_state:
            node.target = state_op(node.meta["val"].numel())
        elif node.target is rng.replay:
            state, device_type, index, op, *args = node.args
            node.target, node.args = replaying(op), (state, device_type, index, *args)
        elif may_draw(node):
            node.target = drawing(node.target)


def may_draw(node: fx.Node) -> bool:
    """Whether a call draws random numbers, or is a custom operator, which may."""
    if is_random(node):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in KNOWN_NAMESPACES


def _is_unread_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and not node.users


def _name(op: torch._ops.OpOverload) -> str:
    return op.name().replace("::", "_").replace(".", "_")


def _parameters(op: torch._ops.OpOverload) -> str:
    """Parameters and results of an operator's schema: "(Tensor self, float p=0.5) -> Tensor"."""
    text = str(op._schema)
    return text[text.index("(") :]
