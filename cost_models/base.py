"""What a cost model is: from ops to seconds and workspace bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from placemat.graph.ir import Op, OpGraph

Progress = Callable[[str], None]


@dataclass(frozen=True)
class OpCost:
    """Seconds of one run, and peak bytes that the run allocates beside its outputs.

    Attributes:
        workspace_known: False where nothing is known of the workspace, so that it counts as 0 bytes.
        estimated: why these are not the figures that the model stands for, if they are not ("not measured in time").
    """

    runtime_s: float
    workspace_bytes: int
    workspace_known: bool = True
    estimated: str | None = None


@dataclass(frozen=True)
class Costs:
    """Per op of an OpGraph, in its order. Workspaces include what the graph itself knows (`Op.known_*`)."""

    runtime_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    recompute_workspace_bytes: tuple[int, ...]
    source: str  # where the figures come from, for people: "roofline: host CPU, 52 GFLOP/s, 11 GB/s"
    notes: tuple[str, ...] = ()  # what the figures leave out


class CostModel(Protocol):
    """Seconds and workspace bytes of ops. Equal signatures must get equal costs."""

    @property
    def source(self) -> str: ...

    def op_cost(self, op: Op) -> OpCost: ...


@runtime_checkable
class Prepares(Protocol):
    """A cost model that wants to see all ops of a step before it is asked for each of them."""

    def prepare(self, ops: Sequence[Op], progress: Progress | None) -> None:
        """`ops` are of distinct signatures."""


def prepare(model: CostModel, ops: Sequence[Op], progress: Progress | None) -> None:
    """Show the ops to a model that wants to see them."""
    if isinstance(model, Prepares) and ops:
        model.prepare(ops, progress)


def cost_graph(model: CostModel, graph: OpGraph, progress: Progress | None = None) -> Costs:
    """Cost every op of the graph once per distinct signature."""
    first = {op.signature: op for op in reversed(graph.ops)}
    distinct = sorted(first.values(), key=lambda op: op.index)
    prepare(model, distinct, progress)
    by_signature = {op.signature: model.op_cost(op) for op in distinct}
    pairs = [(op, by_signature[op.signature]) for op in graph.ops]
    return Costs(
        runtime_s=tuple(c.runtime_s for _, c in pairs),
        workspace_bytes=tuple(o.known_workspace_bytes + c.workspace_bytes for o, c in pairs),
        recompute_workspace_bytes=tuple(
            o.known_workspace_bytes + c.workspace_bytes + o.known_recompute_workspace_bytes for o, c in pairs
        ),
        source=model.source,
        notes=_notes((op.target, by_signature[op.signature]) for op in distinct),
    )


def _notes(costs: Iterable[tuple[str, OpCost]]) -> tuple[str, ...]:
    """What the figures leave out, by kind of op."""
    unknown: set[str] = set()
    estimated: dict[str, set[str]] = {}
    for target, cost in costs:
        if not cost.workspace_known:
            unknown.add(target)
        if cost.estimated is not None:
            estimated.setdefault(cost.estimated, set()).add(target)
    notes = [f"costs of {', '.join(sorted(targets))} are estimates: {why}." for why, targets in estimated.items()]
    if unknown:
        notes.append(
            f"workspaces of {', '.join(sorted(unknown))} are not known and counted as 0 bytes: the real peak may be "
            "higher. Leave room for them with reserved_bytes=."
        )
    return tuple(notes)
