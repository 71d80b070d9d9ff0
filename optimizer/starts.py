"""Starting schedules: cheap plans of a family, so that a solver that is stopped early still has something to return."""

from __future__ import annotations

from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.greedy import segments
from placemat.phases import Phases
from placemat.problem import Problem
from placemat.replay import default_cut
from placemat.schedule import Schedule


def starting_schedules(problem: Problem, phases: Phases, budget_bytes: int) -> list[Schedule]:
    """Schedules of the family, in a fixed order; those with one cut belong to it if it has that cut, too."""
    schedules = [save_all(problem)]
    if default_cut(problem) in phases.cuts[1:-1]:
        schedules += [recompute_all(problem), chen_sqrt_n(problem), *segments(problem, budget_bytes)]
    return schedules
