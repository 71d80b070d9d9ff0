"""What a cost model is: from ops to seconds and workspace bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from placemat.cost_models.distance import far_values_bytes
from placemat.graph.errors import PlacematError
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
    """Per op of an OpGraph, in its order. Workspaces include what the graph itself knows (`Op.known_*`).

    Attributes:
        source: where the figures come from, for people: "roofline: host CPU, 52 GFLOP/s, 11 GB/s".
        notes: what the figures leave out.
        far_s: seconds that a step takes longer because results of the op are read long after they were made, see
            `cost_models.distance`; at most `runtime_s`. Empty: of no op.
    """

    runtime_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    recompute_workspace_bytes: tuple[int, ...]
    source: str
    notes: tuple[str, ...] = ()
    far_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step without recomputation."""
        return math.fsum((*self.runtime_s, *self.far_s))

    def far_s_of(self, index: int) -> float:
        """`far_s` of one op."""
        return self.far_s[index] if self.far_s else 0.0


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


@runtime_checkable
class KnowsDistance(Protocol):
    """A cost model whose seconds are those of ops that find their inputs in a cache."""

    @property
    def far_s_per_byte(self) -> float:
        """Seconds per byte of a value by which writing and reading it takes longer if much else happens between."""


def prepare(model: CostModel, ops: Sequence[Op], progress: Progress | None) -> None:
    """Show the ops to a model that wants to see them."""
    if isinstance(model, Prepares) and ops:
        model.prepare(ops, progress)


def cost_graph(model: CostModel, graph: OpGraph, progress: Progress | None = None) -> Costs:
    """Cost every op of the graph once per distinct signature.

    Raises:
        PlacematError: the model's `far_s_per_byte` is no time.
    """
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
        far_s=_far_s(model, graph, [c.runtime_s for _, c in pairs]),
        notes=_notes((op.target, by_signature[op.signature]) for op in distinct),
    )


def _far_s(model: CostModel, graph: OpGraph, runtime_s: Sequence[float]) -> tuple[float, ...]:
    far_bytes = far_values_bytes(graph)
    if not any(far_bytes) or not isinstance(model, KnowsDistance):
        return ()
    rate = model.far_s_per_byte
    if not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise PlacematError(
            f"`far_s_per_byte` of the cost model must be seconds, finite and not negative, got {rate!r}. Remedy: 0 "
            "if it is not known."
        )
    return tuple(min(seconds, rate * size) for seconds, size in zip(runtime_s, far_bytes, strict=True))


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
