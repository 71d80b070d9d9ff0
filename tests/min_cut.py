"""What PyTorch's min-cut partitioner saves for backward, as a schedule of ours.

The partitioner of torch.compile (torch/_functorch/partitioners.py) chooses the forward tensors to save and recomputes
the rest in backward; here it runs on a copy of a captured joint graph, and the storages behind what it saves become the
kept values of a replay, which the referee prices like any other schedule.
"""

from __future__ import annotations

import torch._functorch.config
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from placemat.graph.joint import JointGraph
from placemat.graph.lower import Lowering
from placemat.problem import Problem
from placemat.replay import replay
from placemat.schedule import Schedule


def saved_names(joint: JointGraph, memory_budget: float = 1.0) -> list[str]:
    """Names of the nodes of the joint graph that PyTorch saves.

    Args:
        joint: as captured, before it was lowered.
        memory_budget: PyTorch's `activation_memory_budget`; 1 recomputes only what it thinks to be fused for nothing,
            0 keeps the inputs alone.
    """
    # Common subexpressions keep their own names, so that every name is one of the joint graph's.
    options = {"cse": False, "activation_memory_budget": memory_budget}
    with torch._functorch.config.patch(options):
        forward, _ = min_cut_rematerialization_partition(
            _copied(joint.graph_module), (), num_fwd_outputs=joint.num_forward_outputs
        )
    (output,) = forward.graph.find_nodes(op="output")
    return [node.name for node in output.args[0][joint.num_forward_outputs :]]


def saved_values(lowering: Lowering, names: list[str]) -> set[int]:
    """Values behind named nodes; what lives in static storages is none."""
    value_of_name = {node.name: value for node, value in lowering.value_of_node.items()}
    known = {node.name for node in lowering.joint.graph_module.graph.nodes}
    assert known.issuperset(names)
    return {value_of_name[name] for name in names if name in value_of_name}


def min_cut_schedule(problem: Problem, lowering: Lowering, names: list[str]) -> Schedule:
    """Keep over the border what PyTorch saves, recompute the rest before its first use in backward."""
    return replay(problem, saved_values(lowering, names), lowering.graph.border)


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The partitioner edits the graph that it is given."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    (old_output,) = graph_module.graph.find_nodes(op="output")
    (new_output,) = graph.find_nodes(op="output")
    new_output.meta = dict(old_output.meta)
    return fx.GraphModule(graph_module, graph)
