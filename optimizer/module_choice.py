"""Which modules to wrap: a small integer program with one binary per region, exact for the referee's peak.

Memory at a moment is linear in the choice, but for storages that several things may hold: each such set of holders has
a column that is 1 if one of them does. Rows come in lazily: a choice is replayed (`wrapped_step`, `simulate`), and what
it breaks becomes a row, until nothing is broken. Every program on the way has fewer rows than the whole one, so its
bound holds, and the first choice that fits is the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from placemat.eager_step import EagerStep
from placemat.graph.errors import ConstraintError, SolverFailed
from placemat.linear_model import LinearModel
from placemat.module_regions import Region
from placemat.schedule import Compute
from placemat.simulate import Simulation, simulate
from placemat.wrapped_step import WrappedStep

_ROWS_AT_ONCE = 8
# A moment of the step: a position, or (-1 - number) for the recomputation of a region.
Moment = int


@dataclass(frozen=True)
class Choice:
    """Regions to wrap, and what is proven.

    Attributes:
        regions: none is inside another.
        peak_bytes: the referee's.
        seconds: of recomputation.
        bound: no choice has less of what was minimised (seconds, or bytes).
    """

    regions: tuple[Region, ...]
    peak_bytes: int
    seconds: float
    bound: float


@dataclass
class ModuleChoice:
    """The integer program; `cheapest` and `smallest` are its two questions.

    Args:
        step: as eager runs it.
        regions: which of its modules may be wrapped.
        deadline: of `time.monotonic()`.
    """

    step: EagerStep
    regions: Sequence[Region]
    deadline: float
    _moments: dict[Moment, None] = field(default_factory=dict)

    def cheapest(self, budget_bytes: int, gap: float) -> Choice | None:
        """Least seconds within the budget; None if no choice fits.

        Raises:
            SolverFailed: time is up.
            ConstraintError: what `recompute=` asked for cannot be had by wrapping modules.
        """
        goal_bytes = budget_bytes
        while True:
            program = _Program(self.step, self.regions)
            self._add_rows(program, goal_bytes, None)
            costs = {program.columns[i]: region.seconds for i, region in enumerate(self.regions)}
            answer = program.solve(costs, self.deadline, gap)
            if answer is None:
                return None
            chosen, bound = answer
            wrapped, simulation = self.replay(chosen)
            if simulation.peak_bytes <= budget_bytes:
                return self._choice(chosen, simulation, bound)
            if not self._learn(wrapped, simulation, budget_bytes):  # by less than the solver's tolerance
                goal_bytes -= simulation.peak_bytes - budget_bytes

    def smallest(self) -> Choice:
        """Least peak; errors as for `cheapest`."""
        _, everything_kept = self.replay(())
        scale_bytes = everything_kept.peak_bytes
        best: tuple[Simulation, tuple[int, ...]] | None = None
        while True:
            program = _Program(self.step, self.regions)
            peak = program.model.add_column("peak", upper=2.0)
            self._add_rows(program, scale_bytes, peak)
            answer = program.solve({peak: 1.0}, self.deadline, 1e-6)
            assert answer is not None, "any choice has some peak"
            chosen, bound = answer
            wrapped, simulation = self.replay(chosen)
            if best is None or simulation.peak_bytes < best[0].peak_bytes:
                best = simulation, chosen
            proven_bytes = bound * scale_bytes * (1 + 1e-6) + 1
            if best[0].peak_bytes <= proven_bytes or not self._learn(wrapped, simulation, int(proven_bytes)):
                return self._choice(best[1], best[0], bound * scale_bytes)

    def replay(self, chosen: Iterable[int]) -> tuple[WrappedStep, Simulation]:
        """The referee's word on a choice."""
        wrapped = WrappedStep(self.step, [self.regions[i] for i in chosen])
        return wrapped, simulate(wrapped.problem, wrapped.schedule)

    def _choice(self, chosen: tuple[int, ...], simulation: Simulation, bound: float) -> Choice:
        regions = tuple(self.regions[i] for i in chosen)
        return Choice(regions, simulation.peak_bytes, math.fsum(r.seconds for r in regions), bound)

    def _add_rows(self, program: _Program, goal_bytes: int, peak: int | None) -> None:
        for moment in self._moments:
            program.add_memory_row(moment, goal_bytes, peak)

    def _learn(self, wrapped: WrappedStep, simulation: Simulation, limit_bytes: int) -> bool:
        """Add the worst moments above a limit; False if all of them have been there."""
        number_of = {region.path: i for i, region in enumerate(self.regions)}
        worst: dict[Moment, int] = {}
        for step, num_bytes in zip(wrapped.schedule.steps, simulation.timeline, strict=True):
            if isinstance(step, Compute) and num_bytes > limit_bytes:
                again = wrapped.again[step.op]
                moment = wrapped.source[step.op] if again is None else -1 - number_of[wrapped.regions[again].path]
                worst[moment] = max(worst.get(moment, 0), num_bytes)
        new = sorted((m for m in worst if m not in self._moments), key=lambda m: (-worst[m], m))
        self._moments.update((m, None) for m in new[:_ROWS_AT_ONCE])
        return bool(new)


