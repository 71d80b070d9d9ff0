"""Weights used several times by a module that is called several times before one backward.

Autograd adds the gradients of all uses one after another, as they arrive. A planned call hands out one gradient of a
weight, the sum of its uses in that call: ((b2 + a2) + b1) + a1 becomes (b2 + a2) + (b1 + a1).
"""

from __future__ import annotations

import warnings

import torch
from torch import fx

from placemat.graph import torch_private
from placemat.graph.errors import RoundingDiffers
from placemat.graph.joint import JointGraph
from placemat.graph.sources import users_stacklevel


def tied_leaves(joint: JointGraph) -> tuple[str, ...]:
    """Names of parameters and other leaves whose gradient is a sum over several uses."""
    return tuple(
        known.name
        for known, gradient in zip(joint.inputs, joint.gradients, strict=True)
        if known.is_leaf and isinstance(gradient, fx.Node) and gradient.target is torch.ops.aten.add.Tensor
    )


class TiedWeights:
    """Tells once of a backward that goes through several calls of a module with such weights."""

    def __init__(self) -> None:
        self._last_backward: int | None = None
        self._told = False

    def check(self, names: tuple[str, ...]) -> None:
        """To be called when the backward of a call begins whose tied leaves have these names."""
        backward = torch_private.running_backward()
        again, self._last_backward = backward == self._last_backward, backward
        if again and names and not self._told:
            self._told = True
            warnings.warn(_several_calls(names), RoundingDiffers, stacklevel=users_stacklevel())


def _several_calls(names: tuple[str, ...]) -> str:
    return (
        f"one backward() goes through several calls of an optimized module that uses {', '.join(names)} several times: "
        "the gradients of all uses are added call by call, where eager adds them one by one, so their sums may differ "
        "from eager's in the last bits. Remedy: a backward() for each call, or one call on the concatenated batch; for "
        "training neither matters."
    )
