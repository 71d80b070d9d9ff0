"""The phased retention MILP.

Problem statement
  Run T ops in a given order within M bytes, recomputing some of them later, at the least extra time.

Data
  Op o runs first at step o. in(o), out(o): values read and produced; c_o seconds; ws_o workspace; rec_o: may be
  recomputed (then reading rin(o) with workspace rws_o). Value v: bytes m_v, its op o(v). Pinned values are never freed
  and have no variables. Phases 0 = k_0 < ... < k_P = T (`phases.py`); p(t) the phase of step t; l the last step of a
  phase; L(v), L(o) the last phase in which v, or an unpinned output of o, may be wanted.

Variables (one that is absent counts as 0)
  s[v,p]  for p(o(v)) < p <= L(v): v is resident when phase p starts.
  Y[o,t]  for rec_o and p(o) < p(t) <= L(o): o has been recomputed in p(t) by step t.     X[o,p] = Y[o,l]
  y[v,t]  that copy of v is taken; the same column as Y where o has one unpinned output.  x[v,p] = y[v,l]

Minimise sum of c_o X[o,p] subject to
  (1) use     s[v,p] + y[v,t] >= 1                     t in p, v in in(t), p(o(v)) < p
  (2) chain   s[v,p] + y[v,t] >= Y[w,t]                recomputable w, v in rin(w)
  (3) mono    Y[o,t] >= Y[o,t-1], y likewise           within a phase; 0 before its first step
  (4) carry   s[v,p+1] <= s[v,p] + x[v,p]              p > p(o(v)); free for p = p(o(v))
  (5) once    s[v,p] + x[v,p] <= 1                     what is carried in is not taken again: (7) relies on it
  (6) multi   Y[o,t] >= y[v,t];  y[v,t] >= Y[o,t] + x[v,p] - 1       ops with several unpinned outputs
  (7) memory  sum_v m_v live(v,e) + own(e) <= M        every event e; `memory_rows.py`
  (8) count   n = sum s[v,p];  n = sum X[o,p]          integer n over identical ops; cuts nothing off, guides branching
  (9) dropped s[v,p] = 0;  Y[o(v),t] = 0               v that must not be there at the border; p begins with it, t is it
One sentence each: (1) what a first run reads is there; (2) so is what a recomputation reads; (3) a recomputation
stays done until the phase ends; (4) only what is there can be carried on; (5) one copy per phase; (6) a copy can be
taken only when its op runs, and is taken at once or never; (7) no event needs more than M bytes.

With binary s, y, Y this is exact for its family: the schedule decoded from a solution costs the objective and needs at
most the memory of (7). With continuous y and Y the bound stays valid and the tree is much smaller; given binary s,
rows (1) and (2) force which ops run again, but (7) may reward a recomputation that is spread over several steps.
With P = T nothing can be spread, and continuous y and Y lose nothing.

Time grid. Y and y have columns only at the steps of a grid, and at the last step at which they may rise; (1) and (2)
look at the next of these steps, (7) stands only at grid steps. Every plan of the family satisfies that, so the optimum
is a bound for the whole family whatever the grid; where the referee finds a decoded plan above the budget the grid
gets finer (`refinement.py`). On a 12-layer transformer 60 of 735 steps gave the same bound as all of them.

P = T is Checkmate's problem (Jain et al., MLSys 2020, arXiv 1910.02653, section 4) with variables for retention only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from placemat.identical import LEAST_MEMBERS, identical_ops
from placemat.linear_model import LinearModel
from placemat.phases import Phases, Wants
from placemat.problem import Problem


@dataclass(frozen=True)
class Ramp:
    """Y[o,.] or y[v,.] in one phase: 0 before the first of `steps`, then the column of the last one passed."""

    steps: tuple[int, ...]
    columns: tuple[int, ...]

    def at(self, step: int) -> int | None:
        """Column at `step`, None where it is 0."""
        index = bisect_right(self.steps, step)
        return self.columns[index - 1] if index else None

    def by(self, step: int) -> int:
        """Column of the first of `steps` from `step` on, the last column after it: what Y[o,step] is at most."""
        index = min(bisect_left(self.steps, step), len(self.steps) - 1)
        return self.columns[index]

    @property
    def final(self) -> int:
        """X[o,p] or x[v,p]."""
        return self.columns[-1]


@dataclass
class Retention:
    """The model of one problem and family while it is built: its columns by their letters."""

    problem: Problem
    phases: Phases
    wants: Wants
    linear: LinearModel
    s: dict[tuple[int, int], int] = field(default_factory=dict)  # (value, phase) -> column
    Y: dict[tuple[int, int], Ramp] = field(default_factory=dict)  # (op, phase)
    y: dict[tuple[int, int], Ramp] = field(default_factory=dict)  # (value, phase)

    def columns_of(self, o: int, p: int) -> list[int]:
        """All columns of Y[o,.] and of the y of its results in phase p."""
        ramps = [self.Y[o, p], *(self.y[v, p] for v in self.problem.ops[o].outputs if (v, p) in self.y)]
        return [column for ramp in ramps for column in ramp.columns]

    def phase_of_value(self, v: int) -> int:
        return self.phases.phase_of[self.problem.values[v].producer]


def build_retention(problem: Problem, phases: Phases, wants: Wants) -> Retention:
    """Columns and all rows but (7); y and Y continuous."""
    model = Retention(problem, phases, wants, LinearModel("phased retention"))
    add_columns(model)
    add_use_rows(model)
    add_chain_rows(model)
    add_mono_rows(model)
    add_carry_and_once_rows(model)
    add_multi_rows(model)
    add_count_rows(model)
    add_dropped_rows(model)
    return model


def add_columns(model: Retention) -> None:
    """s[v,p] for p(o(v)) < p <= L(v); Y[o,t] and y[v,t] at the steps where they may rise."""
    problem, linear = model.problem, model.linear
    for v, value in enumerate(problem.values):
        for p in range(model.phase_of_value(v) + 1, model.wants.last_phase[v] + 1):
            if not value.pinned:
                model.s[v, p] = linear.add_column(f"s[v={v},p={p}]", is_integer=True)
    for (o, p), steps in sorted(model.wants.rises.items()):
        model.Y[o, p] = Ramp(steps, tuple(linear.add_column(f"Y[op={o},t={t}]") for t in steps))
        unpinned = [v for v in problem.ops[o].outputs if not problem.values[v].pinned]
        for v in unpinned:
            if len(unpinned) == 1:
                model.y[v, p] = model.Y[o, p]
            elif value_steps := model.wants.value_rises.get((v, p)):
                model.y[v, p] = Ramp(value_steps, tuple(linear.add_column(f"y[v={v},t={t}]") for t in value_steps))


def add_use_rows(model: Retention) -> None:
    """(1) use: s[v,p] + y[v,t] >= 1 for t in p, v in in(t), p(o(v)) < p."""
    for t, op in enumerate(model.problem.ops):
        p = model.phases.phase_of[t]
        for v in op.inputs:
            if (v, p) in model.s:
                terms = [(model.s[v, p], 1.0), *_taken(model, v, p, t)]
                model.linear.add_row(f"use[v={v},t={t}]", terms, lower=1.0)


def add_chain_rows(model: Retention) -> None:
    """(2) chain: s[v,p] + y[v,t] >= Y[w,t] for recomputable w, v in rin(w).

    At the steps where Y[w,.] may rise; in between the left side does not fall, by (3).
    """
    for (w, p), ramp in model.Y.items():
        for v in model.problem.ops[w].recompute_inputs:
            if model.problem.values[v].pinned:
                continue
            for t, column in zip(ramp.steps, ramp.columns, strict=True):
                terms = [(model.s[v, p], 1.0), *_taken(model, v, p, t), (column, -1.0)]
                model.linear.add_row(f"chain[v={v},op={w},t={t}]", terms, lower=0.0)


def add_mono_rows(model: Retention) -> None:
    """(3) mono: Y[o,t] >= Y[o,t-1] and y[v,t] >= y[v,t-1] within a phase."""
    for letter, ramps in (("op", model.Y), ("v", model.y)):
        for (index, p), ramp in ramps.items():
            if letter == "v" and ramp is model.Y.get((model.problem.values[index].producer, p)):
                continue
            for before, after, t in zip(ramp.columns, ramp.columns[1:], ramp.steps[1:], strict=False):
                model.linear.add_row(f"mono[{letter}={index},t={t}]", [(after, 1.0), (before, -1.0)], lower=0.0)


def add_carry_and_once_rows(model: Retention) -> None:
    """(4) carry: s[v,p+1] <= s[v,p] + x[v,p].  (5) once: s[v,p] + x[v,p] <= 1."""
    for (v, p), column in model.s.items():
        ramp = model.y.get((v, p))
        taken = [] if ramp is None else [(ramp.final, 1.0)]
        following = model.s.get((v, p + 1))
        if following is not None:
            model.linear.add_row(f"carry[v={v},p={p}]", [(column, 1.0), *taken, (following, -1.0)], lower=0.0)
        if taken:
            model.linear.add_row(f"once[v={v},p={p}]", [(column, 1.0), *taken], upper=1.0)


def add_multi_rows(model: Retention) -> None:
    """(6) multi: Y[o,t] >= y[v,t];  y[v,t] >= Y[o,t] + x[v,p] - 1."""
    for (v, p), ramp in model.y.items():
        op_ramp = model.Y[model.problem.values[v].producer, p]
        if ramp is op_ramp:
            continue
        for t, column in zip(ramp.steps, ramp.columns, strict=True):
            op_column = op_ramp.by(t)
            model.linear.add_row(f"multi_op[v={v},t={t}]", [(op_column, 1.0), (column, -1.0)], lower=0.0)
            if column != ramp.final:
                terms = [(column, 1.0), (op_column, -1.0), (ramp.final, -1.0)]
                model.linear.add_row(f"multi_copy[v={v},t={t}]", terms, lower=-1.0)


def add_count_rows(model: Retention) -> None:
    """(8) count: n = sum of s[v,p] over v of identical ops;  n = sum of X[o,p] over identical ops o;  n integer.

    In a deep net of equal blocks it matters how many of them keep a value and hardly which: branching on the count
    decides at once what branching on one block after the other never would. With many phases it is the timing that
    differs, so they are counted in families of two phases alone.
    """
    if model.phases.num_phases != 2:
        return
    problem = model.problem
    for ops in identical_ops(problem):
        for place in range(len(problem.ops[ops[0]].outputs)):
            values = [problem.ops[o].outputs[place] for o in ops]
            _count(model, f"count_kept[v={values[0]}]", [model.s[v, 1] for v in values if (v, 1) in model.s])
        _count(model, f"count_again[op={ops[0]}]", [model.Y[o, 1].final for o in ops if (o, 1) in model.Y])


def _count(model: Retention, name: str, columns: list[int]) -> None:
    if len(columns) >= LEAST_MEMBERS:
        count = model.linear.add_column(name, is_integer=True, upper=float(len(columns)))
        model.linear.add_row(name, [(count, -1.0), *((c, 1.0) for c in columns)], lower=0.0, upper=0.0)


def add_dropped_rows(model: Retention) -> None:
    """(9) dropped: s[v,p] = 0 where the border opens p;  Y[o,t] = 0 for t up to the border, which o(v) comes after.

    Raises:
        ValueError: values are dropped at the border, and no phase begins there.
    """
    problem = model.problem
    if not problem.dropped:
        return
    border = problem.border
    assert border is not None
    p = model.phases.phase_of[border]
    if model.phases.cuts[p] != border:
        raise ValueError(f"values are dropped at the border, so {border} must be among the cuts")
    for v in sorted(problem.dropped):
        if (v, p) in model.s:
            model.linear.add_row(f"dropped[v={v}]", [(model.s[v, p], 1.0)], upper=0.0)
    for o in sorted({problem.values[v].producer for v in problem.dropped}):
        ramp = model.Y.get((o, p))
        if ramp is not None and ramp.steps[0] <= border:
            model.linear.add_row(f"dropped[op={o}]", [(ramp.columns[0], 1.0)], upper=0.0)


def _taken(model: Retention, v: int, p: int, t: int) -> list[tuple[int, float]]:
    """y[v,t], at the next grid step, as terms: none for a value that cannot be recomputed."""
    ramp = model.y.get((v, p))
    if ramp is None:
        return []
    return [(ramp.by(t), 1.0)]
