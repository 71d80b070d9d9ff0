"""Rotor: optimal persistent checkpointing of a heterogeneous chain (Beaumont et al. 2019, arXiv 1911.13214).

Forward is made a chain by cutting it at block borders (`segments.borders_of_blocks`); a stage's "activation" are all
values that cross into the next one, so that under skip connections a value may count in several stages, as in any
linearized graph. Ops of backward belong, in their order, to the last stage of which they or later ones read a value.

  C(s,t,m)     least recompute seconds of stages s..t, forward and backward, given the input of s and m bytes for more
  a[l], A[l]   bytes of what leaves stage l; of all that backward wants from it, a[l] included
  f[l], b[l]   bytes that running it takes beside that, forward and backward

  C(s,t,m) = min of
    keep all of s     u[s] + C(s+1, t, m - A[s])                          if A[s] + max(f[s], b[s]) <= m
    keep its input    u[s] + .. + u[k-1] + C(k, t, m - a[k-1]) + C(s, k-1, m),   k = s+1 .. t
                                                       if max of a[j-1] + a[j] + f[j] over s <= j < t is at most m

"Persistent": what is kept in forward stays until its own backward. Memory is counted in `SLOTS` steps, rounded up. The
chain's bytes are only near those of the graph; so the plan of *every* m is laid out and simulated, and the cheapest one
that the referee finds to fit is returned. The dynamic program is exact for chains, up to its slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.reference.answer import Answer, cheapest
from benchmarks.reference.segments import borders_of_blocks, crossing_values
from placemat.problem import Problem
from placemat.replay import default_cut, may_be_dropped
from placemat.schedule import Schedule, canonical

SLOTS = 300
MAX_STAGES = 200


@dataclass(frozen=True)
class Forward:
    """Run stage `stage`, and keep all that its backward wants, or only what leaves it."""

    stage: int
    keeps_all: bool


@dataclass(frozen=True)
class Backward:
    """Run the backward of stage `stage`."""

    stage: int


Sequence = tuple[Forward | Backward, ...]


@dataclass(frozen=True)
class Chain:
    """Forward as stages; bytes as in the head of this file.

    Attributes:
        starts: first step of every stage, and the cut.
        backward_stage: per step from the cut on, the stage that it belongs to; never rises.
        leaves: per stage, the values that cross into later ones.
        wanted: per stage, its own values that backward reads.
        seconds: per stage, of the ops that may run again.
    """

    problem: Problem
    starts: tuple[int, ...]
    backward_stage: tuple[int, ...]
    leaves: tuple[tuple[int, ...], ...]
    wanted: tuple[tuple[int, ...], ...]
    seconds: np.ndarray
    leaving_bytes: np.ndarray
    wanted_bytes: np.ndarray
    forward_bytes: np.ndarray
    backward_bytes: np.ndarray

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, problem: Problem, max_stages: int = MAX_STAGES) -> Chain:
        cut = default_cut(problem)
        starts = (0, *borders_of_blocks(problem, max_stages), cut)
        stage_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        crossing = crossing_values(problem)
        leaves = tuple(crossing[stop] for stop in starts[1:])
        wanted_at: list[set[int]] = [set() for _ in starts[1:]]
        for op in problem.ops[cut:]:
            for v in op.inputs:
                if problem.values[v].producer < cut and may_be_dropped(problem, v):
                    wanted_at[stage_of[problem.values[v].producer]].add(v)
        wanted = tuple(tuple(sorted(values)) for values in wanted_at)
        backward_stage = _backward_stages(problem, cut, stage_of)
        ranges = list(pairwise(starts))
        return cls(
            problem,
            starts,
            backward_stage,
            leaves,
            wanted,
            np.array([sum(op.recompute_s for op in problem.ops[a:b] if op.recomputable) for a, b in ranges]),
            np.array([_dropped_bytes(problem, values) for values in leaves]),
            np.array([_dropped_bytes(problem, {*w, *own}) for w, own in zip(wanted, leaves, strict=True)]),
            np.array([_transient_bytes(problem, a, b) for a, b in ranges]),
            _backward_bytes(problem, cut, backward_stage, len(ranges)),
        )


def rotor(problem: Problem, budget_bytes: int) -> Answer:
    """The cheapest persistent plan of the chain that fits by the referee."""
    chain = Chain.of(problem)
    return cheapest(problem, budget_bytes, (lay_out(chain, sequence) for sequence in sequences(chain)))


def sequences(chain: Chain) -> Iterator[Sequence]:
    """The optimal sequence for every number of slots, each different from the one before."""
    if chain.num_stages == 0:
        return
    highest = int(chain.wanted_bytes.sum() + chain.leaving_bytes.max())
    highest += int(max(chain.forward_bytes.max(), chain.backward_bytes.max()))
    slot_bytes = max(1, -(-highest // SLOTS))
    table = _Table(chain, slot_bytes)
    previous: Sequence | None = None
    for slots in range(SLOTS + 1):
        if np.isfinite(table.cost[0, chain.num_stages - 1, slots]):
            sequence = tuple(table.sequence(0, chain.num_stages - 1, slots))
            if sequence != previous:
                yield sequence
            previous = sequence


class _Table:
    """C(s,t,m) for every m in slots, and the choice that it comes from: 0 for keep all, else k."""

    def __init__(self, chain: Chain, slot_bytes: int) -> None:
        n = chain.num_stages
        self.seconds = chain.seconds
        self.wanted, self.leaving = (-(-sizes // slot_bytes) for sizes in (chain.wanted_bytes, chain.leaving_bytes))
        run = -(-np.maximum(chain.forward_bytes, chain.backward_bytes) // slot_bytes)
        forward = -(-chain.forward_bytes // slot_bytes)
        before = np.concatenate([[0], self.leaving[:-1]])
        self.least_all = self.wanted + run
        self.least_pass = before + self.leaving + forward
        self.cost = np.full((n, n, SLOTS + 1), np.inf)
        self.choice = np.full((n, n, SLOTS + 1), -1, dtype=np.int16)
        for length in range(n):
            for s in range(n - length):
                self._fill(s, s + length)

    def _fill(self, s: int, t: int) -> None:
        cost, choice = self.cost[s, t], self.choice[s, t]
        rest = self._shifted(s + 1, t, self.wanted[s]) if s < t else np.zeros(SLOTS + 1)
        least = min(int(self.least_all[s]), SLOTS + 1)
        cost[least:] = rest[least:]
        choice[least:] = np.where(np.isfinite(cost[least:]), 0, -1)
        passed = 0.0
        least = 0
        for k in range(s + 1, t + 1):
            passed += self.seconds[k - 1]
            # The input of s is none of m's bytes.
            inside = self.least_pass[k - 1] - (self.leaving[s - 1] if k - 1 == s and s > 0 else 0)
            least = max(least, int(inside))
            split = passed + self._shifted(k, t, self.leaving[k - 1]) + self.cost[s, k - 1]
            split[: min(least, SLOTS + 1)] = np.inf
            better = split < cost
            cost[better], choice[better] = split[better], k

    def _shifted(self, s: int, t: int, slots: int) -> np.ndarray:
        """C(s, t, m - slots), infinite where that is negative."""
        shifted = np.full(SLOTS + 1, np.inf)
        if slots <= SLOTS:
            shifted[slots:] = self.cost[s, t, : SLOTS + 1 - slots]
        return shifted

    def sequence(self, s: int, t: int, slots: int) -> Iterator[Forward | Backward]:
        k = int(self.choice[s, t, slots])
        assert k >= 0
        if k == 0:
            yield Forward(s, True)
            if s < t:
                yield from self.sequence(s + 1, t, slots - int(self.wanted[s]))
            yield Backward(s)
            return
        for stage in range(s, k):
            yield Forward(stage, False)
        yield from self.sequence(k, t, slots - int(self.leaving[k - 1]))
        yield from self.sequence(s, k - 1, slots)


def lay_out(chain: Chain, sequence: Sequence) -> Schedule:
    """The sequence as a schedule: a stage's first run is that of all its ops, a later one of those that are needed."""
    problem = chain.problem
    cut = chain.starts[-1]
    computes: list[int] = []
    num_started = 0
    backward = cut
    for item in sequence:
        if isinstance(item, Backward):
            while backward < problem.num_steps and chain.backward_stage[backward - cut] >= item.stage:
                computes.append(backward)
                backward += 1
        elif item.stage == num_started:
            computes.extend(range(chain.starts[num_started], chain.starts[num_started + 1]))
            num_started += 1
        else:
            computes.extend(_needed_ops(chain, item))
    computes.extend(range(backward, problem.num_steps))
    return canonical(problem, computes)


