"""Checkmate's MILP (Jain et al., MLSys 2020, arXiv 1910.02653), written from the paper as a reference for the solver.

Stages t = 0 .. T-1: stage t runs op t for the first time, before it any earlier ops again, each once and in index order
(the paper's frontier-advancing stages, section 4.6). For problems of one output per op.

  R[t,i]  op i runs in stage t                      S[t,i]  its value is resident when stage t starts
  F[t,i,k]  value i is freed in stage t right after op k (the paper's FREE)
  U[t,k]  bytes once op k of stage t has run, before anything is freed

  minimise  sum of c_i R[t,i] over i < t
  (1b) R[t,i] <= R[t,j] + S[t,j] for every j that op i reads       (1c) S[t,i] <= S[t-1,i] + R[t-1,i]
  (8a) R[t,t] = 1          (8b, 8c) no R and S of what comes later than stage t
  (2)  U[t,0] = static + sum m_i S[t,i] + m_0 R[t,0]
  (3)  U[t,k] = U[t,k-1] - sum of m_i F[t,i,k-1] + m_k R[t,k]
  (5)  F[t,i,k] = R[t,k] (1 - S[t+1,i]) prod of (1 - R[t,j]) over the readers j > k of i, in the linear form of (7)

Beyond the paper, to follow our referee: a run needs workspace, U[t,k] + ws_k R[t,k] <= M; a recomputation may read
other values than the first run; some ops never run again; a pinned value is in S from its first run to the end; a
dropped one is not in S after the border's stage.
"""

from __future__ import annotations

import math

from ortools.math_opt.python import mathopt

from placemat.problem import Problem
from placemat.schedule import Schedule, canonical

Columns = dict[tuple[int, int], mathopt.Variable]


class Checkmate:
    """The model of one problem and budget; bytes are in units of the budget / 1000, so that coefficients stay small."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        assert all(op.outputs == (step,) for step, op in enumerate(problem.ops))
        self.problem, self.num_steps, self.budget_bytes = problem, problem.num_steps, budget_bytes
        self.bytes = [value.bytes for value in problem.values]
        self.dropped = problem.dropped
        assert not self.dropped or self.dropped.isdisjoint(problem.ops[problem.border].inputs)
        self.model = mathopt.Model(name="Checkmate")
        self.R: Columns = {}
        self.S: Columns = {}
        self._add_columns()
        for t in range(self.num_steps):
            self._add_dependencies(t)
            self._add_memory(t)
        costs = [op.runtime_s for op in problem.ops]
        self.model.minimize(mathopt.fast_sum(costs[i] * run for (t, i), run in self.R.items() if i < t))

    def reads(self, t: int, k: int) -> tuple[int, ...]:
        """What op k reads in stage t."""
        op = self.problem.ops[k]
        return op.inputs if k == t else op.recompute_inputs

    def _add_columns(self) -> None:
        for t in range(self.num_steps):
            for i in range(t + 1):
                # A second run of an op whose value never leaves would only cost time.
                fixed = i == t or not self.problem.ops[i].recomputable or self.problem.values[i].pinned
                low, high = (1.0 if i == t else 0.0), (1.0 if i == t or not fixed else 0.0)
                self.R[t, i] = self.model.add_integer_variable(lb=low, ub=high, name=f"R[{t},{i}]")
            for i in range(t):
                low = 1.0 if self.problem.values[i].pinned else 0.0
                high = 0.0 if i in self.dropped and t == self.problem.border + 1 else 1.0
                self.S[t, i] = self.model.add_integer_variable(lb=low, ub=high, name=f"S[{t},{i}]")

    def _add_dependencies(self, t: int) -> None:
        for i in range(t + 1):
            for j in self.reads(t, i):
                self.model.add_linear_constraint(self.R[t, i] <= self.R[t, j] + self.S[t, j])
        for i in range(t):
            before = self.S[t - 1, i] if i < t - 1 else 0.0
            self.model.add_linear_constraint(self.S[t, i] <= before + self.R[t - 1, i])

    def _add_memory(self, t: int) -> None:
        """Rows (2), (3) and the budget. U[t,k] is an expression in R, S and F, not a column of its own."""
        terms = [(self.bytes[i], self.S[t, i]) for i in range(t)]
        for k in range(t + 1):
            terms.append((self.bytes[k], self.R[t, k]))
            running = [*terms, (self._workspace(t, k), self.R[t, k])]
            self._add_row(running, self.budget_bytes - self.problem.static_bytes)
            for i in (*self.reads(t, k), k):
                if not self.problem.values[i].pinned:
                    terms.append((-self.bytes[i], self._free(t, i, k)))

    def _workspace(self, t: int, k: int) -> int:
        op = self.problem.ops[k]
        return op.workspace_bytes if k == t else op.recompute_workspace_bytes

    def _add_row(self, terms: list[tuple[int, mathopt.Variable]], limit_bytes: int) -> None:
        unit = max(self.budget_bytes, 1) / 1000
        expression = mathopt.fast_sum(num_bytes / unit * column for num_bytes, column in terms if num_bytes)
        self.model.add_linear_constraint(expression <= limit_bytes / unit)

    def _free(self, t: int, i: int, k: int) -> mathopt.Variable:
        """F[t,i,k], 1 exactly where no hazard is: (7a) 1 - F <= hazards, (7b) (their number) * (1 - F) >= hazards."""
        free = self.model.add_binary_variable(name=f"FREE[{t},{i},{k}]")
        hazards = [1.0 - self.R[t, k], *(self.R[t, j] for j in range(k + 1, t + 1) if i in self.reads(t, j))]
        if (t + 1, i) in self.S:
            hazards.append(self.S[t + 1, i])
        self.model.add_linear_constraint(1.0 - free <= mathopt.fast_sum(hazards))
        self.model.add_linear_constraint(len(hazards) * (1.0 - free) >= mathopt.fast_sum(hazards))
        return free

    def solve(self) -> tuple[float, Schedule | None]:
        """Least recompute seconds and a schedule that needs no more; inf and None if the budget cannot be met."""
        parameters = mathopt.SolveParameters(relative_gap_tolerance=0.0, absolute_gap_tolerance=0.0)
        result = mathopt.solve(self.model, mathopt.SolverType.GSCIP, params=parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return math.inf, None
        assert reason == mathopt.TerminationReason.OPTIMAL, reason
        runs = result.variable_values()
        computes = [i for (_, i), run in sorted(self.R.items()) if runs[run] > 0.5]
        return result.objective_value(), canonical(self.problem, computes)


def checkmate(problem: Problem, budget_bytes: int) -> tuple[float, Schedule | None]:
    """Checkmate's optimum; see `Checkmate.solve`."""
    return Checkmate(problem, budget_bytes).solve()
