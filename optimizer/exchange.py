"""Exchange: keep one value instead of another of the same chain.

Near the floor every byte is spoken for: no single drop and no single keep improves a plan, but of two values of a
chain, x and what is made of x, it matters which one is kept. A MILP that is cut short, or that lacks rows, does not
see it. Tried are pairs of which one is made from the other through values that are not kept, for no more bytes. Equal
blocks offer equal trades, so that one round makes the same one in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from placemat.descent import Descent

_MOST_OP_VISITS = 2_000_000  # kept sets of which the seconds are told, times ops before the cut

Trade = tuple[float, int, int]  # minus the seconds that it looked like saving; kept no more; kept instead


class Exchange:
    """Rounds of trades, the best ones first, until a round makes none or the work is up.

    Attributes:
        refused: values kept no more and instead, of trades that did not fit; after others they hardly ever do.
    """

    def __init__(self, descent: Descent) -> None:
        self.descent = descent
        self.refused: set[tuple[int, int]] = set()
        problem = descent.sets.problem
        self.made_of: list[list[int]] = [[] for _ in problem.values]  # value -> results of ops that read it
        for op in problem.ops[: descent.sets.cut]:
            for v in op.recompute_inputs:
                self.made_of[v].extend(op.outputs)

    def run(self) -> None:
        while self._round():
            pass

    def _round(self) -> bool:
        """All trades that save something and fit; False if there are none."""
        descent, has_moved = self.descent, False
        for _, dropped, instead in sorted(self._trades()):
            if dropped not in descent.kept or instead in descent.kept or (dropped, instead) in self.refused:
                continue
            after = descent.kept - {dropped} | {instead}
            if not descent.saved_s(after):
                continue
            if not descent.goes_on():
                return False
            if descent.moves_to(after):
                has_moved = True
            else:
                self.refused.add((dropped, instead))
        return has_moved

    def _trades(self) -> list[Trade]:
        sets, kept = self.descent.sets, self.descent.kept
        trades: list[Trade] = []
        trials = _MOST_OP_VISITS // max(1, sets.cut)
        for v in sorted(kept):
            for u in sorted(self._related(v)):
                if not 0 < sets.bytes[u] <= sets.bytes[v]:
                    continue
                if trials <= 0:
                    return trades
                trials -= 1
                if saved_s := self.descent.saved_s(kept - {v} | {u}):
                    trades.append((-saved_s, v, u))
        return trades

    def _related(self, v: int) -> set[int]:
        """Values that v is made from, or that are made from v, through nothing that is kept."""
        sets = self.descent.sets
        free = sets.everything - self.descent.kept
        sources = _reached(v, free, lambda u: sets.problem.ops[sets.producer[u]].recompute_inputs)
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
