"""From a solution of the phased retention MILP to a schedule, and from a schedule to the events of the model."""

from __future__ import annotations

import numpy as np

from placemat.milp import Retention
from placemat.schedule import Schedule, canonical

THRESHOLD = 0.5


def decode(model: Retention, solution: np.ndarray) -> Schedule:
    """Run op o again where Y[o,.] says, then free everything as early as that allows.

    Between two grid steps a recomputation runs as late as its readers there permit, so that at every grid step the same
    ops have run again as in the solution. With binary s the schedule is valid even where Y is fractional: by rows (1)
    and (2) a reader that runs by a step has inputs that are carried, or whose op runs by that step.
    """
    again: dict[int, list[int]] = {}
    for (op, _), step in _recompute_steps(model, solution).items():
        again.setdefault(step, []).append(op)
    computes: list[int] = []
    for step in range(model.problem.num_steps):
        computes.extend(sorted(again.get(step, ())))
        computes.append(step)
    return canonical(model.problem, computes)


def _recompute_steps(model: Retention, solution: np.ndarray) -> dict[tuple[int, int], int]:
    """(op, phase) -> step before which it runs again, later ops first since they are the readers."""
    steps: dict[tuple[int, int], int] = {}
    wanted: dict[tuple[int, int], int] = {}  # (value, phase) -> first step whose recomputations read it
    for (op, p), ramp in sorted(model.Y.items(), reverse=True):
        risen = [t for t, column in zip(ramp.steps, ramp.columns, strict=True) if solution[column] > THRESHOLD]
        if not risen:
            continue
        step = risen[0]
        for v in model.problem.ops[op].outputs:
            if (v, p) in model.s and solution[model.s[v, p]] <= THRESHOLD:
                step = min([step, wanted.get((v, p), step), *_first_use(model, v, p)])
        steps[op, p] = step
        for v in model.problem.ops[op].recompute_inputs:
            wanted[v, p] = min(step, wanted.get((v, p), step))
    return steps


def _first_use(model: Retention, v: int, p: int) -> list[int]:
    """The first step of phase p whose first run reads v, if there is one."""
    phase_of = model.phases.phase_of
    return [u for u in model.wants.uses[v] if phase_of[u] == p][:1]


def recompute_events(schedule: Schedule) -> list[tuple[int, int]]:
    """Per Compute of the schedule its event (t, k): op k before, or as, the first run of step t."""
    events: list[tuple[int, int]] = []
    step = 0
    for op in schedule.computes:
        events.append((step, op))
        step += op == step
    return events
