"""Chen et al. 2016 (arXiv 1604.06174): segments of about sqrt(n) ops, and the greedy search over a segment's bytes.

On graphs that are no chains, as in the evaluation of Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653, section 5):
"linearized" takes every op in execution order for a candidate to be kept, "articulation points" only those behind which
a single value goes on. In backward each dropped op runs again once, before its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from benchmarks.reference.answer import Answer, cheapest
from benchmarks.reference.segments import articulation_points, crossing_values
from placemat.baselines import chen_sqrt_n
from placemat.problem import Problem
from placemat.replay import default_cut, may_be_dropped, replay
from placemat.schedule import Schedule

Candidates = Literal["linearized", "articulation points"]
SEARCHED_SIZES = 50  # segment sizes that are tried, in geometric steps


def sqrt_n(problem: Problem, budget_bytes: int) -> Answer:
    """Every sqrt(n)-th op kept: one schedule, whatever the budget."""
    return cheapest(problem, budget_bytes, [chen_sqrt_n(problem)])


def greedy(problem: Problem, budget_bytes: int, candidates: Candidates = "linearized") -> Answer:
    """The cheapest plan that fits among those of algorithm 3 for segment sizes from one op's to the whole forward's."""
    return cheapest(problem, budget_bytes, greedy_schedules(problem, candidates))


def greedy_schedules(problem: Problem, candidates: Candidates) -> Iterator[Schedule]:
    """Plans of algorithm 3 for `SEARCHED_SIZES` segment sizes, ascending, each different from the one before."""
    cut = default_cut(problem)
    kept_at = _candidates(problem, candidates)
    sizes = [step_bytes for step in range(cut) if (step_bytes := _dropped_bytes(problem, step))]
    if not sizes:
        return
    low, high = min(sizes), sum(sizes)
    previous: set[int] | None = None
    for i in range(SEARCHED_SIZES + 1):
        kept = _kept_values(problem, kept_at, low * (high / low) ** (i / SEARCHED_SIZES))
        if kept != previous:
            yield replay(problem, kept, cut)
        previous = kept


def _candidates(problem: Problem, candidates: Candidates) -> dict[int, tuple[int, ...]]:
    """Step -> values that are kept where a segment ends behind it."""
    if candidates == "linearized":
        return {step: problem.ops[step].outputs for step in range(default_cut(problem))}
    crossing = crossing_values(problem)
    return {p - 1: crossing[p] for p in articulation_points(problem)}


def _kept_values(problem: Problem, kept_at: Mapping[int, tuple[int, ...]], segment_bytes: float) -> set[int]:
    """Algorithm 3: go through forward and add up what is dropped; at a candidate where that is more than the segment's
    bytes, keep what goes on from there and begin anew."""
    kept: set[int] = set()
    dropped_bytes = 0
    for step in range(default_cut(problem)):
        dropped_bytes += _dropped_bytes(problem, step)
        if step in kept_at and dropped_bytes > segment_bytes:
            kept.update(kept_at[step])
            dropped_bytes = 0
    return kept


def _dropped_bytes(problem: Problem, step: int) -> int:
    return sum(problem.values[v].bytes for v in problem.ops[step].outputs if may_be_dropped(problem, v))
