"""The loss region: what the caller does between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossRegion:
    """What the caller does between forward and backward.

    Attributes:
        used_tangents: which of the forward's differentiable outputs (in tangent order) the loss reaches.
        workspace_bytes: most bytes that computing the loss and its gradient holds beside the tangents it returns.
        held_bytes: what the caller holds from the loss to the end of the step: the loss itself and its gradient.
        tangents_held: whether the caller holds the tangents during the whole backward.
    """

    used_tangents: frozenset[int]
    workspace_bytes: int = 0
    held_bytes: int = 0
    tangents_held: bool = True
