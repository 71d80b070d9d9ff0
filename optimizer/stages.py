"""What planning knows of a call before a budget is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from placemat.cost_models.base import Costs
from placemat.graph.loss_region import LossRegion
from placemat.graph.lower import Lowering
from placemat.problem import Problem


@dataclass(frozen=True)
class Stages:
    """What planning knows of a call before a budget is looked at.

    Attributes:
        lowering: ops and values as constrained by the user, and the way back to the captured graph.
        costs: seconds and workspaces per op.
        problem: the rematerialization instance.
        loss: what the caller does between forward and backward.
        keep_everything_bytes: peak of the emitted step without recomputation, but for what the user asked for.
        eager_bound_bytes: no step with the original forward needs more; None if nobody knows, because it makes
            tensors for nothing that may take any amount (graph/unread.py).
        capture_seconds: time that capturing took.
    """

    lowering: Lowering
    costs: Costs
    problem: Problem
    loss: LossRegion
    keep_everything_bytes: int
    eager_bound_bytes: int | None
    capture_seconds: float

    def may_run_original(self, budget_bytes: int) -> bool:
        """Whether the module's original forward fits the budget and does what was asked for: it recomputes nothing."""
        fits = self.eager_bound_bytes is not None and budget_bytes >= self.eager_bound_bytes
        return fits and not self.problem.dropped


def eager_bound(problem: Problem) -> int:
    """Bytes that no step with the original forward exceeds: nothing is freed before the step is over.

    Eager frees earlier, but when depends on Python locals and on what autograd saves; this bound needs to know neither.
    """
    values = sum(v.bytes for v in problem.values)
    return problem.static_bytes + values + max((op.workspace_bytes for op in problem.ops), default=0)
