"""Which schedule each unit of a step runs: a small integer program over points of the units' curves.

Columns say which point a unit takes, rows bound the memory of every moment: what is there beside the units, what those
hold that wait for their backward, and what the one that runs needs. The same program over the corners of the curves'
rectangles (`unit_curve`) has no more bytes and no more seconds than any choice of schedules, so its answer is a bound;
the rectangles that it takes are the ones to split. Both meet where the bound is reached by schedules that exist.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from placemat.graph.errors import SolverFailed
from placemat.linear_model import LinearModel
from placemat.unit_curve import Rectangle, UnitCurve, UnitPoint

# Part of the remaining time that one integer program may take.
_SHARE_OF_TIME = 0.25


@dataclass(frozen=True)
class Moment:
    """Memory at one part of the step.

    Attributes:
        place: in words.
        outside_bytes: what is there whatever the units' schedules are.
        holding: numbers of the calls whose forward is over and whose backward is not, but for the one that runs.
        running: the call that runs, and which part of it; None outside of the units.
    """

    place: str
    outside_bytes: int
    holding: tuple[int, ...]
    running: tuple[int, Literal["forward", "backward"]] | None = None


@dataclass(frozen=True)
class UnitStep:
    """A whole step as seen from its units.

    Attributes:
        unit_of_call: which unit each call is of; a unit has one schedule, whatever the number of its calls.
        curve_of_unit: which curve each unit has; equal units share one.
        moments: of the step.
    """

    unit_of_call: tuple[int, ...]
    curve_of_unit: tuple[int, ...]
    moments: tuple[Moment, ...]

    def peak(self, taken: Sequence[UnitPoint]) -> tuple[int, Moment]:
        """Highest bytes of a step with a point for each unit, and where."""
        needs = [(self._bytes_at(moment, taken), -i) for i, moment in enumerate(self.moments)]
        most, number = max(needs)
        return most, self.moments[-number]

    def seconds(self, taken: Sequence[UnitPoint]) -> float:
        return sum(taken[unit].recompute_seconds for unit in self.unit_of_call)

    def _bytes_at(self, moment: Moment, taken: Sequence[UnitPoint]) -> int:
        held = sum(taken[self.unit_of_call[call]].kept_bytes for call in moment.holding)
        return moment.outside_bytes + held + self._running_bytes(moment, taken)

    def _running_bytes(self, moment: Moment, taken: Sequence[UnitPoint]) -> int:
        if moment.running is None:
            return 0
        call, part = moment.running
        point = taken[self.unit_of_call[call]]
        return point.forward_bytes if part == "forward" else point.backward_bytes


@dataclass(frozen=True)
class UnitChoice:
    """A point for each unit, and what is proven.

    Attributes:
        points: by unit.
        peak_bytes, peak_place: of the step.
        recompute_seconds, lower_bound_seconds: of all calls; no choice of schedules of the family takes fewer.
        solve_seconds: wall-clock time of the search.
        is_optimal: the gap that was asked for is reached.
    """

    points: tuple[UnitPoint, ...]
    peak_bytes: int
    peak_place: str
    recompute_seconds: float
    lower_bound_seconds: float
    solve_seconds: float
    is_optimal: bool


@dataclass
class UnitSearch:
    """The search for the best choice; `best` is its question.

    Args:
        step: the step.
        curves: of its units; they are refined.
        time_limit_s, gap: when to stop.
        progress: takes one line of text per round.
    """

    step: UnitStep
    curves: Sequence[UnitCurve]
    time_limit_s: float
    gap: float
    progress: Callable[[str], None]

    def best(self, budget_bytes: int) -> UnitChoice | None:
        """The cheapest choice that fits the budget; None if none was found.

        Raises:
            SolverFailed: HiGHS cannot be run.
        """
        started = time.monotonic()
        deadline = started + self.time_limit_s
        lower = 0.0
        found: tuple[UnitPoint, ...] | None = None
        is_optimal, told = False, ""
        while True:
            corners = [curve.corners() for curve in self.curves]
            answer = self._solve([[corner for _, corner in pairs] for pairs in corners], budget_bytes, deadline)
            if answer is None:
                break
            taken, bound = answer
            lower = max(lower, bound)
            if (better := self._real(budget_bytes, deadline)) is not None:
                found = better
            seconds = None if found is None else self.step.seconds(found)
            if seconds is not None and seconds - lower <= self.gap * seconds:
                is_optimal = True
                break
            line = f"units: {'no choice yet' if seconds is None else f'{seconds:.4g} s'}, at least {lower:.4g} s"
            if line != told:
                self.progress(line)
                told = line
            if time.monotonic() >= deadline or not self._split(corners, taken, deadline):
                break
        if found is None:
            return None
        peak_bytes, moment = self.step.peak(found)
        seconds = self.step.seconds(found)
        return UnitChoice(
            found, peak_bytes, moment.place, seconds, min(lower, seconds), time.monotonic() - started, is_optimal
        )

    def smallest(self) -> tuple[int, Moment]:
        """Least peak that points known by now reach, and where."""
        options = [curve.points for curve in self.curves]
        largest = max(self.step.peak([max(options[c], key=_size) for c in self.step.curve_of_unit])[0], 1)
        program = _Program(self.step, options, largest, is_peak_free=True)
        answer = program.solve(time.monotonic() + self.time_limit_s, 1e-6)
        assert answer is not None, "some peak is reached by any choice"
        return self.step.peak(answer[0])

    def _real(self, budget_bytes: int, deadline: float) -> tuple[UnitPoint, ...] | None:
        """The cheapest choice of points that exist; the solver's tolerance is taken off the budget where it matters."""
        goal_bytes = budget_bytes
        while goal_bytes > 0:
            answer = self._solve([curve.points for curve in self.curves], goal_bytes, deadline)
            if answer is None:
                return None
            excess_bytes = self.step.peak(answer[0])[0] - budget_bytes
            if excess_bytes <= 0:
                return answer[0]
            goal_bytes -= excess_bytes
        return None

    def _solve(
        self, options: Sequence[Sequence[UnitPoint]], budget_bytes: int, deadline: float
    ) -> tuple[tuple[UnitPoint, ...], float] | None:
        limit = time.monotonic() + max(1.0, _SHARE_OF_TIME * (deadline - time.monotonic()))
        return _Program(self.step, options, budget_bytes, is_peak_free=False).solve(limit, self.gap / 2)

    def _split(
        self, corners: Sequence[Sequence[tuple[Rectangle, UnitPoint]]], taken: Sequence[UnitPoint], deadline: float
    ) -> bool:
        """Split what the bound rests on; False if all of it is too small to be split."""
        wanted: Counter[tuple[int, UnitPoint]] = Counter()
        for unit in self.step.unit_of_call:
            wanted[self.step.curve_of_unit[unit], taken[unit]] += 1
        was_split = False
        for (number, corner), num_calls in wanted.items():
            rectangle = next(r for r, c in corners[number] if c == corner)
            was_split |= self.curves[number].split(rectangle, num_calls, deadline)
        return was_split


