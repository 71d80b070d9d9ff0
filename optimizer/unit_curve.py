"""What a unit of a larger step can trade: seconds of recomputation for the bytes that it keeps and those it runs with.

In a step of several units, what one keeps from its forward to its backward lives through the forwards and backwards of
others; what it needs beyond that while it runs meets only what others keep. So a unit's schedule has three prices in
bytes, and the budget of a single unit, a bound on the largest of all, does not tell them apart. The solver is asked for
them one by one through a problem with padded workspaces (`_padded`), and what it answers covers a rectangle of
(kept, backward) bytes: no schedule in it takes fewer seconds. Splitting rectangles refines the curve where a step asks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from placemat.baselines import recompute_all, save_all
from placemat.emit import emit
from placemat.graph.allocator import allocated_bytes
from placemat.graph.errors import BudgetTooSmall, SolverFailed
from placemat.known_floors import known_floor
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule
from placemat.simulate import simulate
from placemat.solve import solve
from placemat.stages import Stages

# The family that all schedules and bounds of a curve are of, so that they can be compared (`phases.ladder`).
PHASES = 2
# Sides of a rectangle are not split below this share of the curve's extent.
_FINEST_SHARE = 1 / 256


@dataclass(frozen=True)
class UnitPoint:
    """Prices of one schedule. Bytes of inputs, parameters, outputs and their gradients are the surrounding step's.

    Attributes:
        kept_bytes: held from the end of the forward to the backward.
        forward_bytes: live at most while the forward runs; new outputs are in it.
        backward_bytes: live at most while the backward runs: what was kept, recomputed, and all new gradients.
        recompute_seconds: that the schedule adds.
        schedule: None for a corner of a rectangle, which stands for schedules that may not exist.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    recompute_seconds: float
    schedule: Schedule | None = None


@dataclass(frozen=True)
class Rectangle:
    """Schedules that keep and run with bytes in these ranges (both ends included) take at least so many seconds."""

    least_kept_bytes: int
    most_kept_bytes: int
    least_backward_bytes: int
    most_backward_bytes: int
    least_seconds: float


