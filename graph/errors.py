"""Errors that placemat raises on purpose: what happened, the numbers, the remedy.

They live in the lowest layer because every layer raises them; `placemat` re-exports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class PlacematError(ValueError):
    """Base of every error that placemat raises for a user to read. All can be pickled, to cross processes."""

    def __reduce__(self) -> tuple[Callable[..., PlacematError], tuple[Any, ...]]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[PlacematError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> PlacematError:
    """An error as it was pickled; constructors with keyword arguments of their own are passed by."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


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


class RanksDisagree(PlacematError):
    """The processes of a job do not have the same plan, model or call, or one of them did not answer in time."""


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
