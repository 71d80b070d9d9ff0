"""Labels: what people call the ops and values of a problem. Plain data beside the integers of `Problem`."""

from __future__ import annotations

from dataclasses import dataclass

from placemat.graph.ir import ModuleCall, Op, OpGraph, Value

# Pseudo-ops at which autograd gets gradients.
HANDING_OUT = ("placemat.hand_out", "placemat.accumulate")


@dataclass(frozen=True)
class OpLabel:
    """Where an op comes from; fields as in `graph.ir.Op`."""

    target: str
    phase: str
    module_path: str
    source: str | None
    why_not: str | None = None
    autograd_node: int | None = None
    overwrites: int | None = None
    reads_static: bool = False
    is_unnamed: bool = False
    call: int | None = None


@dataclass(frozen=True)
class ValueLabel:
    """Category of `Plan.breakdown` under which the value's bytes count, and its shape and dtype if it is one tensor."""

    category: str
    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True, repr=False)
class Labels:
    """One label per op and per value of a problem, in its order; the submodules that the forward calls."""

    ops: tuple[OpLabel, ...]
    values: tuple[ValueLabel, ...]
    modules: tuple[ModuleCall, ...] = ()

    @classmethod
    def of(cls, graph: OpGraph) -> Labels:
        return cls(
            tuple(_op_label(op) for op in graph.ops),
            tuple(ValueLabel(category(graph, v), v.shape, v.dtype) for v in graph.values),
            graph.modules,
        )

    def __repr__(self) -> str:
        return f"Labels({len(self.ops)} ops, {len(self.values)} values)"


def _op_label(op: Op) -> OpLabel:
    return OpLabel(
        op.target,
        op.phase,
        op.module_path,
        op.source,
        op.why_not,
        op.autograd_node,
        op.overwrites,
        op.reads_static,
        op.is_unnamed,
        op.call,
    )


def category(graph: OpGraph, value: Value) -> str:
    """Category of a value's bytes while it is resident.

    What backward passes from op to op are `temporaries`; `outputs` include their gradients, `activations` the saved
    generator states.
    """
    if value.role == "activation":
        return "temporaries" if graph.ops[value.producer].phase == "backward" else "activations"
    return {
        "output": "outputs",
        "tangent": "outputs",
        "gradient": "gradients",
        "mutation": "mutations",
        "rng_state": "activations",
    }[value.role]


def shape_text(shape: tuple[int, ...] | None, dtype: str) -> str:
    """ "float32[8, 128]"; empty for a value that is no single tensor."""
    return "" if shape is None else f"{dtype}{list(shape)}"


def location(source: str | None) -> str:
    """File and line of a source line: "/a/net.py:12" of "/a/net.py:12, in forward: x = self.a(x)"."""
    return "" if source is None else source.split(", in ", 1)[0]


def short_source(source: str | None) -> str | None:
    """A source line with the last folder of its path: ".../nets/net.py:12, in forward: x = self.a(x)".

    Where a library lies on this machine tells nobody anything, and makes lines too long to read.
    """
    where = location(source)
    parts = where.split("/")
    return source if source is None or len(parts) <= 3 else f".../{parts[-2]}/{parts[-1]}{source[len(where) :]}"
