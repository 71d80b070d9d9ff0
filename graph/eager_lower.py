"""Kept modules in a joint graph: their workspaces, what to tell of them, and in which order gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from placemat.graph import eager_ops
from placemat.graph.eager_facts import Facts
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.sources import user_line

aten = torch.ops.aten


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a run of a kept module was measured to need beside its results; 0 for other nodes, or if unknown."""
    facts: Facts | None = node.meta.get("kept")
    if facts is None:
        return 0
    is_forward = node.target is eager_ops.FORWARD
    return (facts.forward_workspace_bytes if is_forward else facts.backward_workspace_bytes) or 0


def runtime_s(node: fx.Node) -> float | None:
    """Seconds that a run of a kept module took on the CPU; None for other nodes, or if it was not timed."""
    facts: Facts | None = node.meta.get("kept")
    if facts is None:
        return None
    return facts.forward_s if node.target is eager_ops.FORWARD else facts.backward_s


def notes(graph: fx.Graph, device: str) -> tuple[str, ...]:
    """Which modules are kept eager, how many bytes they save, and whether their workspaces are known."""
    lines: dict[str, list[Facts]] = {}
    for node in graph.find_nodes(op="call_function", target=eager_ops.FORWARD):
        facts: Facts = node.meta["kept"]
        lines.setdefault(facts.call.path, []).append(facts)
    return tuple(_note(path, calls, device) for path, calls in lines.items())


def _note(path: str, calls: list[Facts], device: str) -> str:
    saved = sum(facts.saved_bytes for facts in calls)
    times = "" if len(calls) == 1 else f" in {len(calls)} calls"
    unknown = [f for f in calls if None in (f.forward_workspace_bytes, f.backward_workspace_bytes)]
    again = "run again as a whole or not at all" if all(f.may_run_again for f in calls) else "never run again"
    text = f"{path} is kept eager: {again}, it saves {saved} bytes of its own for backward{times}."
    if unknown and device == "cpu":
        text += (
            " Its workspaces could not be measured and count as 0 bytes: the real peak may be higher. Leave room for "
            "them with reserved_bytes=."
        )
    return text


def check_sums(graph: fx.Graph) -> None:
    """Refuse a gradient that eager sums in another order.

    Where an input of a kept module is used elsewhere, too, its gradient is a sum over all uses, in the order in which
    autograd comes to them. What the module contributes arrives as one term. That is eager's order if the module uses
    the input once, or if its contribution comes first.

    Raises:
        UnsupportedFeature: it uses it several times, and other terms came before.
    """
    for node in graph.find_nodes(op="call_function", target=eager_ops.BACKWARD):
        facts: Facts = node.meta["kept"]
        for result in node.users:
            number = node.args[4][result.args[1]]
            if any(add.args[0] is not result for add in _sums(result)):
                facts.summed.add(number)
            if facts.edges[number] > 1 and any(add.args[0] is not result for add in _sums(result)):
                raise UnsupportedFeature(_text(facts, number, node))


def _sums(result: fx.Node) -> Iterator[fx.Node]:
    return (user for user in result.users if user.target is aten.add.Tensor)


def _text(facts: Facts, number: int, node: fx.Node) -> str:
    count = facts.call.num_arguments
    what = f"argument {number}" if number < count else f"parameter {number - count}"
    line = user_line(node.meta.get("stack_trace")) or "an unknown line"
    return (
        f"{what} of the kept module {facts.call.path} is used {facts.edges[number]} times inside of it, and elsewhere "
        f"too: eager adds up its gradient in another order than a planned step could, and results would differ by "
        f"rounding. At {line}. Remedy: keep a module eager that contains all uses."
    )