@dataclass(eq=False)
class UnitCurve:
    """Known points of one kind of unit, and what is proven of the others.

    Args:
        stages: of the unit's call.
        time_limit_s, gap: for each question to the solver.

    Attributes:
        points: none is beaten by another in every price.
        rectangles: cover all schedules of the family that could be better than the points.
    """

    stages: Stages
    time_limit_s: float
    gap: float
    points: list[UnitPoint] = field(default_factory=list)
    rectangles: list[Rectangle] = field(default_factory=list)
    family: str = "P=2 at the border"

    def __post_init__(self) -> None:
        problem = self.stages.problem
        assert problem.border is not None
        self._border = problem.border
        self._least = recompute_all(problem)
        self._io_of_trial = _saved_from_outside(self.stages, self._least)
        everything = self.priced(save_all(problem))
        least = self.priced(self._least)
        floor = known_floor(problem, time_limit_s=self.time_limit_s, progress=lambda line: None)
        for point in (everything, least, self.priced(floor.schedule)):
            self._add(point)
        most_backward = max(point.backward_bytes for point in self.points)
        self.rectangles.append(
            Rectangle(
                min(least.kept_bytes, everything.kept_bytes),
                max(least.kept_bytes, everything.kept_bytes),
                min(self._least_backward_bytes(), *(point.backward_bytes for point in self.points)),
                most_backward,
                everything.recompute_seconds,
            )
        )
        self._extent = self.rectangles[0]

    @property
    def least(self) -> UnitPoint:
        """Nothing kept that can be made again: what a trial step runs, as it needs no solver."""
        return self.priced(self._least)

    @property
    def everything(self) -> UnitPoint:
        return self.priced(save_all(self.stages.problem))

    def corners(self) -> list[tuple[Rectangle, UnitPoint]]:
        """Each rectangle with a point that is no worse than any schedule in it."""
        outputs = self._outputs_bytes()
        return [
            (
                r,
                UnitPoint(
                    r.least_kept_bytes, r.least_kept_bytes + outputs, r.least_backward_bytes, r.least_seconds, None
                ),
            )
            for r in self.rectangles
        ]

    def priced(self, schedule: Schedule) -> UnitPoint:
        """Prices of a schedule, by the referee's replay."""
        problem = self._inner_problem()
        simulation = simulate(problem, schedule)
        position = schedule.steps.index(Compute(self._border))
        timeline = simulation.timeline
        outputs = self._outputs_bytes()
        border = problem.ops[self._border]
        new = sum(problem.values[v].bytes for v in border.outputs)
        kept = timeline[position] - border.workspace_bytes - new - outputs
        saved = _saved_from_outside(self.stages, schedule)
        extra = sum(num_bytes for name, num_bytes in saved.items() if name not in self._io_of_trial)
        return UnitPoint(
            kept_bytes=kept + extra,
            forward_bytes=max(timeline[:position], default=0),
            backward_bytes=max((b - outputs for b in timeline[position + 1 :]), default=0) + extra,
            recompute_seconds=simulation.recompute_seconds,
            schedule=schedule,
        )

    def split(self, rectangle: Rectangle, num_holding: int, deadline: float) -> bool:
        """Split a rectangle along the side that matters more to a step in which `num_holding` units keep as much.

        Returns:
            False if it is too small to be split.
        """
        cheapest = [p for p in self.points if _is_within(p.recompute_seconds, rectangle.least_seconds, self.gap)]
        kept = _cut(
            (rectangle.least_kept_bytes, rectangle.most_kept_bytes),
            [p.kept_bytes for p in cheapest if p.backward_bytes <= rectangle.most_backward_bytes],
            self._extent.most_kept_bytes - self._extent.least_kept_bytes,
        )
        backward = _cut(
            (rectangle.least_backward_bytes, rectangle.most_backward_bytes),
            [p.backward_bytes for p in cheapest if p.kept_bytes <= rectangle.most_kept_bytes],
            self._extent.most_backward_bytes - self._extent.least_backward_bytes,
        )
        if kept is None and backward is None:
            return False
        self.rectangles.remove(rectangle)
        kept_range = rectangle.most_kept_bytes - rectangle.least_kept_bytes
        backward_range = rectangle.most_backward_bytes - rectangle.least_backward_bytes
        if kept is not None and (backward is None or num_holding * kept_range >= backward_range):
            lower, upper = replace(rectangle, most_kept_bytes=kept), replace(rectangle, least_kept_bytes=kept + 1)
        else:
            assert backward is not None
            lower = replace(rectangle, most_backward_bytes=backward)
            upper = replace(rectangle, least_backward_bytes=backward + 1)
        self.rectangles.append(upper)
        seconds = self._ask(lower, deadline)
        if seconds is not None:
            self.rectangles.append(replace(lower, least_seconds=max(lower.least_seconds, seconds)))
        return True

    def least_seconds_of(self, point: UnitPoint) -> float:
        """No schedule of the family with no more bytes of either kind takes fewer."""
        around = [
            r.least_seconds
            for r in self.rectangles
            if r.least_kept_bytes <= point.kept_bytes and r.least_backward_bytes <= point.backward_bytes
        ]
        return min([*around, point.recompute_seconds])

    def _ask(self, rectangle: Rectangle, deadline: float) -> float | None:
        """Seconds that no schedule in a rectangle beats, and a point of it if there is one; None if it is empty."""
        problem, limit_bytes = self._padded(rectangle.most_kept_bytes, rectangle.most_backward_bytes)
        fitting = [
            p for p in self.points if p.schedule is not None and simulate(problem, p.schedule).peak_bytes <= limit_bytes
        ]
        start = min(fitting, key=lambda p: p.recompute_seconds).schedule if fitting else None
        limit_s = min(self.time_limit_s, deadline - time.monotonic())
        if limit_s <= 0:
            return rectangle.least_seconds
        try:
            result = solve(problem, limit_bytes, time_limit_s=limit_s, gap=self.gap, phases=PHASES, warm_start=start)
        except BudgetTooSmall:
            return None
        except SolverFailed:  # none was found in time: nothing is known
            return rectangle.least_seconds
        self.family = result.family
        self._add(self.priced(result.schedule))
        return result.lower_bound_seconds

    def _add(self, point: UnitPoint) -> None:
        if any(_beats(other, point) for other in self.points):
            return
        self.points = [other for other in self.points if not _beats(point, other)] + [point]

    def _inner_problem(self) -> Problem:
        """The unit's problem without what the surrounding step holds: static bytes, gradients of outputs."""
        problem, graph = self.stages.problem, self.stages.lowering.graph
        values = tuple(
            replace(v, bytes=0) if graph.values[i].role == "tangent" else v for i, v in enumerate(problem.values)
        )
        return replace(problem, values=values, static_bytes=0)

    def _padded(self, kept_bytes: int, backward_bytes: int) -> tuple[Problem, int]:
        """A problem and a budget that its schedules fit if and only if they keep, and run backward with, so many bytes.

        The budget is large enough for any forward; the border's workspace leaves room for `kept_bytes`, and that of
        every op of the backward, and of every recomputation, for `backward_bytes`.
        """
        problem = self._inner_problem()
        outputs = self._outputs_bytes()
        most_workspace = max((op.workspace_bytes for op in problem.ops), default=0)
        limit = 2 * sum(v.bytes for v in problem.values) + most_workspace + kept_bytes + backward_bytes
        pad = limit - outputs - backward_bytes
        ops = []
        for index, op in enumerate(problem.ops):
            if index == self._border:
                new = sum(problem.values[v].bytes for v in op.outputs)
                op = replace(op, workspace_bytes=limit - outputs - new - kept_bytes)
            elif index > self._border:
                op = replace(op, workspace_bytes=op.workspace_bytes + pad)
            op = replace(op, recompute_workspace_bytes=op.recompute_workspace_bytes + pad)
            ops.append(op)
        return replace(problem, ops=tuple(ops)), limit

    def _outputs_bytes(self) -> int:
        """What the forward makes and somebody outside holds from then on."""
        problem = self.stages.problem
        return sum(v.bytes for v in problem.values if v.pinned and v.producer < self._border)

    def _least_backward_bytes(self) -> int:
        """No schedule runs backward with less: some op needs its operands, its results and its workspace."""
        problem = self._inner_problem()
        pinned = {i for i, v in enumerate(problem.values) if v.pinned and v.producer < self._border}
        needs = (
            sum(problem.values[v].bytes for v in {*op.inputs, *op.outputs} - pinned) + op.workspace_bytes
            for op in problem.ops[self._border + 1 :]
        )
        return max(needs, default=0)


