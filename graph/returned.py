"""Outputs that a forward returns several times: the loss may send a gradient through every one of them.

Dynamo's graph has such a tensor once. So the end of a traced forward calls a function on all the tensors that it
returns; the call is read and taken out before anything else looks at the graph.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

_MOST_DEPTH = 8


def note_returned(output: Any) -> None:
    """Traced at the end of a forward: record the tensors in its output, each as often as it is there."""
    found: list[Tensor] = []
    _collect(output, found, 0)
    if len(found) > 1:
        _returned(found)


def _collect(tree: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif depth == _MOST_DEPTH:
        return
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, found, depth + 1)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found, depth + 1)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            _collect(getattr(tree, name), found, depth + 1)


@torch.compiler.allow_in_graph
def _returned(tensors: list[Tensor]) -> Tensor:
    return torch.empty(0)


def take_returned(graph: fx.Graph) -> tuple[int, ...]:
    """How often each output of a Dynamo graph is returned; takes the record out of the graph."""
    times: Counter[fx.Node] = Counter()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _returned:
            times.update(node.args[0])
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    return tuple(max(1, times[node]) if isinstance(node, fx.Node) else 1 for node in output.args[0])
