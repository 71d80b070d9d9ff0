"""Problem: a rematerialization instance in integers, bytes and seconds. No torch, no names that decide anything."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx

from placemat.cost_models.base import Costs
from placemat.graph.ir import OpGraph


@dataclass(frozen=True)
class ProblemValue:
    """One storage. Pinned: resident from its first production to the end, never freed."""

    name: str
    bytes: int
    producer: int  # op index
    pinned: bool = False


@dataclass(frozen=True)
class ProblemOp:
    """One op; its index in `Problem.ops` is the step at which it runs first.

    A recomputation reads `recompute_inputs`, which are `inputs` unless given, and needs `recompute_workspace_bytes`.
    `far_s`, at most `runtime_s`, are seconds that the step takes for reading results of the op long after they were
    made, and that a recomputation saves (`cost_models.distance`).
    """

    name: str
    inputs: tuple[int, ...]  # value indices
    outputs: tuple[int, ...]  # value indices
    runtime_s: float
    workspace_bytes: int = 0
    recomputable: bool = True
    recompute_inputs: tuple[int, ...] = None  # type: ignore[assignment]  # None becomes `inputs`
    recompute_workspace_bytes: int = 0
    far_s: float = 0.0

    def __post_init__(self) -> None:
        if self.recompute_inputs is None:
            object.__setattr__(self, "recompute_inputs", self.inputs)

    @property
    def first_s(self) -> float:
        """What the first run adds to the step."""
        return self.runtime_s + self.far_s

    @property
    def recompute_s(self) -> float:
        """What a recomputation adds to the step."""
        return self.runtime_s - self.far_s


@dataclass(frozen=True, repr=False)
class Problem:
    """Ops in execution order and their values; `border` is the index of the first backward-side op, if there is one.

    `static_bytes` are always resident: every peak and budget of this problem includes them. The values in `dropped`
    must not be resident when the op `border` runs first: what reads them afterwards has to recompute them.

    Raises:
        ValueError: an index is out of range, an op reads what is not yet produced, a value does not belong to
            exactly one op, an amount is negative or not finite, or a dropped value could not be brought back.
    """

    ops: tuple[ProblemOp, ...]
    values: tuple[ProblemValue, ...]
    border: int | None = None
    static_bytes: int = 0
    dropped: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.validate()

    @property
    def num_steps(self) -> int:
        return len(self.ops)

    @cached_property
    def runtime_s(self) -> float:
        """Seconds of one pass over all ops, without recomputation."""
        return math.fsum(seconds for op in self.ops for seconds in (op.runtime_s, op.far_s))

    def validate(self) -> None:
        """Check what every solver relies on; see the class for the errors."""
        _check_amount("`static_bytes`", self.static_bytes)
        if self.border is not None and not 0 <= self.border <= len(self.ops):
            raise ValueError(f"`border` is {self.border}, but the problem has steps 0 to {len(self.ops)}")
        for index, value in enumerate(self.values):
            _check_amount(f"bytes of value {index} ({value.name})", value.bytes)
        seen: set[int] = set()
        for step, op in enumerate(self.ops):
            self._check_op(step, op)
            if repeated := seen.intersection(op.outputs):
                raise ValueError(f"value {min(repeated)} is an output of two ops, one of them {step} ({op.name})")
            seen.update(op.outputs)
        if missing := set(range(len(self.values))) - seen:
            v = min(missing)
            raise ValueError(f"value {v} ({self.values[v].name}) is not among the outputs of any op")
        for v in sorted(self.dropped):
            self._check_dropped(v)

    def _check_op(self, step: int, op: ProblemOp) -> None:
        where = f"op {step} ({op.name})"
        if not (math.isfinite(op.runtime_s) and op.runtime_s >= 0):
            raise ValueError(f"`runtime_s` of {where} must be finite and >= 0, got {op.runtime_s}")
        if not 0 <= op.far_s <= op.runtime_s:
            raise ValueError(f"`far_s` of {where} must be between 0 and `runtime_s`, {op.runtime_s}; got {op.far_s}")
        _check_amount(f"`workspace_bytes` of {where}", op.workspace_bytes)
        _check_amount(f"`recompute_workspace_bytes` of {where}", op.recompute_workspace_bytes)
        for kind in ("inputs", "recompute_inputs", "outputs"):
            indices: tuple[int, ...] = getattr(op, kind)
            if len(set(indices)) != len(indices):
                raise ValueError(f"`{kind}` of {where} names a value twice: {indices}")
            for v in indices:
                if not 0 <= v < len(self.values):
                    raise ValueError(f"`{kind}` of {where} names value {v}; there are {len(self.values)} values")
                producer = self.values[v].producer
                if kind == "outputs" and producer != step:
                    raise ValueError(f"value {v} is an output of {where}, but its `producer` is {producer}")
                if kind != "outputs" and producer >= step:
                    raise ValueError(
                        f"{where} reads value {v} ({self.values[v].name}) in `{kind}`, which op {producer} produces "
                        "later: ops must be in topological order"
                    )

    def _check_dropped(self, v: int) -> None:
        if not 0 <= v < len(self.values):
            raise ValueError(f"`dropped` names value {v}; there are {len(self.values)} values")
        value = self.values[v]
        what = f"value {v} ({value.name}) is in `dropped`"
        if self.border is None or self.border >= len(self.ops):
            raise ValueError(f"{what}, which is about the op at the border, but `border` is {self.border}")
        if value.producer >= self.border:
            raise ValueError(f"{what}, but is produced by op {value.producer}, not before the border {self.border}")
        if v in self.ops[self.border].inputs:
            raise ValueError(f"{what}, but op {self.border} ({self.ops[self.border].name}) at the border reads it")
        if value.pinned:
            raise ValueError(f"{what}, but is pinned")
        if not self.ops[value.producer].recomputable:
            raise ValueError(f"{what}, but op {value.producer} ({self.ops[value.producer].name}) is not recomputable")

    @classmethod
    def from_networkx(
        cls,
        g: nx.DiGraph,
        order: Sequence[Hashable] | None = None,
        *,
        border: int | None = None,
        static_bytes: int = 0,
    ) -> Problem:
        """One op and one value per node; an edge (a, b) means that b reads a's value.

        Args:
            g: acyclic; node attributes `bytes` (int) and `seconds` (float), and optionally `workspace_bytes` = 0,
                `recomputable` = True, `pinned` = False, `dropped` = False.
            order: every node once, in execution order; None takes the topological order nearest to the insertion order.
            border: position in `order` of the first backward-side node, if there is one.
            static_bytes: bytes resident during the whole step.

        Raises:
            ValueError: the graph has a cycle, `order` is not a topological order of it, or an attribute is missing.
        """
        position = _positions(g, order)
        ops, values = [], []
        for index, node in enumerate(position):
            data = g.nodes[node]
            reads = tuple(sorted(position[p] for p in g.predecessors(node)))
            workspace_bytes = data.get("workspace_bytes", 0)
            for key in ("bytes", "seconds"):
                if key not in data:
                    raise ValueError(f"node {node!r} has no attribute `{key}`; each node needs `bytes` and `seconds`")
            ops.append(
                ProblemOp(
                    name=str(node),
                    inputs=reads,
                    outputs=(index,),
                    runtime_s=data["seconds"],
                    workspace_bytes=workspace_bytes,
                    recomputable=data.get("recomputable", True),
                    recompute_inputs=reads,
                    recompute_workspace_bytes=workspace_bytes,
                )
            )
            values.append(ProblemValue(str(node), data["bytes"], index, data.get("pinned", False)))
        dropped = frozenset(index for node, index in position.items() if g.nodes[node].get("dropped", False))
        return cls(tuple(ops), tuple(values), border, static_bytes, dropped)

    @classmethod
    def from_op_graph(cls, graph: OpGraph, costs: Costs, *, reserved_bytes: int = 0) -> Problem:
        """The instance of a captured training step; `reserved_bytes` is what the user declares beside the graph."""
        ops = tuple(
            ProblemOp(
                name=op.name,
                inputs=tuple(op.inputs),
                outputs=tuple(op.outputs),
                runtime_s=costs.runtime_s[op.index],
                workspace_bytes=costs.workspace_bytes[op.index],
                recomputable=op.recomputable,
                recompute_inputs=tuple(op.recompute_inputs),
                recompute_workspace_bytes=costs.recompute_workspace_bytes[op.index],
                far_s=costs.far_s_of(op.index),
            )
            for op in graph.ops
        )
        values = tuple(ProblemValue(v.name, v.bytes, v.producer, v.pinned) for v in graph.values)
        static_bytes = graph.total_static_bytes + reserved_bytes
        return cls(ops, values, graph.border, static_bytes, frozenset(graph.dropped))

    def __repr__(self) -> str:
        recomputable = sum(op.recomputable for op in self.ops)
        pinned = sum(value.pinned for value in self.values)
        dropped = f", {len(self.dropped)} dropped at the border" if self.dropped else ""
        return (
            f"Problem({len(self.ops)} ops, {recomputable} recomputable, border={self.border}; "
            f"{len(self.values)} values, {pinned} pinned{dropped}, {sum(v.bytes for v in self.values):,} B; "
            f"{self.static_bytes:,} B static; {self.runtime_s:.6g} s)"
        )

    def table(self, max_rows: int = 40) -> str:
        """Aligned text, one op a line: step, name, seconds, output bytes, workspace bytes, flags, inputs."""
        rows: list[tuple[str, ...]] = [("step", "op", "seconds", "out bytes", "workspace", "", "reads")]
        for step, op in enumerate(self.ops[:max_rows]):
            flags = "" if op.recomputable else "no recompute"
            out_bytes = sum(self.values[v].bytes for v in op.outputs)
            reads = " ".join(self.values[v].name for v in op.inputs)
            rows.append(
                (str(step), op.name, f"{op.runtime_s:.4g}", f"{out_bytes:,}", f"{op.workspace_bytes:,}", flags, reads)
            )
        lines = _align(rows)
        if len(self.ops) > max_rows:
            lines.append(f"... {len(self.ops) - max_rows} more")
        return "\n".join([*lines, repr(self)])


def _check_amount(what: str, amount: int) -> None:
    if amount != int(amount) or amount < 0:
        raise ValueError(f"{what} must be a whole number >= 0, got {amount}")


def _positions(g: nx.DiGraph, order: Iterable[Hashable] | None) -> dict[Any, int]:
    """Node -> step, in order."""
    if order is None:
        inserted = {node: i for i, node in enumerate(g)}
        try:
            order = list(nx.lexicographical_topological_sort(g, key=inserted.__getitem__))
        except nx.NetworkXUnfeasible:
            raise ValueError("the graph has a cycle: only acyclic graphs can be scheduled") from None
    position = {node: i for i, node in enumerate(order)}
    if set(position) != set(g):
        raise ValueError(f"`order` must name every node once: {len(position)} named, {len(g)} in the graph")
    return position


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns padded to equal width, the second and the last ones to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (1, len(widths) - 1)
    return [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
