"""Local search: what trades, transfers and ejections in turn make of a plan, until none of them helps."""

from __future__ import annotations

from placemat.descent import Descent
from placemat.ejection import Ejection
from placemat.exchange import Exchange
from placemat.greedy import KeptSets
from placemat.problem import Problem
from placemat.replay import replay
from placemat.schedule import Schedule
from placemat.transfer import Transfer

_MOST_EVALUATIONS = 2_000


def searched_locally(
    problem: Problem, kept: frozenset[int], budget_bytes: int, below_s: float, deadline: float
) -> Schedule | None:
    """The plan that moves lead to from `kept`.

    Args:
        problem: with one cut.
        kept: values kept over the cut; what may not be dropped is left out.
        budget_bytes: of the plan.
        below_s: seconds of recomputation that it has to be below.
        deadline: `time.monotonic()` at which the moves end.

    Returns:
        None if no move led below `below_s` within the budget.
    """
    sets = KeptSets(problem, max_evaluations=_MOST_EVALUATIONS)
    descent = Descent(sets, kept & sets.everything, budget_bytes, below_s, deadline)
    moves = (Exchange(descent), Transfer(descent), Ejection(descent))
    seconds = float("inf")
    while descent.seconds < seconds and descent.goes_on():
        seconds = descent.seconds
        for move in moves:
            move.run()
    return replay(problem, descent.kept, sets.cut) if descent.has_moved else None
