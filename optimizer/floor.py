"""The floor: the smallest peak that any schedule of a family reaches, to the byte where it is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from placemat.decode import decode
from placemat.graph.errors import BudgetTooSmall
from placemat.phases import Phases, PhasesArgument, make_phases
from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.refinement import Refinement, refine_for_peak
from placemat.schedule import Compute, Schedule
from placemat.simulate import Simulation, simulate
from placemat.starts import starting_schedules
from placemat.windows import choose_wants


@dataclass(frozen=True)
class Floor:
    """The smallest peak found and what is known about smaller ones.

    Attributes:
        minimum_bytes: simulated peak of `schedule`.
        schedule: reaches it.
        lower_bound_bytes: no schedule of the family needs less.
        proven: `minimum_bytes` is the least of the family, to the byte.
        family: which schedules were searched, in words.
        binding_op: name of the op at whose run the peak is reached.
        breakdown: bytes at that run: "static", "resident", "outputs", "workspace".
        seconds: wall-clock time of the search.
    """

    minimum_bytes: int
    schedule: Schedule
    lower_bound_bytes: int
    proven: bool
    family: str
    binding_op: str
    breakdown: dict[str, int]
    seconds: float


def minimum_budget(
    problem: Problem,
    *,
    time_limit_s: float = 20.0,
    phases: PhasesArgument = None,
    warm_start: Schedule | None = None,
    progress: Callable[[str], None] | None = None,
) -> Floor:
    """The least peak of the family that `phases` cuts (`make_phases`), found by the retention MILP with M as objective.

    Args:
        problem: what to schedule.
        time_limit_s: wall-clock seconds; at least one plan is always returned.
        phases: see `make_phases`.
        warm_start: a schedule to start from.
        progress: takes one line of text per stage.

    Raises:
        InvalidSchedule: `warm_start` is not a schedule of the problem.
        SolverFailed: HiGHS cannot be run.
    """
    started = time.monotonic()
    family = make_phases(problem, phases)
    starts = starting_schedules(problem, family) + ([] if warm_start is None else [warm_start])
    best = min(starts, key=lambda schedule: simulate(problem, schedule).peak_bytes)
    search = _FloorSearch(problem, family, best, static_lower_bound(problem), progress)
    search.run(started + time_limit_s)
    schedule = drop_needless(problem, search.best, search.best_bytes)
    simulation = simulate(problem, schedule)
    binding_op, breakdown = binding_step(problem, schedule, simulation)
    return Floor(
        minimum_bytes=simulation.peak_bytes,
        schedule=schedule,
        lower_bound_bytes=min(search.lower_bytes, simulation.peak_bytes),
        proven=search.lower_bytes >= simulation.peak_bytes,
        family=family.family,
        binding_op=binding_op,
        breakdown=breakdown,
        seconds=time.monotonic() - started,
    )


def static_lower_bound(problem: Problem) -> int:
    """No schedule needs less: at each first run its inputs, its outputs, its workspace, every pinned value produced
    before it, and every value that is still to be read but cannot be recomputed."""
    last_use = [-1] * len(problem.values)
    for step, op in enumerate(problem.ops):
        for v in op.inputs:
            last_use[v] = step
    frees: list[list[int]] = [[] for _ in problem.ops]
    stuck = bound = problem.static_bytes
    for step, op in enumerate(problem.ops):
        droppable = [v for v in op.inputs if not _is_stuck(problem, v)]
        own = op.workspace_bytes + sum(problem.values[v].bytes for v in (*droppable, *op.outputs))
        bound = max(bound, stuck + own)
        for v in op.outputs:
            if problem.values[v].pinned or (not op.recomputable and last_use[v] > step):
                stuck += problem.values[v].bytes
            if not problem.values[v].pinned and not op.recomputable and last_use[v] > step:
                frees[last_use[v]].append(v)
        stuck -= sum(problem.values[v].bytes for v in frees[step])
    return bound


def _is_stuck(problem: Problem, v: int) -> bool:
    return problem.values[v].pinned or not problem.ops[problem.values[v].producer].recomputable


def binding_step(problem: Problem, schedule: Schedule, simulation: Simulation) -> tuple[str, dict[str, int]]:
    """Name of the op at the peak, and the bytes there by kind."""
    step = schedule.steps[simulation.peak_step]
    assert isinstance(step, Compute)
    op = problem.ops[step.op]
    breakdown = {
        "static": problem.static_bytes,
        "resident": sum(problem.values[v].bytes for v in simulation.resident_at_peak),
        "outputs": sum(problem.values[v].bytes for v in op.outputs),
    }
    breakdown["workspace"] = simulation.peak_bytes - sum(breakdown.values())
    return op.name, breakdown


def budget_too_small(problem: Problem, budget_bytes: int, floor: Floor) -> BudgetTooSmall:
    """The error for a budget below the floor; `source` is for the caller to add."""
    amounts = ", ".join(f"{kind} {num_bytes:,}" for kind, num_bytes in floor.breakdown.items())
    known = (
        "the least of this family"
        if floor.proven
        else f"the least found in {floor.seconds:.0f} s; no plan of this family needs less than {floor.lower_bound_bytes:,}"
    )
    return BudgetTooSmall(
        f"budget {budget_bytes:,} bytes is below the {floor.minimum_bytes:,} bytes that op `{floor.binding_op}` needs "
        f"({amounts}), {known} ({floor.family}); raise the budget to at least {floor.minimum_bytes:,}, use a smaller "
        "batch, or allow more phases",
        minimum_budget_bytes=floor.minimum_bytes,
        budget_bytes=budget_bytes,
        breakdown=floor.breakdown,
        binding_op=floor.binding_op,
        source=None,
    )


@dataclass
class _FloorSearch:
    """Lower the best peak until a plan one byte below it is proven impossible."""

    problem: Problem
    family: Phases
    best: Schedule
    lower_bytes: int
    progress: Callable[[str], None] | None

    def __post_init__(self) -> None:
        self.best_bytes = simulate(self.problem, self.best).peak_bytes

    def run(self, deadline: float) -> None:
        if self.best_bytes <= self.lower_bytes:
            return
        wants, window = choose_wants(self.problem, self.family)
        model = refine_for_peak(self.problem, self.family, wants, self.lower_bytes, self.best_bytes - 1)
        while time.monotonic() < deadline and self.best_bytes > self.lower_bytes:
            if not self._step(model, deadline, is_whole=window is None):
                return

    def _step(self, model: Refinement, deadline: float, *, is_whole: bool) -> bool:
        """One solve for a peak of at most best - 1; False when there is nothing more to find."""
        peak_column, unit_bytes = model.memory.peak_column, model.memory.unit_bytes
        assert peak_column is not None
        limit_bytes = self.best_bytes - 1
        model.model.linear.column_upper[peak_column] = limit_bytes / unit_bytes
        answer = model.model.linear.minimize(model.costs, time_limit_s=deadline - time.monotonic(), gap=0.0)
        if is_whole:
            self._raise_bound(answer.bound * unit_bytes)
        if answer.values is None:
            return False
        schedule = decode(model.model, answer.values)
        simulation = simulate(self.problem, schedule)
        is_better = simulation.peak_bytes < self.best_bytes
        if is_better:
            self.best, self.best_bytes = schedule, simulation.peak_bytes
            self._tell(f"floor: {self.best_bytes:,} bytes, at least {self.lower_bytes:,}")
        claimed_bytes = answer.values[peak_column] * unit_bytes
        if not is_better or simulation.peak_bytes > claimed_bytes * (1 + 1e-6):
            model.tighten(schedule, simulation, answer.values, self.best_bytes - 1)
        return True

    def _raise_bound(self, bound_bytes: float) -> None:
        """Peaks are whole bytes; a millionth is left to the solver's tolerances."""
        if math.isinf(bound_bytes) and bound_bytes > 0:
            self.lower_bytes = self.best_bytes  # best - 1 is impossible
        elif math.isfinite(bound_bytes):
            self.lower_bytes = max(self.lower_bytes, math.ceil(bound_bytes - max(1e-6 * bound_bytes, 1e-3)))

    def _tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

