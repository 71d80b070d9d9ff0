"""Operators whose eager step depends on more than the graph shows: refused where their gradients would differ."""

from __future__ import annotations

import torch
from torch import fx

from placemat.graph.errors import UnsupportedFeature
from placemat.graph.joint import JointGraph
from placemat.graph.sources import user_line

aten = torch.ops.aten

# Their derivatives look for zeros in the data and take a shorter formula if there is none; under tracing they take the
# general one, which rounds otherwise (prod_backward, cumprod_backward in torch/csrc/autograd/FunctionsManual.cpp).
_LOOKS_AT_DATA = (aten.prod.default, aten.prod.dim_int, aten.cumprod.default)
# Its kernel calls products that autocast casts in eager, and in a compiled region, where autocast is off, it does not
# (_trilinear in aten/src/ATen/native/Linear.cpp).
_CASTS_INSIDE = (aten._trilinear.default,)


def refuse_data_dependent(joint: JointGraph, *, autocast: bool) -> None:
    """Refuse a step that would differ from eager's by what an operator does inside.

    Raises:
        UnsupportedFeature: with the operator and the user's line.
    """
    nodes = joint.graph_module.graph.nodes
    backward = {n for n in nodes if n.meta.get("partitioner_tag") == "is_backward"}
    # The general formula of either has one of them, with the number of the node of autograd that it belongs to.
    general = {n.meta.get("seq_nr") for n in backward if n.target in _LOOKS_AT_DATA} - {None}
    for node in nodes:
        if node in backward:
            continue
        if node.target in _LOOKS_AT_DATA and node.meta.get("seq_nr") in general:
            raise UnsupportedFeature(
                f"the model trains through {_name(node)}, whose derivative in eager depends on whether there are zeros "
                "in the data: a captured backward would round otherwise. Remedy: write it with other operators, for "
                "instance x.log().sum(dim).exp() of positive numbers, or multiply the slices."
            )
        if autocast and node.target in _CASTS_INSIDE:
            raise UnsupportedFeature(
                f"the model runs {_name(node)} (torch.nn.Bilinear) under torch.autocast, which in eager casts products "
                "inside the operator and in a captured step cannot. Remedy: run it in a region with "
                "torch.autocast(device_type, enabled=False), or use torch.einsum."
            )


def _name(node: fx.Node) -> str:
    return f"{node.target} at {user_line(node.meta.get('stack_trace')) or 'an unknown line'}"
