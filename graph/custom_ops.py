"""Calls of custom operators that a trace leaves out because nobody reads what they return or write.

Tracing removes what is not read. PyTorch's own operators that draw random numbers are spared; what a custom one does
beside its results, nobody knows: it may draw from a generator, which eager would have moved on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from placemat.graph.errors import UnsupportedFeature
from placemat.graph.purity import KNOWN_NAMESPACES
from placemat.graph.sources import user_line

_HARMLESS = KNOWN_NAMESPACES | {"placemat"}  # the marks of `loss.py`, left out where the loss does not reach


def custom_calls(graph_module: fx.GraphModule) -> dict[Any, list[str]]:
    """Custom operator -> the user's line of each call in a Dynamo graph; those that decompose into others left out."""
    calls: dict[Any, list[str]] = {}
    for node in graph_module.graph.nodes:
        packet = _custom_packet(node.target)
        if packet is not None:
            calls.setdefault(packet, []).append(user_line(node.meta.get("stack_trace")) or "an unknown line")
    return calls


def check_nothing_left_out(graph_module: fx.GraphModule, calls: Mapping[Any, list[str]]) -> None:
    """Refuse a joint graph that lacks calls of custom operators.

    An operator that is not there at all may have been replaced by its autograd kernel's choice; it counts as left out
    if it has none.

    Raises:
        UnsupportedFeature: names the operator and the user's lines.
    """
    if not calls:
        return
    found: Counter[Any] = Counter()
    for node in graph_module.graph.nodes:
        if node.meta.get("partitioner_tag") != "is_backward":
            found.update({p for target in (node.target, *node.args) if (p := _custom_packet(target)) is not None})
    for packet, lines in calls.items():
        if found[packet] < len(lines) and (found[packet] or not _redirects(packet)):
            raise UnsupportedFeature(
                f"the forward calls the custom operator {packet} {len(lines)} time(s), and its results or what it "
                f"writes to are not read {len(lines) - found[packet]} time(s): such a call would be left out, with the "
                f"random numbers that it may draw. At {'; '.join(lines)}. Remedy: use its results, or move the call "
                "out of forward()."
            )


def _custom_packet(target: Any) -> Any:
    """The operator behind a call target, if a custom library defines it and it is no composite of others."""
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return None
    if target._qualified_op_name.partition("::")[0] in _HARMLESS:
        return None
    overloads = [getattr(target, name) for name in target.overloads()]
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return None if any(op.has_kernel_for_dispatch_key(key) for op in overloads) else target


def _redirects(packet: Any) -> bool:
    """Whether a kernel for autograd may call another operator in place of this one."""
    return any(
        getattr(packet, name).has_kernel_for_dispatch_key(torch._C.DispatchKey.AutogradCPU)
        for name in packet.overloads()
    )
