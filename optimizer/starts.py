"""Starting schedules: cheap plans of a family, so that a solver that is stopped early still has something to return."""

from __future__ import annotations

from collections.abc import Iterator

from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.greedy import segments
from placemat.phases import Phases, PhasesArgument
from placemat.problem import Problem
from placemat.replay import default_cut
from placemat.schedule import Schedule
from placemat.shave import shaved


def free_starts(
    problem: Problem, budget_bytes: int, phases: PhasesArgument, warm_start: Schedule | None
) -> Iterator[Schedule]:
    """Schedules that may be of no family, each as soon as it is made: what was handed in, and where no family was asked
    for and no border says where to cut, one that is shaved down to the budget."""
    if warm_start is not None:
        yield warm_start
    if phases is None and problem.border is None:
        yield shaved(problem, save_all(problem), budget_bytes)


def starting_schedules(problem: Problem, phases: Phases, budget_bytes: int) -> Iterator[Schedule]:
    """Schedules of the family, in a fixed order, each as soon as it is made, for they differ in how long that takes;
    those with one cut belong to the family if it has that cut, too."""
    yield save_all(problem)
    if default_cut(problem) in phases.cuts[1:-1]:
        yield chen_sqrt_n(problem)
        yield recompute_all(problem)
        yield from segments(problem, budget_bytes)