def _is_within(seconds: float, least_seconds: float, gap: float) -> bool:
    return seconds - least_seconds <= gap * seconds


def _cut(sides: tuple[int, int], reached: Sequence[int], extent: int) -> int | None:
    """Where to cut a range of bytes in two, as the last number of its lower part; None if it is too small for that.

    `reached` are bytes at which the range's least seconds are had. Cut right below one, the upper part needs no further
    look, as that is its best; where there is none, the middle it is.
    """
    low, high = sides
    exact = [num_bytes - 1 for num_bytes in reached if low < num_bytes <= high]
    middle = [low + (high - low) // 2] if high - low > max(1, _FINEST_SHARE * extent) else []
    return min([*exact, *middle], default=None)


def _beats(point: UnitPoint, other: UnitPoint) -> bool:
    """Whether a point is no worse in any price."""
    return (
        point.kept_bytes <= other.kept_bytes
        and point.forward_bytes <= other.forward_bytes
        and point.backward_bytes <= other.backward_bytes
        and point.recompute_seconds <= other.recompute_seconds
    )


def _saved_from_outside(stages: Stages, schedule: Schedule) -> Mapping[str, int]:
    """Inputs (parameters left out) and outputs that the schedule saves for backward, with their bytes.

    Whoever is around the unit may drop them before its backward; saved, they stay.
    """
    lowering = stages.lowering
    step = emit(lowering, schedule)
    (output,) = step.forward.graph.find_nodes(op="output")
    names = {node.name for node in output.args[0][len(output.args[0]) - step.num_saved :]}
    saved: dict[str, int] = {}
    for node, known in zip(lowering.joint.primals, lowering.joint.inputs, strict=True):
        if node.name in names and not known.is_parameter and (value := node.meta.get("val")) is not None:
            saved[node.name] = allocated_bytes(value.untyped_storage().nbytes(), lowering.graph.device)
    for node, v in lowering.value_of_node.items():
        value = lowering.graph.values[v]
        if value.pinned and value.producer < lowering.graph.border and node.name in names:
            saved[f"value {v}"] = value.bytes
    return saved
