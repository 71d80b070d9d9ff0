"""Answer: what every reference solver gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import simulate

Status = Literal["optimal", "feasible", "infeasible", "none"]


@dataclass(frozen=True)
class Answer:
    """What a solver found within a budget and a time limit.

    Attributes:
        schedule: its plan; the caller simulates it. None if it has none.
        status: "optimal" and "infeasible" are proven for the solver's own family of schedules, "feasible" is a plan
            without proof, "none" is no plan without proof.
        lower_bound_seconds: no schedule of that family recomputes less; None where a solver knows no bound.
        note: what a reader of a table should know of it.
    """

    schedule: Schedule | None
    status: Status
    lower_bound_seconds: float | None = None
    note: str = ""


def cheapest(problem: Problem, budget_bytes: int, schedules: Iterable[Schedule]) -> Answer:
    """The one with the fewest recompute seconds among those that the referee finds to fit; the first of equals."""
    best: Schedule | None = None
    best_seconds = float("inf")
    for schedule in schedules:
        simulation = simulate(problem, schedule)
        if simulation.peak_bytes <= budget_bytes and simulation.recompute_seconds < best_seconds:
            best, best_seconds = schedule, simulation.recompute_seconds
    return Answer(best, "none" if best is None else "feasible")
