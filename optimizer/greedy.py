"""Greedy search over the set of kept values: a feasible plan in about a second, a low peak to start from, and the way
from what a relaxation keeps to a plan that fits.

With two phases a plan is a set of values to keep over the cut: what is missing is recomputed at most once, as late as
possible (`replay`; that recomputations follow from what is kept is observed in Checkmate, Jain et al., MLSys 2020,
section 4.7). Three moves, each judged by the plan's whole memory profile:

- *segments*: keep what crosses narrow places of the forward, as in Chen et al. (arXiv 1604.06174), but on any graph:
  the places are those where the fewest droppable bytes are alive;
- *drop* the value that takes most bytes away from over-full events per second of recomputation, until the plan fits;
- *keep* again, dearest second per byte first, whatever still fits.

The work is limited by a count of evaluated plans, not by a clock, so that equal problems get equal plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.replay import default_cut, may_be_dropped, replay
from placemat.schedule import Schedule, canonical

# Narrow places are tried at these shares of all local minima, from the narrowest on.
_SHARES = (0.0, 0.25, 0.6, 1.0)
_STRIDES = 10  # of these places, so many different shares are kept
_STARTS = 2  # how many starting sets a search goes on from
_TABU = 10  # moves for which a value whose drop did not help is left alone
_MOST_EVALUATIONS = 500
_MOST_OP_VISITS = 400_000  # evaluations times ops: keeps the search to seconds on large graphs
_LEAST_SECONDS = 2e-6  # what any recomputation costs at least: keeps ratios finite where ops cost nothing


@dataclass(frozen=True)
class Profile:
    """A plan as the search sees it: what runs, which runs are first ones, bytes at each run, recompute seconds."""

    computes: list[int]
    is_first: list[bool]
    memory_bytes: list[int]
    recompute_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.memory_bytes)

    def excess_bytes(self, budget_bytes: int) -> int:
        """Bytes over the budget, summed over all runs: 0 if the plan fits, and a slope to walk down if it does not."""
        return sum(m - budget_bytes for m in self.memory_bytes if m > budget_bytes)


def segments(problem: Problem, budget_bytes: int) -> Iterator[Schedule]:
    """Segment plans: the first that is found within the budget, if there is one; then the one with the lowest peak;
    then, if any, the cheapest one within the budget."""
    search = KeptSets(problem)
    plans: list[Profile] = []
    fitting: list[Profile] = []
    for kept in search.segment_sets() or [search.everything]:
        plans.append(search.profile(kept))
        if plans[-1].peak_bytes <= budget_bytes:
            fitting.append(plans[-1])
            if len(fitting) == 1:
                yield canonical(problem, plans[-1].computes)
    yield canonical(problem, min(plans, key=lambda plan: (plan.peak_bytes, plan.recompute_s)).computes)
    if fitting:
        yield canonical(problem, min(fitting, key=lambda plan: (plan.recompute_s, plan.peak_bytes)).computes)


def lowest_peak(problem: Problem) -> Schedule:
    """A plan with a low peak: the narrowest segments, then drops while the peak falls."""
    search = KeptSets(problem)
    sets = [search.everything, *search.segment_sets()]
    sets.sort(key=lambda kept: (search.profile(kept).peak_bytes, sorted(kept)))
    best = sets[0]
    for kept in sets[:_STARTS]:
        while search.evaluations < search.max_evaluations:
            target = search.profile(best).peak_bytes
            better = search.drop_until(kept, target - max(1, target // 200))
            if better is None:
                break
            best = kept = better
    return replay(problem, best, search.cut)


def repaired(problem: Problem, kept: frozenset[int], budget_bytes: int) -> Schedule | None:
    """A plan near `kept` within the budget: drop more until it fits, then keep again what still fits; None if not."""
    search = KeptSets(problem)
    fitting = search.drop_until(kept & search.everything, budget_bytes)
    if fitting is None:
        return None
    return replay(problem, search.keep_more(fitting, budget_bytes), search.cut)


def _strides(most: int) -> list[int]:
    """1, 2, 3, ... and then ever fewer: _STRIDES of them up to `most`."""
    return sorted({round(most ** (i / (_STRIDES - 1))) for i in range(_STRIDES)})


class KeptSets:
    """Evaluates kept sets of one problem, and counts how often."""

    def __init__(self, problem: Problem, max_evaluations: int | None = None) -> None:
        self.problem = problem
        self.cut = default_cut(problem)
        self.max_evaluations = max_evaluations or min(_MOST_EVALUATIONS, _MOST_OP_VISITS // len(problem.ops))
        self.evaluations = 0
        self.bytes = [v.bytes for v in problem.values]
        self.producer = [v.producer for v in problem.values]
        self.pinned = [v.pinned for v in problem.values]
        self.output_bytes = [sum(self.bytes[v] for v in op.outputs) for op in problem.ops]
        self.droppable = [
            v
            for v in range(len(self.bytes))
            if self.producer[v] < self.cut and may_be_dropped(problem, v) and v not in problem.dropped
        ]
        self.everything = frozenset(self.droppable)
        self.missable = self.everything | problem.dropped
        self.read_after = sorted({v for op in problem.ops[self.cut :] for v in op.inputs} & self.missable)
        self.profiles: dict[frozenset[int], Profile] = {}

    def profile(self, kept: frozenset[int]) -> Profile:
        if kept not in self.profiles:
            self.evaluations += 1
            self.profiles[kept] = self._evaluate(kept)
            if len(self.profiles) > 1024:
                del self.profiles[next(iter(self.profiles))]
        return self.profiles[kept]

    def recompute_s(self, kept: frozenset[int]) -> float:
        """Recompute seconds of a kept set, without a look at its memory: much quicker than a profile."""
        ops, missing = self.problem.ops, self.missable - kept
        again: set[int] = set()
        stack = [self.producer[v] for v in self.read_after if v in missing]
        while stack:
            w = stack.pop()
            if w not in again:
                again.add(w)
                stack.extend(self.producer[u] for u in ops[w].recompute_inputs if u in missing)
        return sum(ops[w].recompute_s for w in sorted(again))

    def segment_sets(self) -> list[frozenset[int]]:
        """Keep what crosses every k-th narrow place of the forward, for several narrownesses and k."""
        last_use = {v: t for t in range(self.cut) for v in self.problem.ops[t].inputs}
        crossing_bytes = self._crossing_bytes(last_use)
        places = [
            t
            for t in range(1, self.cut - 1)
            if crossing_bytes[t] <= crossing_bytes[t - 1] and crossing_bytes[t] < crossing_bytes[t + 1]
        ]
        ranked = sorted(crossing_bytes[t] for t in places)
        sets: dict[frozenset[int], None] = {}
        for share in _SHARES if places else ():
            width = ranked[round(share * (len(ranked) - 1))]
            narrow = [t for t in places if crossing_bytes[t] <= width]
            for stride in _strides(max(1, len(narrow) // 2)):
                for offset in (0, stride // 2):
                    sets[self._crossing(narrow[offset::stride], last_use)] = None
        return list(sets)

    def _crossing_bytes(self, last_use: dict[int, int]) -> list[int]:
        change = [0] * (self.cut + 1)
        for v in self.droppable:
            change[self.producer[v]] += self.bytes[v]
            change[max(self.producer[v], last_use.get(v, 0))] -= self.bytes[v]
        return list(accumulate(change))

    def _crossing(self, places: list[int], last_use: dict[int, int]) -> frozenset[int]:
        """Droppable values that are produced at or before a place and read after it."""

        def crosses(v: int) -> bool:
            i = bisect_left(places, self.producer[v])
            return i < len(places) and places[i] < last_use.get(v, -1)

        return frozenset(v for v in self.droppable if crosses(v))

    def drop_until(self, kept: frozenset[int], budget_bytes: int) -> frozenset[int] | None:
        """Drop values, the most helpful first, until the plan fits; None if no drop helps any more."""
        tabu: dict[int, int] = {}
        move = 0
        while (excess := self.profile(kept).excess_bytes(budget_bytes)) > 0:
            for v in self._helpful(kept, budget_bytes):
                if tabu.get(v, -1) >= move:
                    continue
                if self.evaluations >= self.max_evaluations:
                    return None
                if self.profile(kept - {v}).excess_bytes(budget_bytes) < excess:
                    kept, move = kept - {v}, move + 1
                    break
                tabu[v] = move + _TABU
            else:
                return None
        return kept

    def keep_more(self, kept: frozenset[int], budget_bytes: int) -> frozenset[int]:
        """Keep further values while the plan fits and gets cheaper, dearest per byte first, until nothing changes.

        Values are tried alone and with all other results of their op, without which the op would run again anyway.
        """
        kept = self._hold_instead(kept, budget_bytes)

        def worth(group: frozenset[int]) -> float:
            (op,) = {self.producer[v] for v in group}
            return self.problem.ops[op].recompute_s / max(1, sum(self.bytes[v] for v in group))

        changed = True
        while changed:
            changed = False
            for group in sorted(self._groups(self.everything - kept), key=lambda g: (-worth(g), sorted(g))):
                if self.evaluations >= self.max_evaluations:
                    return kept
                more = self.profile(kept | group)
                if more.peak_bytes <= budget_bytes and more.recompute_s < self.profile(kept).recompute_s:
                    kept, changed = kept | group, True
        return kept

    def _hold_instead(self, kept: frozenset[int], budget_bytes: int) -> frozenset[int]:
        """What is kept once recomputations that the budget does not call for are left out: a quick first pass."""
        schedule = drop_needless(self.problem, replay(self.problem, kept, self.cut), budget_bytes)
        again = set(schedule.recomputes)
        held = kept | {v for v in self.everything if self.producer[v] not in again}
        return held if self.profile(held).excess_bytes(budget_bytes) == 0 else kept

    def _groups(self, missing: frozenset[int]) -> list[frozenset[int]]:
        groups: dict[frozenset[int], None] = {}
        for v in sorted(missing):
            groups[frozenset((v,))] = None
            groups[frozenset(u for u in self.problem.ops[self.producer[v]].outputs if u in missing)] = None
        return list(groups)

    def _helpful(self, kept: frozenset[int], budget_bytes: int) -> list[int]:
        """Kept values by over-full bytes freed per second of recomputation, best first, as an estimate."""
        profile = self.profile(kept)
        over = [0, *accumulate(int(m > budget_bytes) for m in profile.memory_bytes)]
        last, first = self._touches(profile)
        recomputed = {o for o, is_first in zip(profile.computes, profile.is_first, strict=True) if not is_first}
        missing = (self.everything - kept) | self.problem.dropped
        scores = []
        for v in kept:
            if v in first and (full := over[first[v]] - over[last[v] + 1]) > 0:
                seconds = self._chain_seconds(v, missing, recomputed) + _LEAST_SECONDS
                scores.append((-full * self.bytes[v] / seconds, v))
        return [v for _, v in sorted(scores)]

    def _touches(self, profile: Profile) -> tuple[dict[int, int], dict[int, int]]:
        """Per value, the last run before the cut and the first run after it that produces or reads it."""
        last: dict[int, int] = {}
        first: dict[int, int] = {}
        for i, o in enumerate(profile.computes):
            op = self.problem.ops[o]
            for v in (*(op.inputs if profile.is_first[i] else op.recompute_inputs), *op.outputs):
                if i < self.cut:
                    last[v] = i
                else:
                    first.setdefault(v, i)
        return last, first

    def _chain_seconds(self, v: int, missing: frozenset[int], recomputed: Iterable[int]) -> float:
        """Seconds of the ops that have to run again to bring `v` back, those that do so anyway left out."""
        done = set(recomputed)
        seconds = 0.0
        stack = [v]
        while stack:
            w = self.producer[stack.pop()]
            if w not in done:
                done.add(w)
                seconds += self.problem.ops[w].recompute_s
                stack.extend(u for u in self.problem.ops[w].recompute_inputs if u in missing)
        return seconds

    def _evaluate(self, kept: frozenset[int]) -> Profile:
        """`replay` and `simulate` in one, without the referee's checks; the search is long, this must be short."""
        computes = self._computes(kept)
        ops, size = self.problem.ops, self.bytes
        started = [False] * len(ops)
        is_first = []
        for o in computes:
            is_first.append(not started[o])
            started[o] = True
        freed = self._freed_bytes(computes, is_first)
        memory, live, seconds = [], self.problem.static_bytes, 0.0
        for i, o in enumerate(computes):
            op = ops[o]
            if is_first[i]:
                memory.append(live + self.output_bytes[o] + op.workspace_bytes)
                live += self.output_bytes[o]
            else:
                memory.append(live + self.output_bytes[o] + op.recompute_workspace_bytes)
                live += sum(size[v] for v in op.outputs if not self.pinned[v])
                seconds += op.recompute_s
            live -= freed[i]
        return Profile(computes, is_first, memory, seconds)

    def _computes(self, kept: frozenset[int]) -> list[int]:
        ops, producer = self.problem.ops, self.producer
        missing = set(self.droppable) - kept
        computes = list(range(self.cut))
        for step in range(self.cut, len(ops)):
            stack = [v for v in ops[step].inputs if v in missing]
            again: set[int] = set()
            while stack:
                w = producer[stack.pop()]
                if w not in again:
                    again.add(w)
                    stack.extend(u for u in ops[w].recompute_inputs if u in missing)
            for w in sorted(again):
                computes.append(w)
                missing.difference_update(ops[w].outputs)
            if step == self.problem.border:
                missing.update(self.problem.dropped)
            computes.append(step)
        return computes

    def _freed_bytes(self, computes: list[int], is_first: list[bool]) -> list[int]:
        """Per run, the unpinned bytes that go right after it: touched there, and not again before a new run."""
        ops, size, pinned = self.problem.ops, self.bytes, self.pinned
        freed = [0] * len(computes)
        wanted = [False] * len(size)
        for i in range(len(computes) - 1, -1, -1):
            op = ops[computes[i]]
            reads = op.inputs if is_first[i] else op.recompute_inputs
            touched = (*op.outputs, *(v for v in reads if v not in op.outputs))
            freed[i] = sum(size[v] for v in touched if not wanted[v] and not pinned[v])
            for v in op.outputs:
                wanted[v] = False
            for v in reads:
                wanted[v] = True
        return freed
