"""The floor: the smallest peak that any schedule of a family reaches, to the byte where it is proven."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from placemat.contraction import Contraction, contract
from placemat.decode import decode
from placemat.graph.errors import BudgetTooSmall
from placemat.greedy import lowest_peak
from placemat.phases import Phases, PhasesArgument, ladder
from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.refinement import Refinement, first_grid
from placemat.replay import default_cut
from placemat.schedule import Compute, Schedule
from placemat.simulate import Simulation, simulate
from placemat.starts import free_starts, starting_schedules

# A first goal is twice this share of the best peak below it; where less than this is left open, the goal is one byte.
FINEST_SHARE = 1e-3
# Part of the remaining time that one goal may take.
SHARE_OF_TIME = 0.3
# Part of the time limit that each wider family gets, once the floor of the one before is proven.
CLIMBING_SHARE = 0.05
# Part of a planning time limit that goes into the floor: it is context for most budgets, and the plan itself for few.
FLOOR_SHARE = 0.2


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
        interrupted: Ctrl-C ended the search.
    """

    minimum_bytes: int
    schedule: Schedule
    lower_bound_bytes: int
    proven: bool
    family: str
    binding_op: str
    breakdown: dict[str, int]
    seconds: float
    interrupted: bool = False


def minimum_budget(
    problem: Problem,
    *,
    time_limit_s: float = 20.0,
    phases: PhasesArgument = None,
    warm_start: Schedule | None = None,
    progress: Callable[[str], None] | None = None,
) -> Floor:
    """The least peak of the families that `phases` names (`ladder`), found by the retention MILP at falling budgets.

    Args:
        problem: what to schedule.
        time_limit_s: wall-clock seconds; at least one plan is always returned, as it is on Ctrl-C.
        phases: see `ladder`.
        warm_start: a schedule to start from.
        progress: takes one line of text per stage.

    Raises:
        InvalidSchedule: `warm_start` is not a schedule of the problem.
        SolverFailed: HiGHS cannot be run.
    """
    started = time.monotonic()
    families = ladder(problem, phases)
    starts = [*starting_schedules(problem, families[0], 0)]
    starts += free_starts(problem, static_lower_bound(problem), phases, warm_start)
    if default_cut(problem) in families[0].cuts[1:-1]:
        starts.append(lowest_peak(problem))
    best = min(starts, key=lambda schedule: simulate(problem, schedule).peak_bytes)
    interrupted = False
    deadline = started + time_limit_s
    for family in families:
        contraction = contract(problem, family, is_tight=True)
        search = _FloorSearch(problem, family, contraction, best, static_lower_bound(problem), progress)
        try:
            search.run(deadline)
        except KeyboardInterrupt:
            interrupted = True
        best = search.best
        if interrupted or search.lower_bytes < search.best_bytes or search.best_bytes == static_lower_bound(problem):
            break
        deadline = time.monotonic() + CLIMBING_SHARE * time_limit_s
    schedule = drop_needless(problem, search.best, search.best_bytes)
    simulation = simulate(problem, schedule)
    binding_op, breakdown = binding_step(problem, schedule, simulation)
    return Floor(
        minimum_bytes=simulation.peak_bytes,
        schedule=schedule,
        lower_bound_bytes=min(search.lower_bytes, simulation.peak_bytes),
        proven=search.lower_bytes >= simulation.peak_bytes,
        family=contraction.family(family),
        binding_op=binding_op,
        breakdown=breakdown,
        seconds=time.monotonic() - started,
        interrupted=interrupted,
    )


def lowered(floor: Floor, problem: Problem, schedule: Schedule) -> Floor:
    """The floor after a lower schedule turned up elsewhere, which may be of a wider family than the proof."""
    simulation = simulate(problem, schedule)
    binding_op, breakdown = binding_step(problem, schedule, simulation)
    return replace(
        floor,
        minimum_bytes=simulation.peak_bytes,
        schedule=schedule,
        lower_bound_bytes=min(floor.lower_bound_bytes, simulation.peak_bytes),
        proven=False,
        binding_op=binding_op,
        breakdown=breakdown,
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
        else f"the least found in {floor.seconds:.0f} s; none can be below {floor.lower_bound_bytes:,}"
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
    """Lower the best peak, and raise what is impossible, by asking the retention MILP for any plan within a goal.

    The model with the peak as its objective would say the same, but its relaxation spreads over all steps and HiGHS
    finds few plans with it; with recompute seconds as objective a first plan, or a proof that there is none, took a
    second or two on a 12-layer transformer.
    """

    problem: Problem
    family: Phases
    contraction: Contraction
    best: Schedule
    lower_bytes: int
    progress: Callable[[str], None] | None

    def __post_init__(self) -> None:
        self.best_bytes = simulate(self.problem, self.best).peak_bytes

    def run(self, deadline: float) -> None:
        """Ask for a little less, for twice as much after a success; after a proof halve the stretch that is left."""
        grid = first_grid(self.problem, self.family, self.best, self.best_bytes)
        refinement = Refinement(self.contraction.problem, self.family, self.best_bytes - 1, grid)
        finest_bytes = max(1, int(FINEST_SHARE * self.best_bytes))
        step_bytes = 2 * finest_bytes
        while self.best_bytes > self.lower_bytes and time.monotonic() < deadline:
            is_last = step_bytes < finest_bytes
            step_bytes = 1 if is_last else min(step_bytes, self.best_bytes - self.lower_bytes)
            best_bytes, refinement.limit_bytes = self.best_bytes, self.best_bytes - step_bytes
            share = 1.0 if is_last else SHARE_OF_TIME
            is_settled = self._try(refinement, time.monotonic() + share * (deadline - time.monotonic()))
            if self.best_bytes < best_bytes:
                step_bytes *= 2
            elif is_settled:
                step_bytes = max(1, (self.best_bytes - self.lower_bytes) // 2)
            elif is_last:
                return
            else:
                step_bytes //= 4

    def _try(self, refinement: Refinement, deadline: float) -> bool:
        """Find a plan within the refinement's limit, or that there is none; False if the time is over before that."""
        while time.monotonic() < deadline:
            built = refinement.build()
            answer = built.start(time_limit_s=deadline - time.monotonic(), gap=1.0)()
            if answer.status == "infeasible":
                self.lower_bytes = refinement.limit_bytes + 1
                self._tell()
                return True
            if answer.values is None:
                return False
            schedule = decode(built.model, answer.values)
            simulation = simulate(self.contraction.problem, schedule)
            if self._offer(self.contraction.expand(schedule)) <= refinement.limit_bytes:
                return True
            refinement.tighten(built, schedule, simulation, answer.values)
        return False

    def _offer(self, schedule: Schedule) -> int:
        """Take it if it is lower than the best; its peak."""
        peak_bytes = simulate(self.problem, schedule).peak_bytes
        if peak_bytes < self.best_bytes:
            self.best, self.best_bytes = schedule, peak_bytes
            self._tell()
        return peak_bytes

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(f"floor: between {self.lower_bytes:,} and {self.best_bytes:,} bytes")
