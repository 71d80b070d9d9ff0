"""Checkmate's MILP (Jain et al., MLSys 2020, arXiv 1910.02653), written from the paper.

Stages t = 0 .. T-1: stage t runs op t for the first time, before it any earlier ops again, each once and in index order
(the paper's frontier-advancing stages, section 4.6).

  R[t,i]  op i runs in stage t                      S[t,v]  value v is resident when stage t starts
  F[t,v,k]  v is freed in stage t right after op k (the paper's FREE)
  U[t,k]  bytes once op k of stage t has run, before anything is freed

  minimise  sum of c_i R[t,i] over i < t
  (1b) R[t,i] <= R[t,o(v)] + S[t,v] for every v that op i reads    (1c) S[t,v] <= S[t-1,v] + R[t-1,o(v)]
  (8a) R[t,t] = 1          (8b, 8c) no R and S of what comes later than stage t
  (2)  U[t,0] = static + sum m_v S[t,v] + R[t,0] * bytes of op 0
  (3)  U[t,k] = U[t,k-1] - sum of m_v F[t,v,k-1] + R[t,k] * bytes of op k
  (5)  F[t,v,k] = R[t,k] (1 - S[t+1,v]) prod of (1 - R[t,j]) over the readers j > k of v, in the linear form of (7)

Beyond the paper, to follow our referee: an op may have several outputs, each a value with an S of its own (running it
again makes all of them again); a run needs workspace, U[t,k] + ws_k R[t,k] <= M; a recomputation may read other values
than the first run; some ops never run again; a pinned value is in S from its first run to the end; a dropped one is not
in S after the border's stage. Left out is what nothing can want: R and S after the last op that may read it.
"""

from __future__ import annotations

import datetime
import math
import time

from ortools.math_opt.python import mathopt

from benchmarks.reference.answer import Answer
from placemat.linear_model import LinearModel
from placemat.problem import Problem
from placemat.schedule import canonical

Terms = dict[int, float]  # column -> coefficient
INFEASIBLE = (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED)
NOTHING_FOUND = mathopt.TerminationReason.NO_SOLUTION_FOUND
PLANS = (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE)


class OutOfTime(Exception):
    """The time limit was over before the model was written down."""


