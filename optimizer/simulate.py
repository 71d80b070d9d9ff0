"""The referee: replay a schedule step by step, independently of every solver.

Rules. First runs come in index order, each op once; a recomputation comes after the op's first run, only if the op may
be recomputed. A run needs its inputs resident (a recomputation: its `recompute_inputs`) and while it lasts there are
resident: the static bytes, everything that was resident before, *all* outputs of the op, and its workspace. An output
whose old copy is still resident counts twice until the run ends, when the new copy replaces it. Pinned values are
never freed; only resident values are. When the op at the border runs, no value of `Problem.dropped` is resident.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from placemat.graph.errors import InvalidSchedule
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        peak_bytes: highest of `timeline`, static bytes included.
        recompute_seconds: seconds of all runs but the first ones.
        total_seconds: seconds of all runs.
        timeline: per step of the schedule, bytes while a Compute runs and bytes after a Free.
        peak_step: index into `Schedule.steps` of the first Compute that reaches the peak; -1 for an empty schedule.
        resident_at_peak: values, ascending, that are resident when that Compute starts.
    """

    peak_bytes: int
    recompute_seconds: float
    total_seconds: float
    timeline: tuple[int, ...]
    peak_step: int
    resident_at_peak: tuple[int, ...]


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Replay `schedule`; time is linear in its length.

    Raises:
        InvalidSchedule: a rule at the head of this file is broken; the message names the step.
    """
    ops, values = problem.ops, problem.values
    resident: dict[int, None] = {}
    live_bytes = peak_bytes = problem.static_bytes
    peak_step, num_started = -1, 0
    resident_at_peak: tuple[int, ...] = ()
    again: list[float] = []
    timeline: list[int] = []
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            is_first = _check_run(problem, index, step.op, num_started)
            op = ops[step.op]
            for v in op.inputs if is_first else op.recompute_inputs:
                if v not in resident:
                    _reject(
                        index, f"op {step.op} ({op.name}) reads value {v} ({values[v].name}), which is not resident"
                    )
            if step.op == problem.border and is_first:
                _check_dropped(problem, index, resident)
            workspace_bytes = op.workspace_bytes if is_first else op.recompute_workspace_bytes
            needed_bytes = live_bytes + workspace_bytes + sum(values[v].bytes for v in op.outputs)
            timeline.append(needed_bytes)
            if needed_bytes > peak_bytes or peak_step < 0:
                peak_bytes, peak_step, resident_at_peak = needed_bytes, index, tuple(sorted(resident))
            for v in op.outputs:
                if v not in resident:
                    resident[v] = None
                    live_bytes += values[v].bytes
            if is_first:
                num_started += 1
            else:
                again.append(op.recompute_s)
        else:
            _check_free(problem, index, step.value, resident)
            del resident[step.value]
            live_bytes -= values[step.value].bytes
            timeline.append(live_bytes)
    if num_started < len(ops):
        raise InvalidSchedule(f"op {num_started} ({ops[num_started].name}) and those after it never run")
    recompute_seconds = math.fsum(again)
    return Simulation(
        peak_bytes,
        recompute_seconds,
        problem.runtime_s + recompute_seconds,
        tuple(timeline),
        peak_step,
        resident_at_peak,
    )


def steps_below_peak(problem: Problem, schedule: Schedule) -> frozenset[int]:
    """Indices of the steps that need less than the peak."""
    simulation = simulate(problem, schedule)
    return frozenset(i for i, num_bytes in enumerate(simulation.timeline) if num_bytes < simulation.peak_bytes)


def running_bytes(schedule: Schedule, simulation: Simulation) -> list[int]:
    """Bytes at each Compute of the schedule."""
    steps = zip(schedule.steps, simulation.timeline, strict=True)
    return [num_bytes for step, num_bytes in steps if isinstance(step, Compute)]


def _check_run(problem: Problem, index: int, op: int, num_started: int) -> bool:
    """True for a first run, False for a legal recomputation."""
    if not 0 <= op < len(problem.ops):
        _reject(index, f"there is no op {op}; the problem has {len(problem.ops)}")
    if op == num_started:
        return True
    if op > num_started:
        _reject(
            index,
            f"op {op} ({problem.ops[op].name}) runs before op {num_started} ({problem.ops[num_started].name}) has run: "
            "first runs come in index order",
        )
    if not problem.ops[op].recomputable:
        _reject(index, f"op {op} ({problem.ops[op].name}) may not be recomputed")
    return False


def _check_dropped(problem: Problem, index: int, resident: dict[int, None]) -> None:
    if held := problem.dropped.intersection(resident):
        v = min(held)
        _reject(
            index,
            f"value {v} ({problem.values[v].name}) is resident at the border, op {problem.border}, where it must not "
            "be: it is in `dropped`",
        )


def _check_free(problem: Problem, index: int, v: int, resident: dict[int, None]) -> None:
    if not 0 <= v < len(problem.values):
        _reject(index, f"there is no value {v}; the problem has {len(problem.values)}")
    if v not in resident:
        _reject(index, f"value {v} ({problem.values[v].name}) is freed but not resident")
    if problem.values[v].pinned:
        _reject(index, f"value {v} ({problem.values[v].name}) is pinned and may not be freed")


def _reject(index: int, what: str) -> NoReturn:
    raise InvalidSchedule(f"step {index} of the schedule: {what}")
