"""Fused: seconds of ops in code that fuses elementwise kernels, from their seconds one by one.

An elementwise op is bound by the bytes that it moves. In a fused kernel it moves none of what the kernel makes itself,
reads nothing a second time that its reader reads as well, and writes nothing that stays in registers. Its seconds are
those of the op alone times the share of its traffic that is left:

    seconds = alone_s * (bytes read from memory + bytes written to memory) / (bytes of all arguments and results)

For an op whose result the backward reads, that is the traffic of a recomputation there; for others, of the first run.
Arithmetic is not modelled apart: where an op is bound by it (`erf` on a CPU), it takes longer than that.
"""

from __future__ import annotations

from dataclasses import replace

from placemat.cost_models.base import Costs
from placemat.graph.fusion import Fusion, find_fusion, is_elementwise
from placemat.graph.ir import Op, OpGraph


def fused_costs(costs: Costs, graph: OpGraph) -> Costs:
    """Costs in fused code; `graph` has the bytes that ops move one by one."""
    fusion = find_fusion(graph)
    read_by: list[set[int]] = [set() for _ in graph.values]
    for op in graph.ops:
        for v in op.inputs:
            read_by[v].add(op.index)
    shares = [_share_left(op, graph, fusion, read_by) for op in graph.ops]
    return replace(
        costs,
        runtime_s=tuple(s * share for s, share in zip(costs.runtime_s, shares, strict=True)),
        far_s=(),  # known of ops that run one by one
        source=f"{costs.source}; elementwise ops by the traffic that is left of them in fused kernels",
    )


def _share_left(op: Op, graph: OpGraph, fusion: Fusion, read_by: list[set[int]]) -> float:
    """Part of an op's traffic that fusion leaves."""
    if not is_elementwise(op):
        return 1.0
    moved = {v: graph.values[v].bytes for v in (*op.inputs, *op.outputs)}
    total = sum(moved.values())
    in_registers = {v for v in op.outputs if v in fusion.inlined or v in fusion.inlined_again}
    readers = {r for v in op.outputs for r in read_by[v] if graph.ops[r].phase != op.phase or v in fusion.inlined}
    shared = {v for v in op.inputs if in_registers and read_by[v] & readers}
    gone = in_registers | shared | fusion.inlined.intersection(op.inputs)
    return 1.0 - sum(moved[v] for v in gone) / total if total else 1.0
