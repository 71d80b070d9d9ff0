"""From a solution of the phased retention MILP to a schedule, and back."""

from __future__ import annotations

import numpy as np

from placemat.milp import Ramp, Retention
from placemat.schedule import Schedule, canonical


def decode(model: Retention, solution: np.ndarray, threshold: float = 0.5) -> Schedule:
    """Run op o again where Y[o,.] first exceeds the threshold, then free everything as early as that allows.

    With binary s the schedule is valid for any threshold in (0, 1), fractional Y or not: by rows (1) and (2) a reader
    whose Y exceeds the threshold has inputs that are carried, or whose own y does.
    """
    again: dict[int, list[int]] = {}
    for (op, _), ramp in model.Y.items():
        step = _rise_step(ramp, solution, threshold)
        if step is not None:
            again.setdefault(step, []).append(op)
    computes: list[int] = []
    for step in range(model.problem.num_steps):
        computes.extend(sorted(again.get(step, ())))
        computes.append(step)
    return canonical(model.problem, computes)


def recompute_events(model: Retention, schedule: Schedule) -> list[tuple[int, int]]:
    """Per Compute of the schedule its event (t, k): op k before, or as, the first run of step t."""
    events: list[tuple[int, int]] = []
    step = 0
    for op in schedule.computes:
        events.append((step, op))
        step += op == step
    return events


def _rise_step(ramp: Ramp, solution: np.ndarray, threshold: float) -> int | None:
    for step, column in zip(ramp.steps, ramp.columns, strict=True):
        if solution[column] > threshold:
            return step
    return None
