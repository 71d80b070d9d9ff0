"""Gradients of outputs in the strides that they come in, where the trace had others.

Autograd's formulas make gradients contiguous for some kernels, and reshape them. In a trace, whose gradients have the
strides of the outputs, such a copy is not there if it had nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from placemat.graph.kernel_strides import suggested_format

aten = torch.ops.aten


def _of_input(node: fx.Node) -> torch.memory_format:
    x = node.args[1]
    assert isinstance(x, fx.Node)
    return suggested_format(x.meta["val"])


def _contiguous(node: fx.Node) -> torch.memory_format:
    return torch.contiguous_format


# Operators whose first argument is a gradient that autograd makes contiguous, and in which memory format (torch 2.13:
# tools/autograd/derivatives.yaml; compared with the calls of all operators' backwards for permuted gradients).
_MADE_CONTIGUOUS: dict[object, Callable[[fx.Node], torch.memory_format]] = {
    aten.native_group_norm_backward.default: _of_input,
    aten._cdist_backward.default: _contiguous,
    aten._weight_norm_interface_backward.default: _contiguous,
    aten.as_strided.default: _contiguous,
    aten.as_strided_scatter.default: _contiguous,
    aten.view_as_complex.default: _contiguous,
    aten.view_as_real.default: _contiguous,
}


def take_as_they_come(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """Put the copies back, in place: each happens if the strides that arrive ask for it."""
    reached = set(tangents)
    for node in list(graph.nodes):
        if node.op != "call_function" or reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        gradient = node.args[0] if node.args else None
        if node.target in _MADE_CONTIGUOUS and gradient in reached:
            layout = _MADE_CONTIGUOUS[node.target](node)
            with graph.inserting_before(node):
                copy = graph.call_function(aten.contiguous.default, (gradient,), {"memory_format": layout})
            copy.meta = dict(gradient.meta)
            node.args = (copy, *node.args[1:])
