"""Who takes part in the race, by name: ours and the solvers of this folder, all with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ortools.math_opt.python import mathopt

from benchmarks.reference import chen
from benchmarks.reference.answer import Answer, cheapest
from benchmarks.reference.checkmate import checkmate
from benchmarks.reference.interval import interval
from benchmarks.reference.rotor import rotor
from placemat.graph.errors import BudgetTooSmall, SolverFailed
from placemat.problem import Problem
from placemat.replay import default_cut, replay
from placemat.solve import solve

OURS, MIN_CUT = "placemat", "PyTorch min-cut"
GAP = 1e-4

SavedSets = Sequence[frozenset[int]]
Solver = Callable[[Problem, int, float, SavedSets], Answer]  # problem, budget in bytes, time limit in s, saved sets


def ours(problem: Problem, budget_bytes: int, time_limit_s: float, saved: SavedSets = ()) -> Answer:
    """`placemat.solve` as it comes, without a warm start; its bound is one for the family that it names."""
    del saved
    try:
        result = solve(problem, budget_bytes, time_limit_s=time_limit_s, gap=GAP)
    except BudgetTooSmall as error:
        return Answer(None, "infeasible", float("inf"), str(error).split("\n")[0])
    except SolverFailed as error:
        return Answer(None, "none", None, str(error))
    return Answer(result.schedule, result.status, result.lower_bound_seconds, result.family)


def min_cut(problem: Problem, budget_bytes: int, time_limit_s: float, saved: SavedSets) -> Answer:
    """The cheapest that fits of what PyTorch's partitioner saves at several settings of its memory budget."""
    del time_limit_s
    cut = default_cut(problem)
    return cheapest(problem, budget_bytes, (replay(problem, values, cut) for values in saved))


def _untimed(solver: Callable[[Problem, int], Answer]) -> Solver:
    return lambda problem, budget_bytes, time_limit_s, saved: solver(problem, budget_bytes)


SOLVERS: Mapping[str, Solver] = {
    OURS: ours,
    "Checkmate MILP": lambda problem, budget_bytes, time_limit_s, saved: checkmate(
        problem, budget_bytes, time_limit_s, mathopt.SolverType.HIGHS
    ),
    "interval CP-SAT": lambda problem, budget_bytes, time_limit_s, saved: interval(problem, budget_bytes, time_limit_s),
    "rotor": _untimed(rotor),
    "Chen greedy": _untimed(chen.greedy),
    "Chen greedy (AP)": _untimed(
        lambda problem, budget_bytes: chen.greedy(problem, budget_bytes, "articulation points")
    ),
    "Chen sqrt(n)": _untimed(chen.sqrt_n),
    MIN_CUT: min_cut,
}


def run(name: str, problem: Problem, budget_bytes: int, time_limit_s: float, saved: SavedSets = ()) -> Answer:
    """The solver of that name."""
    return SOLVERS[name](problem, budget_bytes, time_limit_s, saved)
