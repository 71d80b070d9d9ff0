"""What a cost model is: from ops to seconds and workspace bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from placemat.graph.ir import Op, OpGraph


@dataclass(frozen=True)
class OpCost:
    """Seconds of one run, and peak bytes that the run allocates beside its outputs (0 where unknown)."""

    runtime_s: float
    workspace_bytes: int


@dataclass(frozen=True)
class Costs:
    """Per op of an OpGraph, in its order. Workspaces include what the graph itself knows (`Op.known_*`)."""

    runtime_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    recompute_workspace_bytes: tuple[int, ...]
    source: str  # where the figures come from, for people: "roofline: host CPU, 52 GFLOP/s, 11 GB/s"


class CostModel(Protocol):
    """Seconds and workspace bytes of ops. Equal signatures must get equal costs."""

    @property
    def source(self) -> str: ...

    def op_cost(self, op: Op) -> OpCost: ...


def cost_graph(model: CostModel, graph: OpGraph) -> Costs:
    """Cost every op of the graph once per distinct signature."""
    by_signature: dict[object, OpCost] = {}
    costs: list[OpCost] = []
    for op in graph.ops:
        if op.signature not in by_signature:
            by_signature[op.signature] = model.op_cost(op)
        costs.append(by_signature[op.signature])
    pairs = list(zip(graph.ops, costs, strict=True))
    return Costs(
        runtime_s=tuple(c.runtime_s for c in costs),
        workspace_bytes=tuple(o.known_workspace_bytes + c.workspace_bytes for o, c in pairs),
        recompute_workspace_bytes=tuple(
            o.known_workspace_bytes + c.workspace_bytes + o.known_recompute_workspace_bytes for o, c in pairs
        ),
        source=model.source,
    )
