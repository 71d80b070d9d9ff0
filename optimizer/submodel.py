"""Submodel: a binary linear model with most columns fixed, solved by CP-SAT from the solution at hand.

HiGHS takes no solution to start from through MathOpt, and its presolve would read all rows each time. Here rows that
the free columns cannot break are left out, and the work is limited by CP-SAT's deterministic time: equal arguments give
equal answers on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from placemat.linear_model import LinearModel

# Coefficients and costs become whole numbers after multiplication by these; coefficients are rounded so that what fits
# the rounded row fits the row.
ROW_SCALE = 1e5
COST_SCALE = 1e4
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Rows:
    """A model as arrays; every row a clause (coefficients of 1 and -1, a lower bound) or a knapsack (an upper bound).

    Attributes:
        row, column, coefficient: of the nonzeros, by row.
        lower, upper: per row.
        cost: per column.
    """

    row: np.ndarray
    column: np.ndarray
    coefficient: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    cost: np.ndarray

    @classmethod
    def of(cls, linear: LinearModel, costs: Mapping[int, float]) -> Rows:
        """Of a model of binary columns."""
        starts = [*linear.row_starts, len(linear.row_columns)]
        cost = np.zeros(len(linear.column_names))
        cost[list(costs)] = list(costs.values())
        return cls(
            row=np.repeat(np.arange(len(linear.row_starts)), np.diff(starts)),
            column=np.asarray(linear.row_columns, dtype=np.int64),
            coefficient=np.asarray(linear.coefficients),
            lower=np.asarray(linear.row_lower),
            upper=np.asarray(linear.row_upper),
            cost=cost,
        )

    def improved(self, solution: np.ndarray, is_free: np.ndarray, work: float) -> np.ndarray | None:
        """The best solution found that differs in the free columns alone; None if none is cheaper.

        Args:
            solution: 0 or 1 per column; where it breaks rows, it is no more than a hint.
            is_free: per column.
            work: limit in CP-SAT's deterministic seconds.
        """
        model = cp_model.CpModel()
        free = np.flatnonzero(is_free)
        variables = {c: model.new_bool_var("") for c in free.tolist()}
        for low, high, columns, coefficients in self._rows(solution, is_free):
            _add_row(model, [variables[c] for c in columns.tolist()], coefficients, low, high)
        whole = np.rint(self.cost[free] * COST_SCALE).astype(np.int64)
        model.minimize(cp_model.LinearExpr.weighted_sum(list(variables.values()), whole.tolist()))
        for c, variable in variables.items():
            model.add_hint(variable, bool(solution[c] > 0.5))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.max_deterministic_time = work
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        if solver.objective_value >= whole @ (solution[free] > 0.5):
            return None
        better = solution.copy()
        better[free] = [solver.value(variable) for variable in variables.values()]
        return better

    def _rows(self, solution: np.ndarray, is_free: np.ndarray) -> Iterator[tuple[float, float, np.ndarray, np.ndarray]]:
        """Bounds, free columns and coefficients of the rows that free columns may break."""
        size = len(self.lower)
        fixed = np.where(is_free, 0.0, solution)
        activity = np.bincount(self.row, weights=self.coefficient * fixed[self.column], minlength=size)
        inside = is_free[self.column]
        row, column, coefficient = self.row[inside], self.column[inside], self.coefficient[inside]
        least = activity + np.bincount(row, weights=np.minimum(coefficient, 0), minlength=size)
        most = activity + np.bincount(row, weights=np.maximum(coefficient, 0), minlength=size)
        matters = ((least < self.lower - TOLERANCE) | (most > self.upper + TOLERANCE))[row]
        row, column, coefficient = row[matters], column[matters], coefficient[matters]
        breaks = np.flatnonzero(np.diff(row)) + 1
        for rows, columns, coefficients in zip(
            np.split(row, breaks), np.split(column, breaks), np.split(coefficient, breaks), strict=True
        ):
            if len(rows):
                r = rows[0]
                yield self.lower[r] - activity[r], self.upper[r] - activity[r], columns, coefficients


def _add_row(
    model: cp_model.CpModel, variables: list[cp_model.IntVar], coefficients: np.ndarray, low: float, high: float
) -> None:
    if low > -np.inf:
        signed = zip(variables, coefficients.tolist(), strict=True)
        model.add_bool_or([variable if a > 0 else ~variable for variable, a in signed])
    else:
        whole = np.ceil(coefficients * ROW_SCALE - TOLERANCE).astype(np.int64)
        model.add(cp_model.LinearExpr.weighted_sum(variables, whole.tolist()) <= int(np.floor(high * ROW_SCALE)))
