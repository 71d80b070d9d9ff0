"""Starting schedules: cheap plans of a family, so that a solver that is stopped early still has something to return."""

from __future__ import annotations

from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.phases import Phases
from placemat.problem import Problem
from placemat.replay import may_be_dropped, replay
from placemat.schedule import Schedule

SEGMENT_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
MAX_CUTS = 3


def starting_schedules(problem: Problem, phases: Phases) -> list[Schedule]:
    """Schedules of the family, in a fixed order: save all, and per cut recompute all, Chen's and even segments."""
    inner = list(phases.cuts[1:-1])
    cuts = inner[len(inner) // (2 * MAX_CUTS) :: max(1, len(inner) // MAX_CUTS)]
    if problem.border in inner:
        cuts = [problem.border]
    schedules = [save_all(problem)]
    for cut in cuts:
        schedules += [recompute_all(problem, cut), chen_sqrt_n(problem, cut)]
        schedules += segment_schedules(problem, cut)
    return schedules


def segment_schedules(problem: Problem, cut: int) -> list[Schedule]:
    """Keep what crosses from one segment of forward into the next (Chen et al. 2016, arXiv 1604.06174, section 3).

    Segments hold about equal bytes; each boundary moves to the place nearby where least crosses.
    """
    produced, crossing = _forward_bytes(problem, cut)
    schedules = []
    for count in SEGMENT_COUNTS:
        if 2 * count > cut:
            break
        bounds = _boundaries(produced, crossing, count)
        schedules.append(replay(problem, _crossing_values(problem, cut, bounds), cut))
    return schedules


def _forward_bytes(problem: Problem, cut: int) -> tuple[list[int], list[int]]:
    """Per forward step: droppable bytes produced up to it, and those of them that later forward ops read."""
    last_read = _last_forward_reads(problem, cut)
    produced, crossing = [], [0] * (cut + 1)
    total = 0
    for step in range(cut):
        for v in problem.ops[step].outputs:
            if may_be_dropped(problem, v):
                total += problem.values[v].bytes
                crossing[step] += problem.values[v].bytes
                crossing[max(step, last_read[v])] -= problem.values[v].bytes
        produced.append(total)
    for step in range(cut):
        crossing[step + 1] += crossing[step]
    return produced, crossing[:cut]


def _last_forward_reads(problem: Problem, cut: int) -> list[int]:
    last_read = [-1] * len(problem.values)
    for step in range(cut):
        for v in problem.ops[step].inputs:
            last_read[v] = step
    return last_read


def _boundaries(produced: list[int], crossing: list[int], count: int) -> list[int]:
    """Steps after which a new segment starts: per even share of the bytes the step with least crossing around it."""
    total = produced[-1]
    bounds = []
    for i in range(1, count):
        low, high = (total * (2 * i - 1)) // (2 * count), (total * (2 * i + 1)) // (2 * count)
        nearby = [step for step, num_bytes in enumerate(produced) if low <= num_bytes < high]
        if nearby:
            bounds.append(min(nearby, key=lambda step: (crossing[step], step)))
    return bounds


def _crossing_values(problem: Problem, cut: int, bounds: list[int]) -> set[int]:
    last_read = _last_forward_reads(problem, cut)
    return {
        v
        for v, value in enumerate(problem.values)
        if value.producer < cut and any(value.producer <= bound < last_read[v] for bound in bounds)
    }
