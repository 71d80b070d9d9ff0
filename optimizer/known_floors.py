"""Floors of problems, found once per process.

A floor takes seconds, and the budgets that people ask for come from it: what `minimum_budget()` said must hold for the
`optimize()` that follows.
"""

from __future__ import annotations

from collections.abc import Callable

from placemat.floor import FLOOR_SHARE, Floor, lowered, minimum_budget
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import simulate

_FLOORS: dict[Problem, Floor] = {}
_MOST_FLOORS = 32


def known_floor(problem: Problem, *, time_limit_s: float, progress: Callable[[str], None]) -> Floor:
    """Least peak of a plan for this problem, searched for in `FLOOR_SHARE` of a planning time limit, in seconds."""
    if problem in _FLOORS:
        return _FLOORS[problem]
    progress("finding the smallest budget")
    floor = minimum_budget(problem, time_limit_s=FLOOR_SHARE * time_limit_s, progress=progress)
    if not floor.interrupted:
        _FLOORS[problem] = floor
    while len(_FLOORS) > _MOST_FLOORS:
        del _FLOORS[next(iter(_FLOORS))]
    return floor


def lowered_floor(problem: Problem, floor: Floor, schedule: Schedule) -> Floor:
    """The floor, or a lower one that a plan has shown; after a search for the floor it is the known one."""
    if simulate(problem, schedule).peak_bytes < floor.minimum_bytes:
        floor = lowered(floor, problem, schedule)
        if problem in _FLOORS:
            _FLOORS[problem] = floor
    return floor


def floor_for(problem: Problem, budget_bytes: int, *, time_limit_s: float, progress: Callable[[str], None]) -> Floor:
    """A floor that a budget can be held against, and a plan that fits if one does.

    The lowest peak that is found without a solver is enough for a budget that is not below it: looking further takes
    many seconds, and tells such a budget nothing.
    """
    if problem not in _FLOORS:
        quick = minimum_budget(problem, time_limit_s=0.0)
        if quick.minimum_bytes <= budget_bytes:
            return quick
    return known_floor(problem, time_limit_s=time_limit_s, progress=progress)
