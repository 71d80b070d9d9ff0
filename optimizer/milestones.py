"""Milestones: a relaxation whose bound holds for every schedule, and whose solutions are near to plans.

Whatever a schedule recomputes and whenever, every op runs a first time, in index order. Let the first runs of some ops
t_1 < ... < t_K be milestones, and let part p of the step be what comes after the start of the run of t_p, up to the
start of that of t_(p+1); the run of t_p itself is thus in part p, part 0 begins with the step and part K ends with it.

  h[v,p]  for values that are made first before t_p: v is resident when t_p starts its first run
  X[o,p]  op o, which ran first before t_p, is recomputed in part p, at least once

  minimise  sum of c_o X[o,p]  subject to
  (1) run     h[v,p] = 1                                    v in in(t_p)
  (2) use     h[v,p] + X[o(v),p] >= 1                       a first run in part p other than t_p reads v
  (3) chain   h[v,p] + X[o(v),p] >= X[w,p]                  recomputable w, v in rin(w)
  (4) carry   h[v,p+1] <= h[v,p] + X[o(v),p]                v made first before t_p
  (5) memory  sum of m_v h[v,p] + own(t_p) <= M             own: static bytes, pinned, outputs and workspace of t_p

Every schedule within M gives a solution that costs no more: set h and X as they are in it. (1) and (5) are the
referee's rules at t_p. What a run of part p reads is resident when it starts, so it was when t_p started, or it was
made in between, in part p, by a run of its op, which is a recomputation if that op ran first before t_p: (2) and (3).
The same argument at the start of t_(p+1) is (4). A schedule pays c_o for every recomputation, at least one for each
X[o,p] = 1. Variables that are left out because nothing reads them any more can only be zero at an optimum. So the
optimum, and any bound of it, holds for all schedules and not only for those of a family; with one milestone it is a
covering knapsack over the values that lie idle there. More milestones make it tighter.

A border with values that may not be there asks for more than this: the bound holds, but plans may break that rule, so
it is meant for steps without one. What it does not see is what a recomputation itself needs, and the memory between
milestones: a decoded solution may be over the budget, where the next model has a milestone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placemat.linear_model import LinearModel
from placemat.problem import Problem
from placemat.refinement import TIE_SCALE, cost_unit_s
from placemat.replay import may_be_dropped, missing_ops

BYTE_SCALE = 1e4  # units of the budget: coefficients then are at most that

Key = tuple[int, int]  # (value or op, part)


@dataclass
class Milestones:
    """The relaxation of one problem while it is built.

    Attributes:
        at: the steps t_1 < ... < t_K.
        held: (v,p) -> column of h.
        again: (o,p) -> column of X.
        still: (v,p) -> column of r, see `add_burst`.
        bursts: (o,p) that have such a row.
    """

    problem: Problem
    limit_bytes: int
    at: tuple[int, ...]
    linear: LinearModel = field(default_factory=lambda: LinearModel("milestones"))
    held: dict[Key, int] = field(default_factory=dict)
    again: dict[Key, int] = field(default_factory=dict)
    still: dict[Key, int] = field(default_factory=dict)
    bursts: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._add_columns()
        self._add_reads()
        self._add_carries()
        self._add_memory()

    def part(self, step: int) -> int:
        """The part in which a first run is."""
        return bisect_right(self.at, step)

    @property
    def costs(self) -> dict[int, float]:
        """Column -> units of the objective, with a tie-break of TIE_SCALE in all."""
        unit_s, tie = cost_unit_s(self.problem), TIE_SCALE / max(len(self.again), 1)
        return {column: self.problem.ops[o].recompute_s / unit_s + tie for (o, _), column in self.again.items()}

    def _add_columns(self) -> None:
        last, op_last = self._last_parts()
        for v, value in enumerate(self.problem.values):
            if not value.pinned:
                for p in range(self.part(value.producer) + 1, last[v] + 1):
                    self.held[v, p] = self.linear.add_column(f"h[v={v},p={p}]", is_integer=True)
        for o, last_part in enumerate(op_last):
            for p in range(self.part(o) + 1, last_part + 1):
                self.again[o, p] = self.linear.add_column(f"X[op={o},p={p}]", is_integer=True)

    def _last_parts(self) -> tuple[list[int], list[int]]:
        """The last part in which anything may read a value, or an output of an op."""
        problem = self.problem
        last, op_last = [0] * len(problem.values), [0] * problem.num_steps
        for t in range(problem.num_steps - 1, -1, -1):
            op = problem.ops[t]
            op_last[t] = self.part(t)
            if op.recomputable:
                op_last[t] = max([op_last[t], *(last[v] for v in op.outputs if not problem.values[v].pinned)])
                for v in op.recompute_inputs:
                    last[v] = max(last[v], op_last[t])
            for v in op.inputs:
                last[v] = max(last[v], self.part(t))
        return last, op_last

    def _made(self, v: int, p: int) -> list[tuple[int, float]]:
        """X[o(v),p] as terms."""
        column = self.again.get((self.problem.values[v].producer, p))
        return [] if column is None else [(column, 1.0)]

    def _add_reads(self) -> None:
        """(1) to (3)."""
        linear, problem = self.linear, self.problem
        for t, op in enumerate(problem.ops):
            p = self.part(t)
            is_milestone = p > 0 and self.at[p - 1] == t
            for v in op.inputs:
                if (v, p) in self.held:
                    made = [] if is_milestone else self._made(v, p)
                    linear.add_row(f"use[v={v},t={t}]", [(self.held[v, p], 1.0), *made], lower=1.0)
        for (w, p), column in self.again.items():
            for v in problem.ops[w].recompute_inputs:
                if (v, p) in self.held:
                    terms = [(self.held[v, p], 1.0), *self._made(v, p), (column, -1.0)]
                    linear.add_row(f"chain[v={v},op={w},p={p}]", terms, lower=0.0)

    def _add_carries(self) -> None:
        """(4)."""
        for (v, p), column in self.held.items():
            after = self.held.get((v, p + 1))
            if after is not None:
                self.linear.add_row(f"carry[v={v},p={p}]", [(column, 1.0), *self._made(v, p), (after, -1.0)], lower=0.0)

    def _add_memory(self) -> None:
        """(5)."""
        problem, unit_bytes = self.problem, max(self.limit_bytes, 1) / BYTE_SCALE
        by_part: list[list[int]] = [[] for _ in range(len(self.at) + 1)]
        for v, p in self.held:
            by_part[p].append(v)
        for p, t in enumerate(self.at, start=1):
            pinned = sum(value.bytes for value in problem.values if value.pinned and value.producer < t)
            op = problem.ops[t]
            own_bytes = op.workspace_bytes + sum(problem.values[v].bytes for v in op.outputs)
            room_bytes = self.limit_bytes - problem.static_bytes - pinned - own_bytes
            terms = [(self.held[v, p], problem.values[v].bytes / unit_bytes) for v in by_part[p]]
            terms = [term for term in terms if term[1]]
            self.linear.add_row(f"memory[t={t}]", terms, upper=room_bytes / unit_bytes)

    def add_burst(self, k: int, p: int) -> None:
        """If k is recomputed in part p, let it fit beside what t_(p+1) finds when it starts and is not made after k.

          sum of m_v r[v] <= M - own(k)  if X[k,p] = 1,    r[v] >= h[v,p+1],  or - X[o(v),p] if o(v) > k

        That recomputations wait for t_(p+1) and go in index order is a choice: no bound holds any more.
        """
        if (k, p) in self.bursts:
            return
        self.bursts.add((k, p))
        problem, linear, unit_bytes = self.problem, self.linear, max(self.limit_bytes, 1) / BYTE_SCALE
        op = problem.ops[k]
        beside = [v for v, value in enumerate(problem.values) if value.producer < self.at[p] and v not in op.outputs]
        own_bytes = (
            problem.static_bytes + op.recompute_workspace_bytes + sum(problem.values[v].bytes for v in op.outputs)
        )
        terms = []
        for v in beside:
            value, column = problem.values[v], self.held.get((v, p + 1))
            if value.pinned or v in op.recompute_inputs:
                own_bytes += value.bytes
            elif column is not None and value.bytes:
                if value.producer > k and (value.producer, p) in self.again:
                    column = self._still(v, p)
                terms.append((column, value.bytes / unit_bytes))
        room = (self.limit_bytes - own_bytes) / unit_bytes
        excess = sum(a for _, a in terms) - room
        if excess > 0:
            linear.add_row(f"burst[op={k},p={p}]", [*terms, (self.again[k, p], excess)], upper=room + excess)

    def _still(self, v: int, p: int) -> int:
        """A column that is 1 if h[v,p+1] is and v is not made again in part p."""
        if (v, p) not in self.still:
            self.still[v, p] = column = self.linear.add_column(f"r[v={v},p={p}]", is_integer=True)
            terms = [(column, 1.0), (self.held[v, p + 1], -1.0), (self.again[self.problem.values[v].producer, p], 1.0)]
            self.linear.add_row(f"still[v={v},p={p}]", terms, lower=0.0)
        return self.still[v, p]

    def solution(self, computes: Sequence[int]) -> np.ndarray:
        """What a schedule with these runs says of the columns."""
        starts, started = {}, 0
        for position, o in enumerate(computes):
            if o == started:
                starts[o], started = position, started + 1
        values = np.zeros(len(self.linear.column_names))
        p, wanted = len(self.at), set[int]()
        for position in range(len(computes) - 1, -1, -1):
            o = computes[position]
            op, is_first = self.problem.ops[o], starts[o] == position
            wanted.difference_update(op.outputs)
            wanted.update(op.inputs if is_first else op.recompute_inputs)
            if not is_first and (o, p) in self.again:
                values[self.again[o, p]] = 1.0
            if is_first and p and self.at[p - 1] == o:
                for v in wanted:
                    if (v, p) in self.held:
                        values[self.held[v, p]] = 1.0
                p -= 1
        for (v, q), column in self.still.items():
            made = values[self.again[self.problem.values[v].producer, q]]
            values[column] = values[self.held[v, q + 1]] * (1.0 - made)
        return values

    def computes(self, solution: np.ndarray) -> list[int]:
        """Runs that hold at each milestone what a solution holds, and make what is missing as late as that allows."""
        held: list[set[int]] = [set() for _ in range(len(self.at) + 1)]
        for (v, p), column in self.held.items():
            if solution[column] > 0.5:
                held[p].add(v)
        return computes_holding(self.problem, self.at, held)


def computes_holding(problem: Problem, at: Sequence[int], held: Sequence[set[int]]) -> list[int]:
    """Runs that hold of the values made before step at[p-1] just those of held[p] when it runs first, as far as they
    can be made again, and make what is missing as late as that allows."""
    computes: list[int] = []
    missing: set[int] = set()
    made: list[int] = []  # droppable values so far
    p = 0
    for t, op in enumerate(problem.ops):
        wanted = set(op.inputs)
        is_milestone = p < len(at) and at[p] == t
        if is_milestone:
            p += 1
            wanted |= held[p]
        again = missing_ops(problem, wanted, missing)
        computes.extend(again)
        for w in again:
            missing.difference_update(problem.ops[w].outputs)
        if is_milestone:
            missing.update(v for v in made if v not in held[p] and v not in op.inputs)
        computes.append(t)
        made.extend(v for v in op.outputs if may_be_dropped(problem, v))
    return computes
