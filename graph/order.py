"""Which calls of a joint graph run in the forward and which in the backward."""

from __future__ import annotations

from torch import fx

from placemat.graph import purity
from placemat.graph.joint import JointGraph


def split_phases(joint: JointGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Calls that run in the forward and calls that run in the backward, each in graph order.

    Backward is what depends on a tangent, and what autograd added there (its nodes are tagged) without being needed by
    an output of the forward. Of what nobody reads only random draws are run, since they move the generator on, and
    writes; with everything that they are computed from.
    """
    graph = joint.graph_module.graph
    needed = ancestors([n for n in joint.forward_outputs if isinstance(n, fx.Node)])
    effects = [n for n in graph.nodes if purity.is_random(n) or writes(n)]
    alive = ancestors([joint.output_node, *effects])
    after = set(joint.tangents)
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node not in alive:
            continue
        if any(n in after for n in node.all_input_nodes):
            after.add(node)
        in_backward = node in after or (node.meta.get("partitioner_tag") == "is_backward" and node not in needed)
        (backward if in_backward else forward).append(node)
    return forward, backward


def ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they are computed from."""
    seen = set(nodes)
    queue = list(nodes)
    while queue:
        for node in queue.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                queue.append(node)
    return seen


def writes(node: fx.Node) -> bool:
    schema = purity.schema_of(node)
    return schema is not None and bool(schema.is_mutable)
