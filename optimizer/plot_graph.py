"""The graph around the peak as a figure: which ops are near the one that binds, and what happens to their results."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

import networkx as nx

from placemat.colors import ALERT_COLOR, BACKWARD_COLOR, FREED_COLOR, KEPT_COLOR, RECOMPUTED_COLOR
from placemat.plots import figure_of, new_axes
from placemat.schedule import Compute
from placemat.simulate import simulate
from placemat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from placemat.plan import Plan

_MAX_READERS = 12  # past a value that more ops read (a mask that all layers share) is not "around" any more
_NODE_SIZE = 1700
_VARIANT = re.compile(r"^_?native_|_legit_functional|_with_indices|(?<=attention)_for_cpu")
_FATES = {
    "kept": KEPT_COLOR,
    "recomputed": RECOMPUTED_COLOR,
    "kept and recomputed": "#c3a5de",
    "forward, freed": FREED_COLOR,
    "backward": BACKWARD_COLOR,
}


def neighborhood(plan: Plan, max_ops: int = 28) -> nx.DiGraph[int]:
    """The ops nearest to the one that runs at the peak; an edge (a, b) has `bytes` of what b reads of a.

    Breadth first over reads in both directions; nearer ops first, then those with more bytes between.
    """
    graph = _graph(plan)
    step = plan.schedule.steps[simulate(plan.problem, plan.schedule).peak_step]
    assert isinstance(step, Compute)
    chosen, ring = {step.op}, [step.op]
    while ring and len(chosen) < max_ops:
        near: dict[int, int] = {}
        for op in ring:
            edges = [(a, graph.edges[a, op]["bytes"]) for a in graph.predecessors(op)]
            edges += [(b, graph.edges[op, b]["bytes"]) for b in graph.successors(op)]
            if len(edges) > _MAX_READERS and op != step.op:
                continue
            for other, size in edges:
                if other not in chosen and graph.nodes[other]["bytes"]:
                    near[other] = max(size, near.get(other, 0))
        ring = sorted(near, key=lambda op: (-near[op], op))[: max_ops - len(chosen)]
        chosen.update(ring)
    part: nx.DiGraph[int] = graph.subgraph(chosen).copy()
    part.graph["peak_op"] = step.op
    return part


def _graph(plan: Plan) -> nx.DiGraph[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    fates = _fates(plan)
    for index, label in enumerate(plan.labels.ops):
        sizes = [plan.problem.values[v].bytes for v in plan.problem.ops[index].outputs]
        graph.add_node(
            index,
            fate=fates.get(index, "forward, freed" if label.phase == "forward" else "backward"),
            bytes=sum(sizes),
            text=f"{_short(plan.problem.ops[index].name)}\n{format_bytes(sum(sizes))}",
        )
    for index, op in enumerate(plan.problem.ops):
        for v in op.inputs:
            producer = plan.problem.values[v].producer
            size = graph.get_edge_data(producer, index, {"bytes": 0})["bytes"] + plan.problem.values[v].bytes
            graph.add_edge(producer, index, bytes=size)
    return graph


def _fates(plan: Plan) -> dict[int, str]:
    """Op -> what happens to its results, for ops of which something is kept or recomputed."""
    fates: dict[int, str] = {}
    for decision in plan.decisions:
        op = plan.problem.values[decision.index].producer
        kept = decision.kept or fates.get(op) in ("kept", "kept and recomputed")
        if kept or decision.recomputed:
            fates[op] = "kept and recomputed" if kept and decision.recomputed else "kept" if kept else "recomputed"
    return fates


def _layout(graph: nx.DiGraph[int]) -> dict[int, tuple[float, float]]:
    """Columns by topological generation, each in the order of what it reads; every other one half a row lower, so that
    neighbours in a row are two columns apart."""
    at: dict[int, tuple[float, float]] = {}
    for column, generation in enumerate(nx.topological_generations(graph)):
        heights = {op: [at[reads][1] for reads in graph.predecessors(op)] for op in generation}
        ordered = sorted(generation, key=lambda op: (sum(heights[op]) / max(1, len(heights[op])), op))
        for row, op in enumerate(ordered):
            at[op] = (float(column), row - (len(ordered) - 1) // 2 - 0.5 * (column % 2))
    return at


def _short(name: str) -> str:
    """The op's name on lines that fit into a node, without PyTorch's names of variants: "layer_norm_\\nbackward_3"."""
    name = _VARIANT.sub("", name).lstrip("_")
    return "\n".join(line.replace(" ", "") for line in textwrap.wrap(name.replace("_", "_ "), 12))


def plot_graph(plan: Plan, max_ops: int = 28, axes: Axes | None = None) -> Figure:
    """The figure of `Plan.plot_graph`."""
    axes = new_axes(14.0, 7.0) if axes is None else axes
    part = neighborhood(plan, max_ops)
    at = _layout(part)
    for bend in (0.0, 0.25):  # an edge over several columns would run through the nodes between
        edges = [(a, b) for a, b in part.edges if (at[b][0] - at[a][0] > 1) == (bend > 0)]
        of_peak = [part.graph["peak_op"] in edge for edge in edges]
        nx.draw_networkx_edges(
            part, at, edges, ax=axes, edge_color=[ALERT_COLOR if red else "#999999" for red in of_peak],
            width=[1.6 if red else 0.8 for red in of_peak], arrowsize=9, node_size=_NODE_SIZE,
            connectionstyle=f"arc3,rad={bend}",
        )  # fmt: skip
    for fate, color in _FATES.items():
        nodes = [op for op in part if part.nodes[op]["fate"] == fate]
        if nodes:
            nx.draw_networkx_nodes(
                part, at, nodes, ax=axes, node_color=color, node_size=_NODE_SIZE, label=fate, edgecolors="#555555",
                linewidths=0.6,
            )  # fmt: skip
    peak = part.graph["peak_op"]
    nx.draw_networkx_nodes(
        part, at, [peak], ax=axes, node_color=_FATES[part.nodes[peak]["fate"]], node_size=_NODE_SIZE,
        edgecolors=ALERT_COLOR, linewidths=3.0,
    )  # fmt: skip
    nx.draw_networkx_labels(part, at, {op: part.nodes[op]["text"] for op in part}, ax=axes, font_size=6.5)
    axes.set_title(f"around the peak of {format_bytes(plan.predicted_peak_bytes)}, at {plan.peak_op} (red)")
    axes.set_axis_off()
    axes.margins(0.08)
    figure_of(axes).legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False,
        markerscale=0.4,
    )  # fmt: skip
    return figure_of(axes)
