"""Fusion: values that a compiler of fused kernels never puts into memory.

Inductor (Ansel et al., ASPLOS 2024, section 4) inlines an elementwise operator into the kernels of its readers, if
these are elementwise too; and as placemat sets it up, nothing is fused across an external kernel (a product, a
convolution, a random draw). A result that is read in such kernels alone, of the same phase and before the next external
kernel, is a register there and takes no bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from placemat.graph.ir import Op, OpGraph

# Elementwise for Inductor, without PyTorch's tag for such operators.
_ELEMENTWISE = frozenset({"aten._to_copy.default", "aten.native_dropout_backward.default"})
# Kernels of libraries and of other compilers: nothing is inlined into them or moved past them.
_EXTERNAL = (
    "aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.mv.", "aten.addmv.", "aten.dot.", "aten.convolution",
    "aten._scaled_dot_product", "aten._fft", "aten.sort.", "aten.topk.",
)  # fmt: skip


@dataclass(frozen=True)
class Fusion:
    """What is fused in one graph.

    Attributes:
        inlined: values that take no bytes.
        inlined_again: values that take none if they are recomputed for the backward: all that reads them there is
            elementwise.
    """

    inlined: frozenset[int]
    inlined_again: frozenset[int]


def find_fusion(graph: OpGraph) -> Fusion:
    """What Inductor would inline, going by the order of the ops."""
    readers: list[list[Op]] = [[] for _ in graph.values]
    for op in graph.ops:
        for v in op.inputs:
            readers[v].append(op)
    externals = list(accumulate(is_external(op) for op in graph.ops))
    inlined, again = set(), set()
    for value in graph.values:
        producer = graph.ops[value.producer]
        if not is_elementwise(producer) or value.role != "activation" or value.pinned:
            continue
        later = [op for op in readers[value.index] if op.phase != producer.phase]
        if later and all(map(is_elementwise, later)):
            again.add(value.index)
        is_near = all(externals[op.index] == externals[producer.index] for op in readers[value.index])
        if is_near and not later and all(map(is_elementwise, readers[value.index])):
            inlined.add(value.index)
    return Fusion(frozenset(inlined), frozenset(again))


def fused(graph: OpGraph) -> OpGraph:
    """The graph with no bytes for what is inlined."""
    inlined = find_fusion(graph).inlined
    return replace(graph, values=tuple(replace(v, bytes=0) if v.index in inlined else v for v in graph.values))


def is_elementwise(op: Op) -> bool:
    """Whether each entry of the result comes from one entry of each argument."""
    return op.target in _ELEMENTWISE or torch.Tag.pointwise in _tags(op.target)


def is_external(op: Op) -> bool:
    """Whether a kernel that Inductor does not write runs the op."""
    return (
        not op.target.startswith(("aten.", "prims."))
        or op.target.startswith(_EXTERNAL)
        or torch.Tag.nondeterministic_seeded in _tags(op.target)
    )


@functools.cache
def _tags(target: str) -> Mapping[torch.Tag, None] | list[torch.Tag]:
    found: object = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    return getattr(found, "tags", [])
