"""MilestoneDescent: better plans near the one at hand, on steps of any size.

Large neighborhood search (Shaw, CP 1998) on the milestone model: what is held and made again is free for some ops, or
in some parts of the step, and as in the best plan otherwise. A region of the step has a milestone at every run that is
over the budget without recomputation, the rest of it a few; it is left after a round of neighborhoods without a better
plan. A neighborhood whose solution the referee finds over the budget is searched again with the milestones and bursts
that were missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from placemat.baselines import save_all
from placemat.incumbent import Incumbent
from placemat.milestones import Key, Milestones
from placemat.problem import Problem
from placemat.schedule import Schedule, canonical
from placemat.shave import shaved
from placemat.simulate import Simulation, running_bytes, simulate
from placemat.submodel import Rows

MOST_MILESTONE_OPS = 40_000  # milestones times ops of a region's model: Python writes that down in half a second
SPARSE = 4  # milestones outside of a region
SIZES = (1500, 2500, 4000)  # free columns; larger ones after each round of neighborhoods without a better plan
WORK = 0.3  # CP-SAT's deterministic seconds for one
ROUND = 9  # neighborhoods
MOST_RETRIES = 8
SEED = 0
NEAR = 0.05  # what is over the budget by a larger share is not shaved


Free = Callable[[Milestones], np.ndarray]  # of a model's columns, those that are free


class MilestoneDescent:
    """The search, one region after the other.

    Attributes:
        incumbent: has a schedule.
    """

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent, self.problem = incumbent, incumbent.problem
        self.rng = np.random.default_rng(SEED)
        self.bursts: set[tuple[int, int]] = set()  # (op, step before which it is recomputed)
        self.more: set[int] = set()  # milestones that were missing
        running = running_bytes(save_all(self.problem), simulate(self.problem, save_all(self.problem)))
        self.full = [t for t, num_bytes in enumerate(running) if num_bytes > incumbent.budget_bytes]
        self.near = _neighbors(self.problem)

    def run(self, is_done: Callable[[], bool]) -> None:
        """Until `is_done()`, or no size of neighborhood gave a better plan in any region."""
        size = 0
        while size < len(SIZES):
            before_s = self.incumbent.seconds
            for region in self._regions():
                self._search(region, SIZES[size], is_done)
                if is_done():
                    return
            size = 0 if self.incumbent.seconds < before_s and len(self._regions()) > 1 else size + 1

    def _regions(self) -> list[list[int]]:
        """Over-full steps in stretches, half overlapping; first those before which most seconds are spent again."""
        length = max(4, MOST_MILESTONE_OPS // self.problem.num_steps)
        if len(self.full) <= length:
            return [self.full]
        regions = [self.full[i : i + length] for i in range(0, len(self.full) - length // 2, length // 2)]
        again = self._seconds_before()
        spent = [float(again[region[0] : region[-1] + 1].sum()) for region in regions]
        order = sorted(range(len(regions)), key=lambda i: (-spent[i], i))
        return [regions[i] for i in order if spent[i]]

    def _seconds_before(self) -> np.ndarray:
        """Per step, the seconds that the best plan recomputes right before it."""
        assert self.incumbent.schedule is not None
        seconds, started = np.zeros(self.problem.num_steps + 1), 0
        for o in self.incumbent.schedule.computes:
            if o == started:
                started += 1
            else:
                seconds[started] += self.problem.ops[o].recompute_s
        return seconds

    def _model(self, region: list[int]) -> tuple[Milestones, Rows]:
        model = Milestones(self.problem, self.incumbent.budget_bytes, self._at(region))
        return self._with_bursts(model)

    def _at(self, region: list[int]) -> tuple[int, ...]:
        """The milestones of a region's model."""
        sparse = self.full[:: max(1, len(self.full) // SPARSE)]
        inside = [t for t in self.more if region[0] <= t <= region[-1]]
        return tuple(sorted({*region, *sparse, *inside}))

    def _extended(self, model: Milestones, region: list[int]) -> tuple[Milestones, Rows]:
        """The model with the milestones and bursts that have come to be known."""
        return self._with_bursts(model) if self._at(region) == model.at else self._model(region)

    def _with_bursts(self, model: Milestones) -> tuple[Milestones, Rows]:
        for o, t in sorted(self.bursts):
            p = model.part(t) - 1
            if p >= 0 and model.at[p] == t and (o, p) in model.again:
                model.add_burst(o, p)
        return model, Rows.of(model.linear, model.costs)

    def _search(self, region: list[int], size: int, is_done: Callable[[], bool]) -> None:
        model, rows = self._model(region)
        solution = self._solution(model)
        failures = kind = 0
        while failures < ROUND and not is_done():
            free = self._free(model, region, solution, size, kind)
            kind += 1
            failures += 1
            for _ in range(MOST_RETRIES):
                inside = _between(model, region[0], region[-1] + 1)
                better = rows.improved(solution, free(model) & inside, WORK)
                if better is None:
                    break
                is_taken, knows_more = self._take(model, better)
                if knows_more:
                    model, rows = self._extended(model, region)
                if is_taken:
                    failures = 0
                if is_taken or knows_more:
                    solution = self._solution(model)
                if not knows_more or is_done():
                    break

    def _solution(self, model: Milestones) -> np.ndarray:
        assert self.incumbent.schedule is not None
        return model.solution(self.incumbent.schedule.computes)

    def _free(self, model: Milestones, region: list[int], solution: np.ndarray, size: int, kind: int) -> Free:
        """Function from a model to what is free in it: about `size` columns of this one."""
        ops, parts = _places(model)
        if kind % 3 == 0:
            count = np.bincount(parts, minlength=len(model.at) + 1)
            middle, half = int(self.rng.integers(1, len(model.at) + 1)), 0
            while count[max(0, middle - half) : middle + half + 1].sum() < size and half < len(model.at):
                half += 1
            steps = (0, *model.at, self.problem.num_steps)
            low, high = steps[max(0, middle - half)], steps[min(middle + half + 1, len(steps) - 1)]
            return lambda m: _between(m, low, high)
        count = np.bincount(ops[_between(model, region[0], region[-1] + 1)], minlength=self.problem.num_steps)
        chosen: set[int] = set()
        total = 0
        for o in self._around(model, solution, 1 if kind % 3 == 1 else 6):
            if o not in chosen:
                chosen.add(o)
                total += int(count[o])
            if total >= size:
                break
        members = np.array(sorted(chosen))
        return lambda m: np.isin(_places(m)[0], members)

    def _around(self, model: Milestones, solution: np.ndarray, seeds: int) -> Iterator[int]:
        """Ops around some that are recomputed: all of them, in the end."""
        again = sorted({o for (o, _), column in model.again.items() if solution[column] > 0.5})
        rest = [*self.rng.permutation(again).tolist(), *self.rng.permutation(self.problem.num_steps).tolist()]
        seen: set[int] = set()
        queue = rest[:seeds]
        for seed in [*rest[seeds:], None]:
            while queue:
                o = queue.pop(0)
                if o not in seen:
                    seen.add(o)
                    yield o
                    queue += self.rng.permutation(sorted(self.near[o] - seen)).tolist()[:3]
            if seed is not None:
                queue = [seed]

    def _take(self, model: Milestones, solution: np.ndarray) -> tuple[bool, bool]:
        """Whether a solution led to a better plan, and whether it was over the budget and the next model knows."""
        budget_bytes, before_s = self.incumbent.budget_bytes, self.incumbent.seconds
        schedule = canonical(self.problem, model.computes(solution))
        simulation = simulate(self.problem, schedule)
        knows_more = False
        if simulation.peak_bytes > budget_bytes:
            knows_more = self._learn(schedule, simulation)
            if knows_more:
                return False, True
            schedule = self._shaved(schedule, simulation)
        self.incumbent.offer(schedule)
        return self.incumbent.seconds < before_s, knows_more

    def _shaved(self, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Within the budget, if it may get there and be cheap."""
        if simulation.peak_bytes > (1 + NEAR) * self.incumbent.budget_bytes:
            return schedule
        return shaved(self.problem, schedule, self.incumbent.budget_bytes)

    def _learn(self, schedule: Schedule, simulation: Simulation) -> bool:
        """Milestones at the runs over the budget, and bursts at recomputations before these."""
        before = len(self.more), len(self.bursts)
        started = 0
        for o, num_bytes in zip(schedule.computes, running_bytes(schedule, simulation), strict=True):
            if num_bytes > self.incumbent.budget_bytes:
                self.more.add(started)
                if o != started:
                    self.bursts.add((o, started))
            started += o == started
        self.more.discard(self.problem.num_steps)
        return before != (len(self.more), len(self.bursts))


def _neighbors(problem: Problem) -> list[set[int]]:
    """Per op, those whose results it reads when it recomputes and those that so read its own."""
    near: list[set[int]] = [set() for _ in problem.ops]
    for o, op in enumerate(problem.ops):
        for v in op.recompute_inputs:
            near[o].add(problem.values[v].producer)
            near[problem.values[v].producer].add(o)
    return near


def _places(model: Milestones) -> tuple[np.ndarray, np.ndarray]:
    """Op and part of every column."""
    ops = np.zeros(len(model.linear.column_names), dtype=np.int64)
    parts = np.zeros_like(ops)
    by_value: tuple[dict[Key, int], ...] = (model.held, model.still)
    for columns in by_value:
        for (v, p), column in columns.items():
            ops[column], parts[column] = model.problem.values[v].producer, p
    for (o, p), column in model.again.items():
        ops[column], parts[column] = o, p
    return ops, parts


def _between(model: Milestones, low: int, high: int) -> np.ndarray:
    """Columns of the parts that begin from one step on and before another."""
    starts = np.array([0, *model.at])
    begin = starts[_places(model)[1]]
    return (begin >= low) & (begin < high)
