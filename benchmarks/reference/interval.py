"""Retention intervals in CP-SAT, in the style of MOCCASIN (Bartan et al., ICML 2023, arXiv 2304.14463).

Op o may run `copies` times. Copy c begins at position b[o,c]; each value v that it makes stays from there to e[v,c].
Positions are staged: stage t has one for every op up to t, and op o can run in it at T(t) + o alone, with
T(t) = t (t+1) / 2. So first runs stand at T(t) + t, and recomputations in a stage go in index order.

  minimise  sum of c_o a[o,c] over c > 1         a[o,c]  copy c is there; a[o,1] = 1, a[o,c+1] <= a[o,c]
  intervals     b[o,c] <= e[v,c] < b[o,c+1]
  precedence    an op that runs at position b reads v:  b[o(v),d] < b <= e[v,d] for some copy d that is there
  memory        cumulative: at every position the bytes of the intervals over it are within the budget

Beyond the paper, to follow our referee: ops with several outputs, workspaces as intervals of one position, pinned
values from their first run to the end, values that may not be resident at the border. As in the paper there are two
solves: the first one makes the peak small, from no recomputation on, until it is within the budget; the second one
starts from its plan. CP-SAT counts bytes in units of the room over the static ones / 2^20, rounded up, and seconds in
units of 1e-9 of the step, rounded down: exact for small whole numbers, and a bound that holds to that rounding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from benchmarks.reference.answer import Answer
from benchmarks.reference.checkmate import OutOfTime, Readers
from placemat.problem import Problem
from placemat.schedule import Schedule, canonical

FINEST_BYTES = 2**20  # units of the room over the static bytes
FINEST_SECONDS = 10**9  # units of the step
WORKERS = 2

Copy = tuple[int, int]  # (op or value, copy from 0 on)


def first_position(step: int) -> int:
    """Where op `step` runs first: the end of stage `step`."""
    return step * (step + 1) // 2 + step


@dataclass
class Intervals:
    """The model of one problem, with the peak as a variable in units of `unit` bytes.

    Raises:
        OutOfTime: `deadline`, by the monotonic clock, came first.
    """

    problem: Problem
    room_bytes: int
    copies: int
    deadline: float
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    starts: dict[Copy, cp_model.LinearExprT] = field(default_factory=dict)
    is_there: dict[Copy, cp_model.IntVar] = field(default_factory=dict)  # of copies from 1 on
    ends: dict[Copy, cp_model.IntVar] = field(default_factory=dict)
    intervals: list[cp_model.IntervalVar] = field(default_factory=list)
    demands: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem = self.problem
        self.unit = max(1, self.room_bytes // FINEST_BYTES)
        self.horizon = first_position(problem.num_steps)
        self.readers = Readers(problem)
        for step in range(problem.num_steps):
            self._add_copies(step)
        for step in range(problem.num_steps):
            if time.monotonic() > self.deadline:
                raise OutOfTime(f"{step} of {problem.num_steps} ops were written down")
            self._add_reads(step)
        for v in sorted(problem.dropped):
            self._drop_at_border(v)
        self.peak = self.model.new_int_var(0, max(sum(self.demands), 1), "peak")
        self.model.add_cumulative(self.intervals, self.demands, self.peak)

    def _add_copies(self, step: int) -> None:
        """The runs of an op and the intervals of what it makes."""
        op, values = self.problem.ops[step], self.problem.values
        loose = [v for v in op.outputs if not values[v].pinned]
        pinned_bytes = sum(values[v].bytes for v in op.outputs if values[v].pinned)
        last_stage = max((self.readers.last[v] for v in loose), default=step)
        slots = [t * (t + 1) // 2 + step for t in range(step + 1, last_stage + 1)]
        count = self.copies if op.recomputable and slots else 1
        self.starts[step, 0] = first_position(step)
        self._occupy(first_position(step), self.horizon, pinned_bytes)
        self._occupy(first_position(step), first_position(step) + 1, op.workspace_bytes)
        for c in range(1, count):
            start = self.model.new_int_var_from_domain(cp_model.Domain.from_values(slots), f"b[{step},{c}]")
            self.starts[step, c] = start
            self.is_there[step, c] = there = self.model.new_bool_var(f"a[{step},{c}]")
            if c > 1:
                self.model.add_implication(there, self.is_there[step, c - 1])
            taken_bytes = op.recompute_workspace_bytes + pinned_bytes
            if taken_bytes:
                interval = self.model.new_optional_fixed_size_interval_var(start, 1, there, f"w[{step},{c}]")
                self._take(interval, taken_bytes)
        for v in loose:
            self._add_retention(step, v, count)

    def _add_retention(self, step: int, v: int, count: int) -> None:
        num_bytes = self.problem.values[v].bytes
        for c in range(count):
            start = self.starts[step, c]
            end = self.model.new_int_var(first_position(step), self.horizon, f"e[{v},{c}]")
            self.ends[v, c] = end
            # From the run to the end, both included.
            size = self.model.new_int_var(1, self.horizon + 1, f"size[{v},{c}]")
            if c == 0:
                self._take(self.model.new_interval_var(start, size, end + 1, f"r[{v},{c}]"), num_bytes)
            else:
                there = self.is_there[step, c]
                interval = self.model.new_optional_interval_var(start, size, end + 1, there, f"r[{v},{c}]")
                self._take(interval, num_bytes)
                self.model.add(self.ends[v, c - 1] < start).only_enforce_if(there)

    def _occupy(self, start: int, stop: int, num_bytes: int) -> None:
        if num_bytes:
            self._take(self.model.new_fixed_size_interval_var(start, stop - start, f"at {start}"), num_bytes)

    def _take(self, interval: cp_model.IntervalVar, num_bytes: int) -> None:
        self.intervals.append(interval)
        self.demands.append(-(-num_bytes // self.unit))

    def _add_reads(self, step: int) -> None:
        op = self.problem.ops[step]
        for c in range(self.copies):
            if (step, c) in self.starts:
                for v in op.inputs if c == 0 else op.recompute_inputs:
                    if not self.problem.values[v].pinned:
                        self._add_read(step, c, v)

    def _add_read(self, step: int, c: int, v: int) -> None:
        """Some copy of v is there when copy c of the op runs."""
        at, producer = self.starts[step, c], self.problem.values[v].producer
        condition = [self.is_there[step, c]] if c else []
        sources = [d for d in range(self.copies) if (v, d) in self.ends]
        if len(sources) == 1:
            self.model.add(self.ends[v, 0] >= at).only_enforce_if(condition)
            return
        covers = []
        for d in sources:
            cover = self.model.new_bool_var(f"cover[{step},{c},{v},{d}]")
            covers.append(cover)
            self.model.add(self.ends[v, d] >= at).only_enforce_if(cover)
            if d:
                self.model.add_implication(cover, self.is_there[producer, d])
                self.model.add(self.starts[producer, d] < at).only_enforce_if(cover)
        self.model.add_bool_or(covers).only_enforce_if(condition)

    def _drop_at_border(self, v: int) -> None:
        """No interval of v is over the first run of the op at the border."""
        border = self.problem.border
        assert border is not None
        for d in range(self.copies):
            if (v, d) not in self.ends:
                continue
            before = self.ends[v, d] < first_position(border)
            if d == 0:
                self.model.add(before)
                continue
            is_before = self.model.new_bool_var(f"before[{v},{d}]")
            self.model.add(before).only_enforce_if(is_before)
            after = self.starts[self.problem.values[v].producer, d] > first_position(border)
            self.model.add(after).only_enforce_if(~is_before)

    def hint_no_recomputation(self) -> None:
        """Start from every value held from its op to its last reader."""
        for (v, d), end in self.ends.items():
            last = max([self.problem.values[v].producer, *self.readers.first[v]])
            self.model.add_hint(end, first_position(last) if d == 0 else first_position(self.problem.num_steps - 1))
        for there in self.is_there.values():
            self.model.add_hint(there, False)


def interval(problem: Problem, budget_bytes: int, time_limit_s: float = 60.0, copies: int = 2) -> Answer:
    """The cheapest plan with at most `copies` runs of an op, unless the time is over before; the time limit covers
    writing down the model."""
    deadline = time.monotonic() + time_limit_s
    room_bytes = budget_bytes - problem.static_bytes
    if room_bytes < 0:
        return Answer(None, "infeasible", float("inf"))
    try:
        intervals = Intervals(problem, room_bytes, copies, deadline)
    except OutOfTime as error:
        return Answer(None, "none", None, str(error))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = 1
    room = room_bytes // intervals.unit
    lowest, status = _make_small(intervals, solver, room, deadline - time.monotonic())
    if lowest > room:
        note = "the first solve found nothing"
        if lowest < float("inf"):
            lowest_bytes = problem.static_bytes + int(lowest) * intervals.unit
            note = f"lowest peak in the first solve: {lowest_bytes:,} bytes or less"
        if status == cp_model.OPTIMAL:
            return Answer(None, "infeasible", float("inf"), note)
        return Answer(None, "none", None, note)
    first = _schedule(intervals, solver)
    return _make_cheap(intervals, solver, room, deadline - time.monotonic(), first)


def _make_small(
    intervals: Intervals, solver: cp_model.CpSolver, room: int, time_limit_s: float
) -> tuple[float, cp_model.CpSolverStatus]:
    """The first solve: the peak, at most as far down as the budget; its plan becomes the hint."""
    model = intervals.model
    over = model.new_int_var(0, max(sum(intervals.demands), 1), "over")
    model.add(over >= intervals.peak - room)
    intervals.hint_no_recomputation()
    model.minimize(over)
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return float("inf"), status
    lowest = room + solver.value(over)
    model.clear_hints()
    for index in range(len(model.proto.variables)):
        variable = model.get_int_var_from_proto_index(index)
        model.add_hint(variable, solver.value(variable))
    return lowest, status


def _schedule(intervals: Intervals, solver: cp_model.CpSolver) -> Schedule:
    """What the solver's solution runs, in the order of positions."""
    runs = [
        (solver.value(start), o)
        for (o, c), start in intervals.starts.items()
        if c == 0 or solver.value(intervals.is_there[o, c])
    ]
    return canonical(intervals.problem, [o for _, o in sorted(runs)])


def _make_cheap(
    intervals: Intervals, solver: cp_model.CpSolver, room: int, time_limit_s: float, first: Schedule
) -> Answer:
    """The second solve: recompute seconds within the budget; the plan of the first one if it finds none in its time."""
    problem, model = intervals.problem, intervals.model
    unit_s = max(problem.runtime_s, 1e-30) / FINEST_SECONDS
    model.add(intervals.peak <= room)
    costs = [int(problem.ops[o].recompute_s / unit_s) for o, _ in intervals.is_there]
    model.minimize(cp_model.LinearExpr.weighted_sum(list(intervals.is_there.values()), costs))
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(first, "feasible", None, "the plan of the first solve; the second one found none")
    bound_s = max(0.0, solver.best_objective_bound * unit_s)
    return Answer(_schedule(intervals, solver), "optimal" if status == cp_model.OPTIMAL else "feasible", bound_s)
