"""Ejection: keep a value that saves much, and drop others for it until the plan fits again.

A trade is for one value of no more bytes; here one large value, worth its bytes, takes the place of several small ones
anywhere in the step that are not. Which ones go is left to the search that makes plans fit (`KeptSets.drop_until`).
"""

from __future__ import annotations

from placemat.descent import Descent

_MOST_FAILURES = 40  # values in a row for which too much had to go


class Ejection:
    """Rounds over all values that are not kept, those that save most first, until a round makes no move."""

    def __init__(self, descent: Descent) -> None:
        self.descent = descent

    def run(self) -> None:
        refused: set[int] = set()
        while self._round(refused):
            pass

    def _round(self, refused: set[int]) -> bool:
        descent, failures, has_moved = self.descent, 0, False
        gains = [
            (-saved_s, u)
            for u in sorted(descent.sets.everything - descent.kept - refused)
            if (saved_s := descent.saved_s(descent.kept | {u}))
        ]
        for _, u in sorted(gains):
            if failures > _MOST_FAILURES or not descent.goes_on():
                return False
            if u in descent.kept or not descent.saved_s(descent.kept | {u}):
                continue
            fitting = descent.sets.drop_until(descent.kept | {u}, descent.budget_bytes)
            if fitting is not None and descent.moves_to(fitting):
                failures, has_moved = 0, True
            else:
                refused.add(u)
                failures += 1
        return has_moved
