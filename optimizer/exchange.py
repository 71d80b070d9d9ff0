"""Exchange: plans that keep one value instead of another over the cut, as long as that saves seconds and fits.

Near the floor every byte is spoken for: no single drop and no single keep improves a plan, but of two values of a
chain, x and what is made of x, it matters which one is kept. A MILP that is cut short, or that lacks rows, does not
see it. Tried are pairs of which one is made from the other through values that are not kept, for no more bytes. Equal
blocks offer equal trades, so that one round makes the same one in each of them.

Seconds follow from the kept set alone, in a fraction of the time that a look at its memory takes; so only what saves
some is looked at. As for `greedy.py`, the work is limited by a count and not by a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from placemat.greedy import KeptSets
from placemat.problem import Problem
from placemat.replay import replay
from placemat.schedule import Schedule

_LEAST_SAVING = 1e-7  # of the step's seconds
_MOST_OP_VISITS = 2_000_000  # kept sets of which the seconds are told, times ops before the cut

Trade = tuple[float, int, int]  # minus the seconds that it looked like saving; kept no more; kept instead


def exchanged(problem: Problem, kept: frozenset[int], budget_bytes: int, below_s: float) -> Schedule | None:
    """The plan that trades lead to from `kept`; None if none recomputes less than `below_s` within the budget."""
    sets = KeptSets(problem)
    better = _Exchange(sets, budget_bytes, below_s).run(kept & sets.everything)
    return None if better is None else replay(problem, better, sets.cut)


class _Exchange:
    """Rounds of trades, the best ones first, until a round makes none or the work is up.

    Attributes:
        seconds: a plan has to recompute less.
        refused: values kept no more and instead, of trades that did not fit; after others they hardly ever do.
        trials: kept sets whose seconds may still be told.
    """

    def __init__(self, sets: KeptSets, budget_bytes: int, below_s: float) -> None:
        self.sets, self.budget_bytes, self.seconds = sets, budget_bytes, below_s
        self.least_s = _LEAST_SAVING * sets.problem.runtime_s
        self.refused: set[tuple[int, int]] = set()
        self.trials = _MOST_OP_VISITS // max(1, sets.cut)
        self.made_of: list[list[int]] = [[] for _ in sets.problem.values]  # value -> results of ops that read it
        for o in range(sets.cut):
            for v in sets.problem.ops[o].recompute_inputs:
                self.made_of[v].extend(sets.problem.ops[o].outputs)

    def run(self, kept: frozenset[int]) -> frozenset[int] | None:
        """The last kept set that was better; None if none was."""
        best = None
        while (better := self._round(kept)) is not None:
            best = kept = better
        return best

    def _round(self, kept: frozenset[int]) -> frozenset[int] | None:
        """`kept` after all trades of a round that save something and fit; None if there are none."""
        is_better = False
        for _, dropped, instead in sorted(self._trades(kept)):
            if dropped not in kept or instead in kept or (dropped, instead) in self.refused:
                continue
            after = kept - {dropped} | {instead}
            if self.sets.recompute_s(after) > self.seconds - self.least_s:
                continue
            if self.sets.evaluations >= self.sets.max_evaluations:
                break
            plan = self.sets.profile(after)
            if plan.peak_bytes <= self.budget_bytes and plan.recompute_s < self.seconds:
                kept, self.seconds, is_better = after, plan.recompute_s, True
            else:
                self.refused.add((dropped, instead))
        return kept if is_better else None

    def _trades(self, kept: frozenset[int]) -> list[Trade]:
        sets = self.sets
        trades: list[Trade] = []
        before_s = sets.recompute_s(kept)
        for v in sorted(kept):
            for u in sorted(self._related(v, kept)):
                if not 0 < sets.bytes[u] <= sets.bytes[v]:
                    continue
                if self.trials <= 0:
                    return trades
                self.trials -= 1
                saved_s = before_s - sets.recompute_s(kept - {v} | {u})
                if saved_s > self.least_s:
                    trades.append((-saved_s, v, u))
        return trades

    def _related(self, v: int, kept: frozenset[int]) -> set[int]:
        """Values that v is made from, or that are made from v, through nothing that is kept."""
        ops, producer = self.sets.problem.ops, self.sets.producer
        free = self.sets.everything - kept
        sources = _reached(v, free, lambda u: ops[producer[u]].recompute_inputs)
        return sources | _reached(v, free, lambda u: self.made_of[u])


def _reached(v: int, free: frozenset[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """What is reached from v through values in `free` alone, v left out."""
    reached: set[int] = set()
    stack = [v]
    while stack:
        for u in following(stack.pop()):
            if u in free and u not in reached:
                reached.add(u)
                stack.append(u)
    return reached