def _needed_ops(chain: Chain, item: Forward) -> list[int]:
    """Ops of the stage that have to run again for what leaves it, or also for what its backward wants."""
    problem, start = chain.problem, chain.starts[item.stage]
    stack = [*chain.leaves[item.stage], *(chain.wanted[item.stage] if item.keeps_all else ())]
    ops: set[int] = set()
    while stack:
        v = stack.pop()
        o = problem.values[v].producer
        if o >= start and o not in ops and may_be_dropped(problem, v):
            ops.add(o)
            stack.extend(problem.ops[o].recompute_inputs)
    return sorted(ops)


def _backward_stages(problem: Problem, cut: int, stage_of: np.ndarray) -> tuple[int, ...]:
    """Per step from the cut on, the last stage of which it or a later one reads a value."""
    stages: list[int] = []
    latest = 0
    for op in reversed(problem.ops[cut:]):
        made = [problem.values[v].producer for v in op.inputs if may_be_dropped(problem, v)]
        latest = max([latest, *(int(stage_of[o]) for o in made if o < cut)])
        stages.append(latest)
    return tuple(reversed(stages))


def _dropped_bytes(problem: Problem, values: set[int] | tuple[int, ...]) -> int:
    return sum(problem.values[v].bytes for v in values if may_be_dropped(problem, v))