class _Program:
    """Columns for regions and sets of holders, rows for moments."""

    def __init__(self, step: EagerStep, regions: Sequence[Region]) -> None:
        self.step, self.regions = step, regions
        self.model = LinearModel("modules to wrap")
        self.columns = [self.model.add_column(f"wrap {r.path}", is_integer=True) for r in regions]
        self.givers: dict[int, list[int]] = {}
        for i, region in enumerate(regions):
            for s in region.inputs:
                self.givers.setdefault(s, []).append(i)
        self._alive: dict[tuple[int, frozenset[tuple[int, ...]], frozenset[int]], int] = {}
        self._add_nesting()
        self._add_dropped()

    def covering(self, op: int | None) -> tuple[int, ...]:
        return tuple(i for i, region in enumerate(self.regions) if region.covers(op))

    def _add_nesting(self) -> None:
        for stack in {self.covering(region.first) for region in self.regions}:
            if len(stack) > 1:
                self.model.add_row(f"one of {stack}", [(self.columns[i], 1.0) for i in stack], upper=1.0)

    def _add_dropped(self) -> None:
        """What `recompute=` names is not held over the border."""
        border = self.step.border
        for s in {self.step.storage_of[v] for v in self.step.problem.dropped}:
            name = self.step.problem.values[s].name
            for hold in self.step.holds[s]:
                stack = self.covering(hold.saver)
                if hold.end >= border and not stack:
                    raise ConstraintError(
                        f"the plan has recompute=, and {name} cannot be dropped by wrapping a module: none that could "
                        "be wrapped is around the op that saves it. Remedy: plan() without that entry."
                    )
                if hold.end >= border:
                    self.model.add_row(f"drop {name}", [(self.columns[i], 1.0) for i in stack], lower=1.0)
            for i in self.givers.get(s, ()):
                self.model.add_row(f"drop {name}", [(self.columns[i], 1.0)], upper=0.0)

    def add_memory_row(self, moment: Moment, goal_bytes: int, peak: int | None) -> None:
        """Memory at a moment is at most `goal_bytes`, times the column `peak` if there is one."""
        constant, terms = self._memory(moment)
        scaled = [(column, num_bytes / goal_bytes) for column, num_bytes in terms.items()]
        if peak is None:
            self.model.add_row(f"memory at {moment}", scaled, upper=1.0 - constant / goal_bytes)
        else:
            self.model.add_row(f"memory at {moment}", [*scaled, (peak, -1.0)], upper=-constant / goal_bytes)

    def _memory(self, moment: Moment) -> tuple[int, dict[int, float]]:
        """Bytes in any case, and per column."""
        step = self.step
        own = self.regions[-1 - moment] if moment < 0 else None
        position = moment if own is None else own.trigger
        constant = step.static_bytes
        terms: dict[int, float] = {}
        for s, num_bytes in enumerate(step.num_bytes):
            if not num_bytes or step.birth(s) > position or (own is not None and step.birth(s) == position):
                continue
            column = self._alive_column(s, position)
            if column == _ALWAYS or step.birth(s) == position:
                constant += num_bytes
            elif column is not None:
                terms[column] = terms.get(column, 0.0) + num_bytes
        if own is None:
            constant += step.workspace_bytes(position)
        for i, region in enumerate(self.regions):
            held = region.state_bytes if region.first <= position <= region.release else 0
            if region is own:
                held += region.local_peak_bytes
            elif region.trigger < position or (region.trigger == position and own is None):
                held += sum(step.num_bytes[s] for s, end in region.copies.items() if end >= position)
            if held:
                terms[self.columns[i]] = terms.get(self.columns[i], 0.0) + held
        return constant, terms

    def _alive_column(self, s: int, position: int) -> int | None:
        """Column that is 1 if something holds a storage at a position; _ALWAYS if something does in any case."""
        savers: set[tuple[int, ...]] = set()
        for hold in self.step.holds[s]:
            if hold.end >= position:
                if not (stack := self.covering(hold.saver)):
                    return _ALWAYS
                savers.add(stack)
        givers = {i for i in self.givers.get(s, ()) if self.regions[i].release >= position}
        if not savers and not givers:
            return None
        key = s, frozenset(savers), frozenset(givers)
        if key not in self._alive:
            column = self._alive[key] = self.model.add_column(f"alive {s} {len(self._alive)}")
            for stack in sorted(savers):
                self.model.add_row("saved", [(column, 1.0), *((self.columns[i], 1.0) for i in stack)], lower=1.0)
            for i in sorted(givers):
                self.model.add_row("given", [(column, 1.0), (self.columns[i], -1.0)], lower=0.0)
        return self._alive[key]

    def solve(self, costs: dict[int, float], deadline: float, gap: float) -> tuple[tuple[int, ...], float] | None:
        """Chosen regions and the bound; None if there is no solution."""
        time_limit_s = deadline - time.monotonic()
        if time_limit_s > 0:
            scale = max(costs.values(), default=0.0) or 1.0
            scaled = {column: cost / scale for column, cost in costs.items()}
            answer = self.model.start(scaled, time_limit_s=time_limit_s, gap=gap)()
            if answer.status == "infeasible":
                return None
            if answer.status == "optimal" and answer.values is not None:
                chosen = (i for i, column in enumerate(self.columns) if answer.values[column] > 0.5)
                return tuple(chosen), answer.bound * scale
        raise SolverFailed(
            f"no set of modules was proven best in the time limit, with {len(self.regions)} modules to choose from. "
            "Remedy: a larger time_limit_s."
        )


_ALWAYS = -1
