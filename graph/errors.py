"""Errors that placemat raises on purpose: what happened, the numbers, the remedy.

They live in the lowest layer because every layer raises them; `placemat` re-exports them.
"""

from __future__ import annotations

from collections.abc import Mapping


class PlacematError(ValueError):
    """Base of every error that placemat raises for a user to read."""


class BudgetTooSmall(PlacematError):
    """No plan of the solved family fits the budget.

    Attributes:
        minimum_budget_bytes: smallest budget for which a plan was found.
        budget_bytes: what was asked for.
        breakdown: bytes by category at the step that binds.
        binding_op: name of the op at whose execution the floor is reached.
        source: the user's source line of that op, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        minimum_budget_bytes: int,
        budget_bytes: int,
        breakdown: Mapping[str, int],
        binding_op: str,
        source: str | None,
    ) -> None:
        super().__init__(message)
        self.minimum_budget_bytes = minimum_budget_bytes
        self.budget_bytes = budget_bytes
        self.breakdown = dict(breakdown)
        self.binding_op = binding_op
        self.source = source


class CaptureError(PlacematError):
    """The model cannot be captured as one graph; the message names the user's file and line."""


class UnsupportedFeature(PlacematError):
    """The model or the call uses something that placemat refuses to do; the message says what to do."""


class PlanMismatch(PlacematError):
    """A plan was applied to a model, an input or an environment that it was not made for."""


class ConstraintError(PlacematError):
    """`keep=` or `recompute=` asks for what cannot be: nothing matches, two entries contradict each other, or what
    matches cannot be recomputed."""


class SolverFailed(PlacematError):
    """The solver stopped without a plan although one exists or may exist; the message says why."""


class InvalidSchedule(PlacematError):
    """A schedule breaks a rule of the referee (`simulate`)."""


class MissingExtra(PlacematError):
    """What was asked for needs a package that placemat installs only on demand; the message says which."""


class UndeclaredGradients(UserWarning):
    """A backward begins while gradients exist that the plan does not count; told once per module."""


class RoundingDiffers(UserWarning):
    """A gradient may differ from eager's in its last bits, because sums run in another order; told once per module."""
