"""OpGraph: a training step as ops and storages, in plain integers, bytes and text. No torch here.

Words (docs/design.md, section 1): an *op* is one execution unit of the joint forward/backward graph; a *value* is one
storage that an op produces (views share it); the *border* is the pseudo-op between forward and backward at which the
caller computes the loss and its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import networkx as nx

Phase = Literal["forward", "border", "backward"]
Role = Literal["activation", "output", "tangent", "gradient", "mutation", "rng_state"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (both in elements), dtype and device type of one tensor argument or result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # as torch prints it without the prefix: "float32", "bool"
    device: str  # device type: "cpu", "cuda"
    itemsize: int  # bytes per element

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this shape; an expanded tensor's storage is smaller."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class OpSignature:
    """What a cost model may know of an op: two ops with equal signatures cost the same.

    `args` and `kwargs` mirror the call: tensors are TensorSpec, lists and tuples are tuples, everything else is
    the Python scalar, string or None (dtypes, layouts and devices as text).
    """

    target: str  # "aten.mm.default"; pseudo-ops are "placemat.border", "placemat.rng_state", ...
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec | None, ...]


@dataclass(frozen=True)
class Value:
    """One storage. Graph inputs are not values: they are static bytes."""

    index: int
    name: str
    bytes: int
    producer: int  # op index
    role: Role
    pinned: bool  # held by the caller, or by autograd, from its production to the end of the step
    shape: tuple[int, ...] | None = None  # of the tensor that the op returns; None: it has no single tensor
    dtype: str = ""  # as torch prints it without the prefix


@dataclass(frozen=True)
class Op:
    """One execution unit. Ops are in execution order: `index` is the op's step on the timeline.

    `inputs` are what the first run reads; `recompute_inputs` what a recomputation reads (a random op also reads the
    generator state that was saved before it ran). `why_not` is the reason if `recomputable` is False.
    """

    index: int
    name: str
    signature: OpSignature
    phase: Phase
    inputs: tuple[int, ...]
    recompute_inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool
    why_not: str | None = None
    module_path: str = ""
    source: str | None = None  # "file.py:12, in forward: x = self.a(x)"
    # Bytes that this op needs beside its outputs and that are known from the graph itself, not from a cost model:
    # the loss computed at the border, gradients that autograd copies at the end.
    known_workspace_bytes: int = 0
    # Seconds that it took on this machine's CPU, of what no cost model can run: a module that is kept eager.
    known_runtime_s: float | None = None
    # Extra bytes of a recomputation: the generator state that is put aside while a random op is replayed.
    known_recompute_workspace_bytes: int = 0
    # What eager autograd makes of the call. Ops of forward and backward with one `autograd_node` belong to one node of
    # autograd; `overwrites` is the value in whose storage eager writes the result; `reads_static`: it reads a tensor
    # that lives during the whole step; `is_unnamed`: no local variable has the result; ops with one `call` are of one
    # call that the user's code makes.
    autograd_node: int | None = None
    overwrites: int | None = None
    reads_static: bool = False
    is_unnamed: bool = False
    call: int | None = None

    @property
    def target(self) -> str:
        return self.signature.target


@dataclass(frozen=True)
class ModuleCall:
    """What is known of the calls of one submodule.

    Attributes:
        path: dotted, from the root.
        why_not: reason against running its forward a second time, or None if the calls show none.
        is_chain: an `nn.Sequential`, which drops what it hands from child to child as soon as it can.
    """

    path: str
    why_not: str | None
    is_chain: bool


@dataclass(frozen=True)
class OpGraph:
    """A whole training step: forward ops, the border, backward ops.

    `static_bytes` maps a category ("parameters", "buffers", "inputs", ...) to bytes that are alive during the whole
    step whatever the plan. `dropped` maps values that no plan may hold when the border runs to the reason.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    border: int
    static_bytes: Mapping[str, int]
    device: str
    fingerprint: str
    notes: tuple[str, ...] = field(default=())
    dropped: Mapping[int, str] = field(default_factory=dict)
    modules: tuple[ModuleCall, ...] = ()  # submodules that the forward calls

    @property
    def total_static_bytes(self) -> int:
        return sum(self.static_bytes.values())

    def to_networkx(self) -> nx.DiGraph[int]:
        """Directed graph over op indices; an edge (a, b) carries `values`, the storages of a that b reads.

        Node attributes: name, target, phase, bytes (sum over outputs), recomputable, module_path, source.
        """
        graph: nx.DiGraph[int] = nx.DiGraph()
        for op in self.ops:
            graph.add_node(
                op.index,
                name=op.name,
                target=op.target,
                phase=op.phase,
                bytes=sum(self.values[v].bytes for v in op.outputs),
                recomputable=op.recomputable,
                module_path=op.module_path,
                source=op.source,
            )
        for op in self.ops:
            for v in op.inputs:
                producer = self.values[v].producer
                if graph.has_edge(producer, op.index):
                    graph.edges[producer, op.index]["values"] += (v,)
                else:
                    graph.add_edge(producer, op.index, values=(v,))
        return graph