def _size(point: UnitPoint) -> int:
    return point.kept_bytes + point.forward_bytes + point.backward_bytes


class _Program:
    """One binary for each unit and option, one row for each moment."""

    def __init__(
        self, step: UnitStep, options: Sequence[Sequence[UnitPoint]], limit_bytes: int, *, is_peak_free: bool
    ) -> None:
        self.step, self.limit_bytes = step, limit_bytes
        self.model = LinearModel("units")
        self.options = [options[curve] for curve in step.curve_of_unit]
        self.columns = [
            [self.model.add_column(f"unit {u} point {i}", is_integer=True) for i in range(len(of_unit))]
            for u, of_unit in enumerate(self.options)
        ]
        for u, columns in enumerate(self.columns):
            self.model.add_row(f"unit {u}", [(column, 1.0) for column in columns], lower=1.0, upper=1.0)
        self.peak = self.model.add_column("peak") if is_peak_free else None
        for moment in _worst(step.moments):
            self._add_row(moment)

    def _add_row(self, moment: Moment) -> None:
        terms: dict[int, float] = {}
        unit_of = self.step.unit_of_call
        for unit, count in Counter(unit_of[call] for call in moment.holding).items():
            for column, point in zip(self.columns[unit], self.options[unit], strict=True):
                terms[column] = terms.get(column, 0.0) + count * point.kept_bytes / self.limit_bytes
        if moment.running is not None:
            call, part = moment.running
            unit = unit_of[call]
            for column, point in zip(self.columns[unit], self.options[unit], strict=True):
                own = point.forward_bytes if part == "forward" else point.backward_bytes
                terms[column] = terms.get(column, 0.0) + own / self.limit_bytes
        outside = moment.outside_bytes / self.limit_bytes
        if self.peak is None:
            self.model.add_row(moment.place, terms.items(), upper=1.0 - outside)
        else:
            self.model.add_row(moment.place, [*terms.items(), (self.peak, -1.0)], upper=-outside)

    def solve(self, deadline: float, gap: float) -> tuple[tuple[UnitPoint, ...], float] | None:
        """A point for each unit and the bound on what was minimised: seconds, or bytes. None if nothing fits."""
        calls = Counter(self.step.unit_of_call)
        costs = {
            column: calls[unit] * point.recompute_seconds
            for unit, columns in enumerate(self.columns)
            for column, point in zip(columns, self.options[unit], strict=True)
        }
        if self.peak is not None:
            costs = {self.peak: 1.0}
        scale = max(costs.values(), default=0.0) or 1.0
        scaled = {column: cost / scale for column, cost in costs.items()}
        answer = self.model.start(scaled, time_limit_s=max(0.1, deadline - time.monotonic()), gap=gap)()
        if answer.status == "infeasible":
            return None
        if answer.values is None:
            raise SolverFailed(
                f"no choice of schedules for {len(self.options)} units was found in the time limit. Remedy: a larger "
                "time_limit_s."
            )
        values = answer.values
        taken = (
            max(zip(columns, of_unit, strict=True), key=lambda pair: values[pair[0]])[1]
            for columns, of_unit in zip(self.columns, self.options, strict=True)
        )
        return tuple(taken), answer.bound * scale


def _worst(moments: Sequence[Moment]) -> list[Moment]:
    """Of moments at which the same units hold and run, the one with the most beside them."""
    worst: Mapping[object, Moment] = {}
    for moment in sorted(moments, key=lambda m: m.outside_bytes):
        worst = {**worst, (moment.holding, moment.running): moment}
    return list(worst.values())
