"""Row (7) of the phased retention MILP: one memory row per event.

At step t the events are (t,k), recompute k, for k ascending, then (t,t), run t. For e = (t,k):

  now(z,e)   of a y or Y of op j:  z[t] if j <= k else z[t-1]
  left(w,e)  w is still to be recomputed:  X[w] - Y[w,t-1] if w >= k else X[w] - Y[w,t]
  own(t,t) = ws_t + bytes of out(t)
  own(t,k) = d (rws_k + bytes of the outputs of k that are pinned or no longer wanted),  d = Y[k,t] - Y[k,t-1]

live(v,e), for v produced before t:
  pinned                                        1
  first run in this phase                       1 while a first-run use at t' >= t in p remains, then s[v,p+1]
  earlier, a first-run use at t' >= t remains   s[v,p] + now(y[v],e)
  earlier, otherwise                            a variable in [0,1] >= W - (x[v,p] - now(y[v],e))
                                                for W = s[v,p+1] and W = left(w,e) of each reader w recomputable in p
  an unpinned, wanted output of k at (t,k)      a variable >= d and >= the line above that applies

A row (t,t) stands if t is on the grid; a row (t,k) also needs t - 1, or the start of the phase, to be. Rows (t,k) are
added where the referee finds the event above the budget.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

from placemat.milp import Ramp, Retention

Terms = tuple[tuple[int, float], ...]  # (column, coefficient)
Event = tuple[int, int]  # (step, op that runs): (t, k) recomputes k before step t, (t, t) runs t

# One byte unit is the budget divided by this: coefficients then are at most 1e4.
BYTE_SCALE = 1e4


@dataclass(frozen=True)
class Live:
    """A share of an event's memory: bytes * (constant + terms), where the bracket is 0 or 1 in integers."""

    value: int | None  # None for what the run itself needs
    num_bytes: int
    constant: float
    terms: Terms


