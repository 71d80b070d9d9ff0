"""Refinement: one retention model that is solved, decoded and tightened until its plan passes the referee."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placemat.decode import recompute_events
from placemat.memory_rows import BYTE_SCALE, Event, MemoryRows
from placemat.milp import Retention, build_retention
from placemat.phases import Phases, Wants
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule
from placemat.simulate import Simulation

FRACTION = 1e-5  # a column nearer than this to 0 or 1 is integral


@dataclass
class Refinement:
    """A model with its memory rows.

    Attributes:
        model: columns and rows (1) to (6).
        memory: rows (7).
        costs: the objective, column -> coefficient.
    """

    model: Retention
    memory: MemoryRows
    costs: dict[int, float]

    def tighten(self, schedule: Schedule, simulation: Simulation, solution: np.ndarray, limit_bytes: int) -> None:
        """Cut off a solution whose decoded schedule needs more than `limit_bytes`.

        First the rows (t,k) of the events above the limit that are missing; if all stand, the fractional Y and y
        become binary; if none is fractional, only the solver's tolerance let the solution through, and a cover row
        excludes it in small integers.
        """
        over = events_over(self.model, schedule, simulation, limit_bytes)
        assert over, f"nothing above {limit_bytes} to cut off"
        missing = [event for event in over if event not in self.memory.events]
        for event in missing:
            self.memory.add(event)
        if missing or self.make_binary(solution):
            return
        for event in over:
            self._add_cover(event, solution, limit_bytes)

    def make_binary(self, solution: np.ndarray) -> bool:
        """Make every Y and y binary that is fractional somewhere in its phase; False if there is none."""
        linear = self.model.linear
        any_fractional = False
        for ramp in (*self.model.Y.values(), *self.model.y.values()):
            columns = ramp.columns
            if any(FRACTION < solution[c] < 1 - FRACTION for c in columns) and not linear.is_integer[columns[0]]:
                any_fractional = True
                for column in columns:
                    linear.is_integer[column] = True
        return any_fractional

    def _add_cover(self, event: Event, solution: np.ndarray, limit_bytes: int) -> None:
        """The largest shares that the solution holds at the event, as few as exceed the limit together."""
        held = [
            share
            for share in self.memory.shares(event)
            if share.num_bytes and share.constant + sum(a * solution[c] for c, a in share.terms) > 0.5
        ]
        held.sort(key=lambda share: (bool(share.terms), -share.num_bytes))  # constants cost the cover nothing
        total, cover = self.model.problem.static_bytes, []
        for share in held:
            cover.append(share)
            total += share.num_bytes
            if total > limit_bytes:
                break
        assert total > limit_bytes, f"the model holds {total} bytes at {event}, within {limit_bytes}; the referee does not"
        self.memory.add_cover(event, cover)


def refine_for_budget(problem: Problem, phases: Phases, wants: Wants, budget_bytes: int) -> Refinement:
    """Rows (1) to (7) for a budget; objective: recompute seconds, see `objective_costs`."""
    model = build_retention(problem, phases, wants)
    memory = MemoryRows(model, budget_bytes, max(budget_bytes, 1) / BYTE_SCALE)
    memory.add_runs()
    return Refinement(model, memory, objective_costs(model))


def refine_for_peak(problem: Problem, phases: Phases, wants: Wants, lower_bytes: int, upper_bytes: int) -> Refinement:
    """Rows (1) to (7) with the peak, between the bounds, as the objective."""
    model = build_retention(problem, phases, wants)
    unit_bytes = max(upper_bytes, 1) / BYTE_SCALE
    peak = model.linear.add_column("M", lower=0.0, upper=upper_bytes / unit_bytes)
    memory = MemoryRows(model, lower_bytes, unit_bytes, peak_column=peak)
    memory.add_runs()
    model.linear.column_lower[peak] = min(lower_bytes, upper_bytes) / unit_bytes
    return Refinement(model, memory, {peak: 1.0})


# The objective counts all runs of the step as COST_SCALE, and every recomputation TIE_SCALE / their number beside its
# seconds: among plans of equal cost the one with fewest recomputations wins, and all ties together move the optimum by
# less than 1e-6 of the step's seconds.
COST_SCALE = 1e4
TIE_SCALE = 1e-2


def cost_unit_s(problem: Problem) -> float:
    """Seconds per unit of the objective."""
    return (problem.runtime_s or 1.0) / COST_SCALE


def objective_costs(model: Retention) -> dict[int, float]:
    """sum of (c_o + tie) X[o,p], in units of `cost_unit_s`."""
    unit_s = cost_unit_s(model.problem)
    tie = TIE_SCALE / max(len(model.Y), 1)
    return {ramp.final: model.problem.ops[o].runtime_s / unit_s + tie for (o, _), ramp in model.Y.items()}


def events_over(model: Retention, schedule: Schedule, simulation: Simulation, limit_bytes: int) -> list[Event]:
    """Events at which the referee finds more than `limit_bytes`."""
    running = [
        num_bytes for step, num_bytes in zip(schedule.steps, simulation.timeline, strict=True) if isinstance(step, Compute)
    ]
    events = recompute_events(model, schedule)
    return [event for event, num_bytes in zip(events, running, strict=True) if num_bytes > limit_bytes]
