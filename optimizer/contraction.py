"""Contraction: a smaller problem of ops that recompute together, for steps too long to decide op by op.

Two decisions are taken beforehand, both of which cost next to nothing:

- a value of few bytes is kept, and an op that produces no other is not recomputed;
- an op whose results only one other op reads when it recomputes, and that is no cheaper to keep than the results of
  that reader, runs again right before the reader, with it or not at all. (Keeping the reader's results instead
  takes no more bytes and saves both runs.)

What is left is a Problem like any other; `expand` makes a schedule of the original from one of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from placemat.phases import Phases
from placemat.problem import Problem, ProblemOp
from placemat.replay import carried
from placemat.schedule import Schedule, canonical

EXACT_STEPS = 200
# All values that are kept for being small are at most this share of the bytes that could be dropped.
SMALL_SHARE = 1e-4


@dataclass(frozen=True)
class Contraction:
    """A smaller problem and the way back.

    Attributes:
        problem: the same steps and values; ops in groups are recomputable only as their last one, whose seconds,
            reads and workspace are those of the group.
        original: what was contracted.
        groups: last op -> ops that run again together, ascending.
        small_bytes: values of at most so many bytes are kept.
    """

    problem: Problem
    original: Problem
    groups: dict[int, tuple[int, ...]]
    small_bytes: int

    def expand(self, schedule: Schedule) -> Schedule:
        """The schedule of the original problem."""
        computes: list[int] = []
        seen: set[int] = set()
        for op in schedule.computes:
            computes.extend(self.groups.get(op, (op,)) if op in seen else (op,))
            seen.add(op)
        return canonical(self.original, computes)

    def carried(self, schedule: Schedule, cuts: Sequence[int]) -> set[tuple[int, int]]:
        """What a schedule of the original carries over the cuts, as `replay.carried` tells, in terms of this problem:
        results inside a group stand for those of its last op, which take no more bytes."""
        last = {o: reader for reader, group in self.groups.items() for o in group}
        held = carried(self.original, schedule, cuts)
        for v, p in tuple(held):
            op = self.original.values[v].producer
            if last.get(op, op) != op:
                held.remove((v, p))
                held.update((u, p) for u in self.problem.ops[last[op]].outputs)
        return held

    def describe(self) -> str:
        """What was decided beforehand, in words that may follow the name of a family."""
        grouped = sum(len(group) for group in self.groups.values()) - len(self.groups)
        parts = [f"values of at most {self.small_bytes:,} bytes kept"] if self.small_bytes else []
        parts += [f"{grouped} ops run again only together with their reader"] if grouped else []
        return "; ".join(parts)

    def family(self, phases: Phases) -> str:
        """The family that is left, in words."""
        decided = self.describe()
        return f"{phases.family} ({decided})" if decided else phases.family


def contract(problem: Problem, phases: Phases, *, is_tight: bool = False) -> Contraction:
    """Take the decisions at the head of this file for the schedules of a family.

    A step of at most EXACT_STEPS ops is left as it is: every one of them can be decided. `is_tight` leaves alone ops
    that have small results of their own which are read later, such as normalizations: a group needs more memory at
    once than its ops one by one, which the smallest budgets cannot spare.
    """
    if problem.num_steps <= EXACT_STEPS:
        return Contraction(problem, problem, {}, 0)
    builder = _Builder(problem, phases, _small_bytes(problem), is_tight=is_tight)
    for op in range(problem.num_steps):
        if (reader := builder.reader_to_join(op)) is not None:
            builder.join(op, reader)
    return builder.contraction()


def _small_bytes(problem: Problem) -> int:
    """The most bytes of a value such that all values up to it are SMALL_SHARE of what could be dropped."""
    sizes = sorted(v.bytes for v in problem.values if not v.pinned and problem.ops[v.producer].recomputable)
    sums = list(accumulate(sizes))
    count = bisect_right(sums, SMALL_SHARE * sums[-1]) if sums else 0
    return sizes[count - 1] if count else 0


class _Builder:
    """Groups as they grow: op -> the ops that run again with it, itself last."""

    def __init__(self, problem: Problem, phases: Phases, small_bytes: int, *, is_tight: bool) -> None:
        self.problem, self.phases, self.small_bytes, self.is_tight = problem, phases, small_bytes, is_tight
        self.uses: list[list[int]] = [[] for _ in problem.values]
        self.readers: list[list[int]] = [[] for _ in problem.values]
        self.groups: dict[int, list[int]] = {}
        self.joined: dict[int, int] = {}
        for step, op in enumerate(problem.ops):
            for v in op.inputs:
                self.uses[v].append(step)
        self.decides = [False] * problem.num_steps  # recomputable, with a result that is worth a decision
        self.wanted = [False] * len(problem.values)
        for step in range(problem.num_steps - 1, -1, -1):
            self._look_at(step)

    def _look_at(self, step: int) -> None:
        op, phase_of = self.problem.ops[step], self.phases.phase_of
        for v in op.outputs:
            is_read_later = any(phase_of[u] > phase_of[step] for u in self.uses[v]) or bool(self.readers[v])
            self.wanted[v] = is_read_later and not self.is_always_there(v)
        if op.recomputable and any(self.wanted[v] for v in op.outputs):
            self.decides[step] = True
            for v in op.recompute_inputs:
                self.readers[v].append(step)

    def is_always_there(self, v: int) -> bool:
        value = self.problem.values[v]
        return (
            value.pinned
            or not self.problem.ops[value.producer].recomputable
            or (value.bytes <= self.small_bytes and v not in self.problem.dropped)
        )

    def reader_to_join(self, op: int) -> int | None:
        """The only reader of op's results, if op should run again with it or not at all."""
        phase_of, outputs = self.phases.phase_of, self.problem.ops[op].outputs
        if not self.decides[op] or self.problem.dropped.intersection(outputs):
            return None
        wanted = [v for v in outputs if self.wanted[v]]
        readers = {w for v in wanted for w in self.readers[v]}
        later = outputs if self.is_tight else wanted
        if len(readers) != 1 or any(phase_of[u] > phase_of[op] for v in later for u in self.uses[v]):
            return None
        (reader,) = readers
        if phase_of[reader] != phase_of[op]:
            return None
        reader_bytes = sum(self.problem.values[v].bytes for v in self.problem.ops[reader].outputs if self.wanted[v])
        return reader if sum(self.problem.values[v].bytes for v in wanted) >= reader_bytes else None

    def join(self, op: int, reader: int) -> None:
        self.groups[reader] = sorted({*self.groups.pop(op, [op]), *self.groups.get(reader, [reader])})
        self.joined[op] = reader

    def contraction(self) -> Contraction:
        ops = tuple(self._op(step) for step in range(self.problem.num_steps))
        groups = {op: tuple(group) for op, group in self.groups.items()}
        return Contraction(replace(self.problem, ops=ops), self.problem, groups, self.small_bytes)

    def _op(self, step: int) -> ProblemOp:
        op = self.problem.ops[step]
        if step in self.joined or not (self.decides[step] or self.problem.dropped.intersection(op.outputs)):
            return replace(op, recomputable=False)
        if step not in self.groups:
            return op
        group = [self.problem.ops[o] for o in self.groups[step]]
        inside = {v for o in group for v in o.outputs}
        reads = sorted({v for o in group for v in o.recompute_inputs} - inside)
        return replace(
            op,
            runtime_s=sum(o.runtime_s for o in group),
            far_s=sum(o.far_s for o in group),
            recompute_inputs=tuple(reads),
            recompute_workspace_bytes=self._workspace_bytes(self.groups[step]),
        )

    def _workspace_bytes(self, group: list[int]) -> int:
        """The most bytes that the group needs at any of its runs beside what it reads, less the results of the last."""
        values, ops = self.problem.values, self.problem.ops
        last_read = {v: o for o in group for v in ops[o].recompute_inputs}
        inside = {v for o in group for v in ops[o].outputs}
        live = peak = 0
        for o in group:
            outputs = ops[o].outputs
            peak = max(peak, live + ops[o].recompute_workspace_bytes + sum(values[v].bytes for v in outputs))
            live += sum(values[v].bytes for v in outputs if last_read.get(v, -1) > o)
            live -= sum(values[v].bytes for v in inside.intersection(ops[o].recompute_inputs) if last_read[v] == o)
        return max(0, peak - sum(values[v].bytes for v in ops[group[-1]].outputs))