@dataclass
class MemoryRows:
    """Adds memory rows to a model.

    Attributes:
        model: columns and rows (1) to (6).
        limit_bytes: M.
        unit_bytes: bytes per unit of the rows.
    """

    model: Retention
    limit_bytes: int
    unit_bytes: float
    _live_columns: dict[tuple[int, tuple[Terms, ...]], int] = field(default_factory=dict)
    _last_uses: dict[tuple[int, int], int] = field(default_factory=dict)
    _by_phase: list[list[tuple[int, int]]] = field(default_factory=list)  # (value, last step that may want it)

    def __post_init__(self) -> None:
        model = self.model
        for v, steps in enumerate(model.wants.uses):
            for t in steps:
                self._last_uses[v, model.phases.phase_of[t]] = t
        for p in range(model.phases.num_phases):
            self._by_phase.append([])
            for v, value in enumerate(model.problem.values):
                if value.bytes and (value.pinned or model.wants.last_phase[v] >= p >= model.phase_of_value(v)):
                    self._by_phase[p].append((v, self._last_want(v, p)))

    def _last_want(self, v: int, p: int) -> int:
        """Last step of phase p at which v may be live."""
        model = self.model
        if model.problem.values[v].pinned or p < model.wants.last_phase[v]:
            return model.phases.last_step(p)
        readers = (model.Y.get((w, p)) for w in model.wants.readers[v])
        return max([self._last_uses.get((v, p), -1), *(ramp.steps[-1] for ramp in readers if ramp is not None)])

    def add(self, event: Event) -> None:
        """sum_v m_v live(v,e) + own(e) <= M."""
        shares = self.shares(event)
        constant = self.model.problem.static_bytes + sum(share.num_bytes * share.constant for share in shares)
        if constant + sum(share.num_bytes for share in shares if share.terms) <= self.limit_bytes:
            return
        coefficients: dict[int, float] = {}
        for share in shares:
            for column, coefficient in share.terms:
                scaled = share.num_bytes * coefficient / self.unit_bytes
                coefficients[column] = coefficients.get(column, 0.0) + scaled
        name = f"memory[t={event[0]},op={event[1]}]"
        self.model.linear.add_row(
            name, ((c, a) for c, a in coefficients.items() if a), upper=(self.limit_bytes - constant) / self.unit_bytes
        )

    def add_cover(self, event: Event, held: Collection[int | None]) -> None:
        """The values `held` (None: what the run needs) not all at once: sum of live(v,e) <= their number - 1.

        Valid when together they need more than the limit. It says in small integers what a memory row says in bytes,
        where the solver's tolerances cannot tell a byte too many.
        """
        coefficients: dict[int, float] = {}
        room = -1.0
        for share in self.shares(event):
            if share.value in held:
                room += 1.0 - share.constant
                for column, coefficient in share.terms:
                    coefficients[column] = coefficients.get(column, 0.0) + coefficient
        name = f"cover[t={event[0]},op={event[1]},row={len(self.model.linear.row_names)}]"
        self.model.linear.add_row(name, ((c, a) for c, a in coefficients.items() if a), upper=room)

    def shares(self, event: Event) -> list[Live]:
        """Every value that may be live at the event, and what the event itself needs."""
        t, k = event
        values = self.model.problem.values
        p = self.model.phases.phase_of[t]
        shares = [self._own(event)]
        for v, last_want in self._by_phase[p]:
            producer = values[v].producer
            if producer < t and (t <= last_want or producer == k):
                constant, terms = self._live(v, event)
                if constant or terms:
                    shares.append(Live(v, values[v].bytes, constant, terms))
        return shares

    def _own(self, event: Event) -> Live:
        t, k = event
        op, values = self.model.problem.ops[k], self.model.problem.values
        if k == t:
            return Live(None, op.workspace_bytes + sum(values[v].bytes for v in op.outputs), 1.0, ())
        last_phase, p = self.model.wants.last_phase, self.model.phases.phase_of[t]
        extra_bytes = sum(values[v].bytes for v in op.outputs if values[v].pinned or last_phase[v] < p)
        return Live(None, op.recompute_workspace_bytes + extra_bytes, 0.0, self._rise(event))

    def _rise(self, event: Event) -> Terms:
        """d = Y[k,t] - Y[k,t-1]."""
        t, k = event
        ramp = self.model.Y[k, self.model.phases.phase_of[t]]
        return _difference(ramp.at(t), ramp.at(t - 1))

    def _live(self, v: int, event: Event) -> tuple[float, Terms]:
        """live(v,e) as constant and terms."""
        model, (t, k) = self.model, event
        producer, p = model.problem.values[v].producer, model.phases.phase_of[t]
        is_used = self._last_uses.get((v, p), -1) >= t
        if model.problem.values[v].pinned:
            return 1.0, ()
        if model.phases.phase_of[producer] == p:
            return (1.0, ()) if is_used else (0.0, _difference(model.s.get((v, p + 1)), None))
        ramp = model.y.get((v, p))
        now = None if ramp is None else ramp.at(t if producer <= k else t - 1)
        used = _difference(model.s[v, p], None) + _difference(now, None)
        if producer != k:
            return (0.0, used) if is_used else self._largest(v, *self._wants(v, event, ramp, now))
        if not is_used:
            wants, missing = self._wants(v, event, ramp, now)
            return self._largest(v, [self._rise(event), *(want + missing for want in wants)], ())
        if ramp is model.Y[k, p]:
            return 0.0, used  # s + y[t] >= d already
        return self._largest(v, [self._rise(event), used], ())

    def _wants(self, v: int, event: Event, ramp: Ramp | None, now: int | None) -> tuple[list[Terms], Terms]:
        """Every W that is not always 0, and now(y[v],e) - x[v,p]."""
        model, (t, k) = self.model, event
        p = model.phases.phase_of[t]
        wants = [_difference(model.s.get((v, p + 1)), None)]
        for w in model.wants.readers[v]:
            again = model.Y.get((w, p))
            if again is not None:
                wants.append(_difference(again.final, again.at(t - 1 if w >= k else t)))
        return [want for want in wants if want], () if ramp is None else _difference(now, ramp.final)

    def _largest(self, v: int, wants: list[Terms], missing: Terms) -> tuple[float, Terms]:
        """The largest of 0 and every want + missing: the want itself if it is alone and nothing is missing, else a
        column in [0,1]."""
        if not wants:
            return 0.0, ()
        if len(wants) == 1 and not missing:
            return 0.0, wants[0]
        key = (v, tuple(want + missing for want in wants))
        if key not in self._live_columns:
            linear = self.model.linear
            column = linear.add_column(f"live[v={v},{len(self._live_columns)}]")
            for want in key[1]:
                terms = chain(((column, 1.0),), ((c, -a) for c, a in want))
                linear.add_row(f"live[v={v},row={len(linear.row_names)}]", terms, lower=0.0)
            self._live_columns[key] = column
        return 0.0, ((self._live_columns[key], 1.0),)


def _difference(plus: int | None, minus: int | None) -> Terms:
    """plus - minus, where None is 0."""
    if plus == minus:
        return ()
    return (() if plus is None else ((plus, 1.0),)) + (() if minus is None else ((minus, -1.0),))
