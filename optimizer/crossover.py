"""Crossover: plans between the incumbent and solutions that cost less and are over the budget.

A solution of the whole model that the referee refuses is often one or two events away from a plan. What it carries over
the cuts as the incumbent does is fixed, the rest is free (crossover: Rothberg, INFORMS J. Computing 19, 2007); if that
leads nowhere, so is what the relaxation has otherwise than the incumbent (relaxation induced neighborhoods: Danna,
Rothberg and Le Pape, Math. Programming 102, 2005). With the rows that were missing, such a model takes seconds where
the whole one takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from placemat.milp import Retention
from placemat.neighborhood import Key

LATEST = 2  # solutions over the budget that are looked at
# What the relaxation keeps by more than this share otherwise than the incumbent is free.
UNLIKE = 0.1


@dataclass
class Crossover:
    """The latest solutions that were over the budget.

    Attributes:
        solutions: what each carries over the cuts.
    """

    solutions: list[frozenset[Key]] = field(default_factory=list)

    def add(self, model: Retention, solution: np.ndarray) -> None:
        """Remember a solution, and no longer the oldest one."""
        carried = frozenset(key for key, column in model.s.items() if solution[column] > 0.5)
        self.solutions = [*self.solutions, carried][-LATEST:]

    def fixed(self, model: Retention, carried: set[Key], relaxed: np.ndarray | None) -> dict[Key, float]:
        """The s[v,p] that are the same everywhere, and their values.

        Args:
            model: of which the s[v,p] are.
            carried: what the incumbent carries.
            relaxed: a solution of the relaxation that is looked at too.
        """
        fixed = {}
        for key, column in model.s.items():
            own = float(key in carried)
            is_unlike = relaxed is not None and abs(relaxed[column] - own) > UNLIKE
            if not is_unlike and _all_are(own, key, self.solutions):
                fixed[key] = own
        return fixed


def _all_are(own: float, key: Key, solutions: Iterable[frozenset[Key]]) -> bool:
    return all(float(key in solution) == own for solution in solutions)
