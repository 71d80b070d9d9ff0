"""Refinement: a retention model that is solved, decoded and tightened until its plan passes the referee.

The model of a long step starts with a handful of memory rows, those around the cuts, and columns for their steps. Where
a decoded plan needs more than it may, the grid gets the steps of these events, then their rows (t,k), then binary Y;
what the solver's tolerance still lets through is cut off by cover rows. Every model on the way bounds the whole family
from below. Half of the way between floor and keep-everything, a dozen of 957 steps of a 12-layer transformer are
enough; all other rows are dominated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from placemat.decode import recompute_events
from placemat.linear_model import Solving
from placemat.memory_rows import BYTE_SCALE, Event, MemoryRows
from placemat.milp import Retention, build_retention
from placemat.phases import Phases, find_wants
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import Simulation, running_bytes, simulate

FRACTION = 1e-5  # a column nearer than this to 0 or 1 is integral
WHOLE_GRID_STEPS = 150  # problems of up to so many steps start with all of them
EVENTS_PER_ROUND = 12  # of a longer one
EVENTS_APART = 1 / 40  # of its steps: where much is too full for long, rows of neighbours say the same
NEAR_LIMIT = 0.97  # a plan in hand is full where it takes more than this share of the limit
MOST_FULL_STEPS = 24

# The objective counts all runs of the step as COST_SCALE, and every recomputation TIE_SCALE / their number beside its
# seconds: among plans of equal cost the one with fewest recomputations wins, and all ties together move the optimum by
# at most 1e-6 of the step's seconds.
COST_SCALE = 1e4
TIE_SCALE = 1e-2


@dataclass
class Refinement:
    """What has been asked for so far, from which the model is built anew when the grid changes.

    Attributes:
        problem: what to schedule.
        phases: the family.
        limit_bytes: no plan above it is wanted.
        grid: steps with Y and y columns and a memory row.
        events: recomputations (t,k) with a memory row.
        binary: (op, phase) whose Y and y are binary.
        covers: events, values that may not all be there, and the bytes of these.
    """

    problem: Problem
    phases: Phases
    limit_bytes: int
    grid: set[int]
    events: set[Event] = field(default_factory=set)
    binary: set[tuple[int, int]] = field(default_factory=set)
    covers: list[tuple[Event, frozenset[int | None], int]] = field(default_factory=list)

    def build(self) -> RefinedModel:
        """The model of the present grid, rows and kinds."""
        model = build_retention(self.problem, self.phases, find_wants(self.problem, self.phases, self.grid))
        unit_bytes = max(self.limit_bytes, 1) / BYTE_SCALE
        memory = MemoryRows(model, self.limit_bytes, unit_bytes)
        for step in sorted(self.grid):
            memory.add((step, step))
        for event in sorted(self.events):
            memory.add(event)
        for event, held, num_bytes in self.covers:
            if num_bytes > self.limit_bytes:
                memory.add_cover(event, held)
        for o, p in model.Y:
            if (o, p) in self.binary:
                for column in model.columns_of(o, p):
                    model.linear.is_integer[column] = True
        return RefinedModel(model, memory, objective_costs(model), self.size)

    @property
    def size(self) -> tuple[int, int, int, int]:
        """How much has been asked for: it only grows."""
        return len(self.grid), len(self.events), len(self.binary), len(self.covers)

    def tighten(self, built: RefinedModel, schedule: Schedule, simulation: Simulation, solution: np.ndarray) -> None:
        """Cut off a solution whose decoded schedule needs more than the limit."""
        events = zip(recompute_events(schedule), running_bytes(schedule, simulation), strict=True)
        over = worst_apart(events, self.limit_bytes, self.problem.num_steps)
        if self.problem.num_steps > WHOLE_GRID_STEPS:
            over = over[:EVENTS_PER_ROUND]
        assert over, f"nothing above {self.limit_bytes} to cut off"
        if self._refine_grid(over) or built.size != self.size:
            return  # the next model knows more than this one did
        if not self.make_binary(built, solution):
            self.covers += [(event, *built.held(event, solution, self.limit_bytes)) for event in over]

    def _refine_grid(self, over: list[Event]) -> bool:
        """Give the worst events their rows, and the steps these need; False if they all stand."""
        before = len(self.grid), len(self.events)
        for t, k in over:
            is_exact = t in self.grid and (t - 1 in self.grid or t in self.phases.cuts)
            if k != t and is_exact:
                self.events.add((t, k))
            if k != t and t in self.grid and not is_exact:
                self.grid.add(t - 1)
            self.grid.add(t)
        return before != (len(self.grid), len(self.events))

    def make_binary(self, built: RefinedModel, solution: np.ndarray) -> bool:
        """Make the Y and y of every op binary that are fractional somewhere in a phase; False if there are none."""
        before = len(self.binary)
        for o, p in built.model.Y:
            if any(FRACTION < solution[c] < 1 - FRACTION for c in built.model.columns_of(o, p)):
                self.binary.add((o, p))
        return len(self.binary) > before


@dataclass(frozen=True)
class RefinedModel:
    """One built model: its columns and rows, the memory rows apart, its objective, and what had been asked for."""

    model: Retention
    memory: MemoryRows
    costs: dict[int, float]
    size: tuple[int, int, int, int]

    def start(
        self,
        *,
        time_limit_s: float,
        gap: float,
        fixed: Mapping[int, float] | None = None,
        relaxed: bool = False,
        below_s: float = math.inf,
    ) -> Solving:
        """Solve in the background for a plan that recomputes less than `below_s`; see `LinearModel.start`."""
        return self.model.linear.start(
            self.costs,
            time_limit_s=time_limit_s,
            gap=gap,
            fixed=fixed,
            relaxed=relaxed,
            cutoff=below_s / cost_unit_s(self.model.problem),
        )

    def columns(self, fixed: Mapping[tuple[int, int], float]) -> dict[int, float]:
        """From (v,p) to the column of s[v,p]."""
        return {self.model.s[key]: value for key, value in fixed.items()}

    def held(self, event: Event, solution: np.ndarray, limit_bytes: int) -> tuple[frozenset[int | None], int]:
        """The largest values that the solution holds at the event, as few as exceed the limit together; their bytes."""
        shares = [
            share
            for share in self.memory.shares(event)
            if share.num_bytes and share.constant + sum(a * solution[c] for c, a in share.terms) > 0.5
        ]
        shares.sort(key=lambda share: (bool(share.terms), -share.num_bytes))  # constants cost the cover nothing
        total, cover = self.model.problem.static_bytes, set()
        for share in shares:
            cover.add(share.value)
            total += share.num_bytes
            if total > limit_bytes:
                break
        assert total > limit_bytes, f"the model holds {total} bytes at {event}; the referee more than {limit_bytes}"
        return frozenset(cover), total


def first_grid(problem: Problem, phases: Phases, schedule: Schedule | None, limit_bytes: int) -> set[int]:
    """All steps of a small problem; else those around the cuts, where most is held, the last one, and those at which
    a plan in hand comes near the limit, or over it."""
    num_steps = problem.num_steps
    if num_steps <= WHOLE_GRID_STEPS:
        return set(range(num_steps))
    around = {step for cut in phases.cuts[1:-1] for step in (cut - 1, cut, cut + 1)}
    grid = {step for step in (*around, num_steps - 1) if step < num_steps}
    if schedule is not None:
        running = running_bytes(schedule, simulate(problem, schedule))
        events = zip(recompute_events(schedule), running, strict=True)
        full = worst_apart(events, int(NEAR_LIMIT * limit_bytes), num_steps)
        grid.update(t for t, _ in full[:MOST_FULL_STEPS])
    return grid


def worst_apart(events: Iterable[tuple[Event, int]], limit_bytes: int, num_steps: int) -> list[Event]:
    """The worst events above a limit, the worst ones first, each further than EVENTS_APART from all before it."""
    over = sorted(((num_bytes, event) for event, num_bytes in events if num_bytes > limit_bytes), key=_worst_first)
    worst: list[Event] = []
    for _, event in over:
        if all(abs(event[0] - other[0]) > EVENTS_APART * num_steps for other in worst):
            worst.append(event)
    return worst


def _worst_first(over: tuple[int, Event]) -> tuple[int, Event]:
    return -over[0], over[1]


def cost_unit_s(problem: Problem) -> float:
    """Seconds per unit of the objective."""
    return (problem.runtime_s or 1.0) / COST_SCALE


def tie_break_s(problem: Problem) -> float:
    """The most seconds that all ties together may add to an objective."""
    return TIE_SCALE * cost_unit_s(problem)


def objective_costs(model: Retention) -> dict[int, float]:
    """sum of (c_o + tie) X[o,p], in units of `cost_unit_s`."""
    unit_s = cost_unit_s(model.problem)
    tie = TIE_SCALE / max(len(model.Y), 1)
    return {ramp.final: model.problem.ops[o].recompute_s / unit_s + tie for (o, _), ramp in model.Y.items()}