def _transient_bytes(problem: Problem, start: int, stop: int) -> int:
    """Most bytes of values that live and die between the two steps, and of workspaces, while one of them runs."""
    live = _live_bytes(problem, start, stop)
    return max((num_bytes for num_bytes in live), default=0)


def _live_bytes(problem: Problem, start: int, stop: int) -> list[int]:
    """Per step, bytes of the unpinned values made from `start` on and not read from `stop` on, with its workspace."""
    last: dict[int, int] = {}
    for step, op in enumerate(problem.ops[start:], start):
        last.update((v, step) for v in (*op.inputs, *op.outputs) if problem.values[v].producer >= start)
    change = np.zeros(stop - start + 1, dtype=np.int64)
    for v, step in last.items():
        value = problem.values[v]
        if value.producer < stop and step < stop and not value.pinned:
            change[value.producer - start] += value.bytes
            change[step + 1 - start] -= value.bytes
    held = np.cumsum(change)[:-1]
    return [int(b) + op.workspace_bytes for b, op in zip(held, problem.ops[start:stop], strict=True)]


def _backward_bytes(problem: Problem, cut: int, backward_stage: tuple[int, ...], num_stages: int) -> np.ndarray:
    """Per stage, most bytes of what backward itself makes while an op of it runs."""
    most = np.zeros(num_stages, dtype=np.int64)
    for stage, num_bytes in zip(backward_stage, _live_bytes(problem, cut, problem.num_steps), strict=True):
        most[stage] = max(most[stage], num_bytes)
    return most