class Checkmate:
    """The model of one problem and budget; bytes are in units of the budget / 1000, so that coefficients stay small.

    Raises:
        OutOfTime: `deadline`, by the monotonic clock, came first.
    """

    def __init__(self, problem: Problem, budget_bytes: int, deadline: float = math.inf) -> None:
        self.problem, self.num_steps = problem, problem.num_steps
        self.unit = max(budget_bytes, 1) / 1000
        self.limit = budget_bytes / self.unit
        self.linear = LinearModel("Checkmate")
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.one = self.linear.add_column("1")
        self.linear.add_row("1", [(self.one, 1.0)], lower=1.0)
        self.readers = Readers(problem)
        self._add_columns()
        for t in range(self.num_steps):
            if time.monotonic() > deadline:
                raise OutOfTime(f"{t} of {self.num_steps} stages were written down: {self.linear.describe()}")
            self._add_dependencies(t)
            self._add_memory(t)
        costs = [op.recompute_s for op in problem.ops]
        self.costs = {run: costs[i] for (t, i), run in self.R.items() if i < t and costs[i]}

    def reads(self, t: int, k: int) -> tuple[int, ...]:
        """What op k reads in stage t."""
        op = self.problem.ops[k]
        return op.inputs if k == t else op.recompute_inputs

    def _add_columns(self) -> None:
        """R[t,t] and the S of pinned values are 1; what can only be 0 has no column."""
        problem, dropped = self.problem, self.problem.dropped
        for i, op in enumerate(problem.ops):
            self.R[i, i] = self.one
            last = max((self.readers.last[v] for v in op.outputs if not problem.values[v].pinned), default=i)
            for t in range(i + 1, last + 1 if op.recomputable else 0):
                self.R[t, i] = self.linear.add_column(f"R[{t},{i}]", is_integer=True)
        for v, value in enumerate(problem.values):
            last = self.num_steps - 1 if value.pinned else self.readers.last[v]
            for t in range(value.producer + 1, last + 1):
                if v in dropped and problem.border is not None and t == problem.border + 1:
                    continue
                self.S[t, v] = self.one if value.pinned else self.linear.add_column(f"S[{t},{v}]", is_integer=True)

    def _add_dependencies(self, t: int) -> None:
        for i in range(t + 1):
            for v in self.reads(t, i) if (t, i) in self.R else ():
                self._at_most(f"1b[{t},{i},{v}]", self.R[t, i], [self._run(t, v), self.S.get((t, v))])
        for v, value in enumerate(self.problem.values):
            if (t, v) in self.S and not value.pinned:
                self._at_most(f"1c[{t},{v}]", self.S[t, v], [self.S.get((t - 1, v)), self._run(t - 1, v)])

    def _run(self, t: int, v: int) -> int | None:
        return self.R.get((t, self.problem.values[v].producer))

    def _at_most(self, name: str, column: int, others: list[int | None]) -> None:
        """column <= sum of the others."""
        if self.one not in others:
            terms = [(other, 1.0) for other in others if other is not None]
            self.linear.add_row(name, [*terms, (column, -1.0)], lower=0.0)

    def _add_memory(self, t: int) -> None:
        """Rows (2), (3) and the budget."""
        values = self.problem.values
        before: Terms = {self.one: self.problem.static_bytes / self.unit}
        for v, value in enumerate(values):
            _add(before, self.S.get((t, v)), value.bytes / self.unit)
        for k in range(t + 1):
            run = self.R.get((t, k))
            if run is None:
                continue
            op = self.problem.ops[k]
            _add(before, run, sum(values[v].bytes for v in op.outputs) / self.unit)
            used = self.linear.add_column(f"U[{t},{k}]", upper=self.limit)
            self.linear.add_row(f"3[{t},{k}]", [*before.items(), (used, -1.0)], lower=0.0, upper=0.0)
            workspace_bytes = op.workspace_bytes if k == t else op.recompute_workspace_bytes
            if workspace_bytes:
                terms = [(used, 1.0), (run, workspace_bytes / self.unit)]
                self.linear.add_row(f"M[{t},{k}]", terms, upper=self.limit)
            before = {used: 1.0}
            for v in (*self.reads(t, k), *op.outputs):
                # What the first run at the end of the stage reads is not freed before it.
                if not values[v].pinned and values[v].bytes and k < t and t not in self.readers.first[v]:
                    before[self._free(t, v, k, run)] = -values[v].bytes / self.unit

    def _free(self, t: int, v: int, k: int, run: int) -> int:
        """F[t,v,k], 1 exactly where no hazard is: (7a) 1 - F <= hazards, (7b) (their number) * (1 - F) >= hazards.

        The hazards are 1 - R[t,k], R[t,j] of the readers j > k and S[t+1,v].
        """
        free = self.linear.add_column(f"F[{t},{v},{k}]", is_integer=True)
        hazards: Terms = {}
        for j in self.readers.again[v]:
            if k < j < t:
                _add(hazards, self.R.get((t, j)), 1.0)
        _add(hazards, self.S.get((t + 1, v)), 1.0)
        number = len(hazards) + 1.0
        # 1 - F <= 1 - R + others, and number * (1 - F) >= 1 - R + others.
        _add(hazards, run, -1.0)
        self.linear.add_row(f"7a[{t},{v},{k}]", [*hazards.items(), (free, 1.0)], lower=0.0)
        self.linear.add_row(f"7b[{t},{v},{k}]", [*hazards.items(), (free, number)], upper=number - 1.0)
        return free

    def solve(self, solver: mathopt.SolverType, time_limit_s: float = math.inf) -> Answer:
        """Least recompute seconds, to the solver's tolerances, unless the time is over before."""
        model = mathopt.Model.from_model_proto(self.linear.proto(self.costs))
        limit = None if time_limit_s == math.inf else datetime.timedelta(seconds=max(time_limit_s, 0.01))
        parameters = mathopt.SolveParameters(
            time_limit=limit, relative_gap_tolerance=0.0, absolute_gap_tolerance=0.0, random_seed=1
        )
        result = mathopt.solve(model, solver, params=parameters, remove_names=True)
        reason, size = result.termination.reason, self.linear.describe()
        if reason in INFEASIBLE:
            return Answer(None, "infeasible", math.inf, size)
        assert reason in (*PLANS, NOTHING_FOUND), result.termination
        bound = max(0.0, result.termination.objective_bounds.dual_bound)
        if reason == NOTHING_FOUND:
            return Answer(None, "none", bound, size)
        by_column = result.variable_values()
        runs = [by_column[variable] for variable in model.variables()]
        computes = [i for (_, i), run in sorted(self.R.items()) if runs[run] > 0.5]
        is_optimal = reason == mathopt.TerminationReason.OPTIMAL
        return Answer(canonical(self.problem, computes), "optimal" if is_optimal else "feasible", bound, size)


def checkmate(
    problem: Problem,
    budget_bytes: int,
    time_limit_s: float = math.inf,
    solver: mathopt.SolverType = mathopt.SolverType.GSCIP,
) -> Answer:
    """Checkmate's plan; the time limit covers writing down the model, which for long steps is most of the work."""
    deadline = time.monotonic() + time_limit_s
    try:
        model = Checkmate(problem, budget_bytes, deadline)
    except OutOfTime as error:
        return Answer(None, "none", None, str(error))
    return model.solve(solver, deadline - time.monotonic())


class Readers:
    """Per value: `first`, steps whose first run reads it; `again`, ops whose recomputation does, ascending; `last`, the
    last stage in which anything may."""

    def __init__(self, problem: Problem) -> None:
        self.first: list[set[int]] = [set() for _ in problem.values]
        self.again: list[list[int]] = [[] for _ in problem.values]
        for step, op in enumerate(problem.ops):
            for v in op.inputs:
                self.first[v].add(step)
            for v in op.recompute_inputs if op.recomputable else ():
                self.again[v].append(step)
        self.last = [value.producer for value in problem.values]
        for step in range(problem.num_steps - 1, -1, -1):
            for v in problem.ops[step].outputs:
                wanted = [w for o in self.again[v] for w in problem.ops[o].outputs]
                self.last[v] = max([step, *self.first[v], *(self.last[w] for w in wanted)])


def _add(terms: Terms, column: int | None, coefficient: float) -> None:
    """Add to what a column has; None stands for 0."""
    if column is not None:
        terms[column] = terms.get(column, 0.0) + coefficient
