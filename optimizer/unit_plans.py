"""UnitPlans: what `distributed.optimize_units` returns: a plan for each unit, and what is known of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placemat.checkpoint_modules import fold_paths
from placemat.summary import align
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.plan import Plan


@dataclass(frozen=True)
class UnitFigures:
    """What one unit does in the step; bytes are those that the surrounding step does not have anyway.

    Attributes:
        kept_bytes: held from its forward to its backward.
        forward_bytes, backward_bytes: live at most while either runs.
        recompute_seconds, forward_backward_seconds: of one call.
        num_calls: in one step.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    recompute_seconds: float
    forward_backward_seconds: float
    num_calls: int


@dataclass(frozen=True, repr=False)
class UnitPlans:
    """Plans for the units of a model under one budget; printed, it says what is counted and what is an estimate.

    Attributes:
        plans, figures: path of the unit -> its plan, and what that does in the step.
        budget_bytes, predicted_peak_bytes: bound, and highest figure, of the whole step.
        peak_place: the part of the step at which that is.
        measured_peak_bytes: of a step that was run with these plans; the highest of all ranks.
        keep_everything_bytes: predicted peak of the step if no unit recomputed anything.
        outside_bytes: the most at any moment that is not the units': parameters, gradients, tensors between them.
        recompute_seconds, lower_bound_seconds: of all units in one step, and the least that any choice of schedules of
            `family` takes.
        is_optimal: the gap that was asked for is reached.
        solve_seconds: of the search.
    """

    plans: Mapping[str, Plan]
    figures: Mapping[str, UnitFigures]
    budget_bytes: int
    predicted_peak_bytes: int
    peak_place: str
    measured_peak_bytes: int
    keep_everything_bytes: int
    outside_bytes: int
    recompute_seconds: float
    lower_bound_seconds: float
    is_optimal: bool
    family: str
    solve_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def forward_backward_seconds(self) -> float:
        """Of all units in one step, without recomputation."""
        return sum(f.num_calls * f.forward_backward_seconds for f in self.figures.values())

    @property
    def overhead(self) -> float:
        """Recompute seconds divided by the units' forward + backward seconds."""
        return _ratio(self.recompute_seconds, self.forward_backward_seconds)

    @property
    def lower_bound(self) -> float:
        """No choice of schedules of the family has a smaller overhead."""
        return _ratio(self.lower_bound_seconds, self.forward_backward_seconds)

    @property
    def gap(self) -> float:
        """(recompute seconds - their lower bound) / recompute seconds: 0 is proven optimal for the family."""
        return _ratio(self.recompute_seconds - self.lower_bound_seconds, self.recompute_seconds)

    def __str__(self) -> str:
        extra_ms, units_ms = self.recompute_seconds * 1e3, self.forward_backward_seconds * 1e3
        rows = [
            ("budget", f"{format_bytes(self.budget_bytes)} for the whole step"),
            ("predicted peak", f"{format_bytes(self.predicted_peak_bytes)}, in {self.peak_place}"),
            ("measured peak", f"{format_bytes(self.measured_peak_bytes)}, of a step that was run with these plans"),
            ("keep everything", f"{format_bytes(self.keep_everything_bytes)}, if no unit recomputed anything"),
            ("outside", f"up to {format_bytes(self.outside_bytes)} beside the units, measured in a trial step"),
            ("overhead", f"{self.overhead:.2%}: {extra_ms:.4g} ms of recomputation for {units_ms:.4g} ms of the units"),
            (
                "lower bound",
                f"{self.lower_bound:.2%} for family {self.family} in every unit, gap {self.gap:.2%}"
                f"{'' if self.is_optimal else ', not closed in the time limit'}",
            ),
        ]
        counted = (
            "Counted to the byte: what units keep and run with. Measured: what is beside them, gathered parameters and "
            "communication included. Estimated: seconds."
        )
        notes = [f"- {note}" for note in self.notes]
        return "\n\n".join([align(rows, frozenset({0, 1})), self._table(), "\n".join([counted, *notes])])

    def __repr__(self) -> str:
        return (
            f"UnitPlans({len(self.plans)} units, peak {format_bytes(self.predicted_peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, overhead {self.overhead:.2%})"
        )

    def _table(self) -> str:
        alike: dict[UnitFigures, list[str]] = {}
        for path, figures in self.figures.items():
            alike.setdefault(figures, []).append(path)
        rows: list[tuple[str, ...]] = [("units", "kept", "in backward", "recomputed", "calls")]
        for figures, paths in alike.items():
            rows.append(
                (
                    ", ".join(fold_paths(paths)),
                    format_bytes(figures.kept_bytes),
                    format_bytes(figures.backward_bytes),
                    f"{figures.recompute_seconds * 1e3:.4g} ms",
                    str(figures.num_calls),
                )
            )
        return align(rows)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
