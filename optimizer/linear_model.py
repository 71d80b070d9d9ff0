"""LinearModel: a mixed-integer linear model in flat lists, minimised by HiGHS through MathOpt.

Rows are collected as plain lists and handed over as one `ModelProto`: with some 1e5 rows, building MathOpt expressions
term by term would take longer than the solver. Nothing here knows what the model is about.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from threading import Thread
from typing import Literal

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from placemat.graph.errors import SolverFailed

Status = Literal["optimal", "feasible", "infeasible", "none"]

_STATUS: dict[mathopt.TerminationReason, Status] = {
    mathopt.TerminationReason.OPTIMAL: "optimal",
    mathopt.TerminationReason.FEASIBLE: "feasible",
    mathopt.TerminationReason.INFEASIBLE: "infeasible",
    mathopt.TerminationReason.NO_SOLUTION_FOUND: "none",
}


@dataclass(frozen=True)
class LinearAnswer:
    """Why the solver stopped and what it had.

    Attributes:
        status: "optimal" (within the gap), "feasible" or "none" (a limit stopped it), "infeasible".
        limit: name of the limit that stopped it ("time"), or None.
        values: one per column; None without a solution.
        objective: of that solution; inf without one.
        bound: no solution has a smaller objective; inf if infeasible.
    """

    status: Status
    limit: str | None
    values: np.ndarray | None
    objective: float
    bound: float


@dataclass
class LinearModel:
    """Columns in [0, 1], continuous or binary; rows with bounds. Every one has a name."""

    name: str
    column_names: list[str] = field(default_factory=list)
    column_upper: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=list)
    row_columns: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)

    def add_column(self, name: str, *, is_integer: bool = False, upper: float = 1.0) -> int:
        """A column in [0, upper]; returns its index."""
        self.column_names.append(name)
        self.column_upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.column_names) - 1

    def add_row(
        self,
        name: str,
        terms: Iterable[tuple[int, float]],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """lower <= sum of coefficient * column <= upper; no column twice in `terms`."""
        self.row_names.append(name)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.row_starts.append(len(self.row_columns))
        for column, coefficient in terms:
            self.row_columns.append(column)
            self.coefficients.append(coefficient)

    def describe(self) -> str:
        """One line: size and range of the coefficients."""
        sizes = np.abs(np.asarray(self.coefficients or [0.0]))
        return (
            f"{len(self.row_names)} rows, {len(self.column_names)} columns ({sum(self.is_integer)} integer), "
            f"{len(self.coefficients)} nonzeros in [{sizes.min():.2g}, {sizes.max():.2g}]"
        )

    def start(
        self,
        costs: Mapping[int, float],
        *,
        time_limit_s: float,
        gap: float,
        fixed: Mapping[int, float] | None = None,
        relaxed: bool = False,
        cutoff: float = math.inf,
    ) -> Solving:
        """Minimise sum of cost * column with HiGHS on one thread, so that equal models give equal answers.

        Args:
            costs: column -> objective coefficient.
            time_limit_s: wall-clock seconds.
            gap: stop when (objective - bound) / objective is at most this.
            fixed: column -> the only value that it may have.
            relaxed: every column is continuous.
            cutoff: no solution with a larger objective is wanted.

        Returns:
            The solve under way.
        """
        proto = self.proto(costs)
        for column, value in (fixed or {}).items():
            proto.variables.lower_bounds[column] = proto.variables.upper_bounds[column] = value
        if relaxed:
            proto.variables.integers[:] = [False] * len(self.column_names)
        if cutoff < math.inf:
            _add_cutoff(proto, costs, cutoff)
        model = mathopt.Model.from_model_proto(proto)
        done: Queue[mathopt.SolveResult | Exception] = Queue()
        run = partial(_solve, model, _parameters(time_limit_s, gap), done)
        Thread(target=run, name="HiGHS").start()

        return Solving(self, model, done)

    def answer(self, result: mathopt.SolveResult, model: mathopt.Model) -> LinearAnswer:
        """What a result says of this model.

        Raises:
            SolverFailed: HiGHS failed numerically.
        """
        termination = result.termination
        if termination.reason not in _STATUS:
            raise SolverFailed(
                f"HiGHS stopped on `{self.name}` ({self.describe()}) with {termination.reason.name.lower()}: "
                f"{termination.detail or 'no detail'}"
            )
        status = _STATUS[termination.reason]
        limit = None if termination.limit is None else termination.limit.name.lower()
        values, objective = None, math.inf
        if status in ("optimal", "feasible"):
            by_column = result.variable_values()
            values = np.array([by_column[v] for v in model.variables()])
            objective = result.objective_value()
        bound = math.inf if status == "infeasible" else termination.objective_bounds.dual_bound
        return LinearAnswer(status, limit, values, objective, bound)

    def proto(self, costs: Mapping[int, float]) -> model_pb2.ModelProto:
        """The model for MathOpt, which any solver of its own takes; minimises sum of cost * column."""
        proto = model_pb2.ModelProto(name=self.name)
        proto.variables.ids.extend(range(len(self.column_names)))
        proto.variables.names.extend(self.column_names)
        proto.variables.lower_bounds.extend([0.0] * len(self.column_names))
        proto.variables.upper_bounds.extend(self.column_upper)
        proto.variables.integers.extend(self.is_integer)
        proto.linear_constraints.ids.extend(range(len(self.row_names)))
        proto.linear_constraints.names.extend(self.row_names)
        proto.linear_constraints.lower_bounds.extend(self.row_lower)
        proto.linear_constraints.upper_bounds.extend(self.row_upper)
        rows = np.repeat(np.arange(len(self.row_starts)), np.diff([*self.row_starts, len(self.row_columns)]))
        columns = np.asarray(self.row_columns, dtype=np.int64)
        by_row = np.lexsort((columns, rows))  # the proto wants columns ascending within a row
        proto.linear_constraint_matrix.row_ids.extend(rows[by_row].tolist())
        proto.linear_constraint_matrix.column_ids.extend(columns[by_row].tolist())
        proto.linear_constraint_matrix.coefficients.extend(np.asarray(self.coefficients)[by_row].tolist())
        proto.objective.linear_coefficients.ids.extend(sorted(costs))
        proto.objective.linear_coefficients.values.extend(costs[column] for column in sorted(costs))
        return proto


@dataclass(frozen=True)
class Solving:
    """A solve of HiGHS in a thread of its own; call it for the answer."""

    linear: LinearModel
    model: mathopt.Model
    done: Queue[mathopt.SolveResult | Exception]

    def is_done(self) -> bool:
        """Whether the answer is there."""
        return not self.done.empty()

    def __call__(self) -> LinearAnswer:
        """Wait for the answer, once.

        On Ctrl-C, HiGHS, which cannot be stopped through MathOpt, goes on to its time limit, and what it finds is
        dropped. A process does not end before that: killed threads of HiGHS take it down with an abort.

        Raises:
            SolverFailed: HiGHS is missing from the installed ortools, or failed numerically.
            KeyboardInterrupt: on Ctrl-C.
        """
        result = self.done.get()
        if isinstance(result, Exception):
            text = f"HiGHS could not be run on `{self.linear.name}` ({self.linear.describe()}): {result}"
            raise SolverFailed(text) from result
        return self.linear.answer(result, self.model)


def _add_cutoff(proto: model_pb2.ModelProto, costs: Mapping[int, float], cutoff: float) -> None:
    """sum of cost * column <= cutoff, as a row: MathOpt hands HiGHS no cutoff of its own."""
    row = len(proto.linear_constraints.ids)
    proto.linear_constraints.ids.append(row)
    proto.linear_constraints.names.append("cutoff")
    proto.linear_constraints.lower_bounds.append(-math.inf)
    proto.linear_constraints.upper_bounds.append(cutoff)
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend([row] * len(costs))
    matrix.column_ids.extend(sorted(costs))
    matrix.coefficients.extend(costs[column] for column in sorted(costs))


def _solve(
    model: mathopt.Model, parameters: mathopt.SolveParameters, done: Queue[mathopt.SolveResult | Exception]
) -> None:
    """In a thread of its own, so that the one that waits hears Ctrl-C."""
    try:
        done.put(mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, remove_names=True))
    except Exception as error:  # raised again by the thread that waits; ortools 9.15 has several kinds of its own
        done.put(error)


def _parameters(time_limit_s: float, gap: float) -> mathopt.SolveParameters:
    highs = highs_pb2.HighsOptionsProto()
    # `SolveParameters.threads` is refused by the HiGHS of ortools 9.15; its own option is not.
    highs.int_options["threads"] = 1
    highs.string_options["parallel"] = "off"
    highs.int_options["random_seed"] = 0
    highs.double_options["mip_rel_gap"] = gap
    # Bytes decide feasibility, so tight tolerances. Below 1e-6 for integers HiGHS discards solutions, and its bound
    # is wrong then (seen as "transformNewIntegerFeasibleSolution" on its output).
    highs.double_options["mip_feasibility_tolerance"] = 1e-6
    highs.double_options["primal_feasibility_tolerance"] = 1e-8
    return mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit_s, 0.01)), enable_output=False, highs=highs
    )
