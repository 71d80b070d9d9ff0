"""Contest: all contenders on one workload, each in its own process, examined first and then timed in turns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.contest.planner import PlanningSession
from benchmarks.contest.results import REFERENCE, Point, Results
from benchmarks.contest.table import MORE, verdict
from benchmarks.contest.worker import StepSession, Worker, WorkerFailed
from benchmarks.peers import CONTENDERS, Eager, PlacematPlans, Setting
from benchmarks.timing import turns
from benchmarks.work import WORKS

log = logging.getLogger("benchmarks")
CONTESTED = 4  # batches in all for what is looked at more closely


@dataclass(frozen=True)
class Effort:
    """How much is run.

    Attributes:
        rounds: of a batch; in each, every one of its contenders runs one step.
        together: contenders in a batch beside eager.
        frontier_points: plans of ours that no peer asks for.
        time_limit_s: of the solver, for one plan; the frontier gets three times as much.
    """

    rounds: int = 9
    together: int = 6
    frontier_points: int = 8
    time_limit_s: float = 20.0


@dataclass(frozen=True)
class Contest:
    """One workload. Results are written after each stage and each batch, and what they have is not run again.

    Attributes:
        results: filled in place.
        path: file of the results; plans and what eager's step made go into a folder beside it.
    """

    results: Results
    path: Path
    effort: Effort

    @property
    def folder(self) -> Path:
        return self.path.with_suffix(".plans")

    @property
    def _recorded(self) -> Path:
        return self.folder / "eager_step.pt"

    def run(self, peers: Sequence[str]) -> None:
        """Examine eager and the peers, plan for their peaks, time everybody in turns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._worker() as reference:
            self._examine_reference(reference)
        for peer in peers:
            self._survey(peer)
        self._plan(peers)
        groups = self._untimed([*peers, PlacematPlans.name])
        self._time_all(groups)
        for _ in range(CONTESTED - 1):
            self._time_all(self._contested(peers))
        for contender in (Eager.name, *peers, PlacematPlans.name):
            self._sum_op_costs(contender)

    def _time_all(self, groups: Sequence[Sequence[Point]]) -> None:
        for number, batch in enumerate(_batches(groups, self.effort.together)):
            log.info("%s: batch %d, %s", self.results.workload, number + 1, ", ".join(batch))
            self._time(batch)

    def _worker(self) -> Worker:
        return Worker(StepSession, self.results.workload)

    def _keep(self, point: Point) -> None:
        self.results.add(point)
        self.results.save(self.path)

    @property
    def _eager(self) -> Setting:
        [setting] = Eager().settings(WORKS[self.results.workload])
        return setting

    # ------------------------------------------------------------------------------------------------------ examining

    def _examine_reference(self, reference: Worker) -> None:
        reference.call("prepare", Eager.name, self._eager)
        reference.call("record", self._recorded)
        point = _unexamined(Eager.name, self._eager)
        self._keep(self._examined(reference, point))

    def _examined(self, worker: Worker, point: Point) -> Point:
        """Compare a step with eager's and measure its peak."""
        comparison = worker.call("compare", self._recorded)
        peak_bytes = worker.call("peak_bytes")
        return replace(point, comparison=comparison, peak_bytes=peak_bytes)

    def _survey(self, peer: str) -> None:
        """Examine all settings of a peer that have no result yet, one after the other in one process."""
        settings = CONTENDERS[peer].settings(WORKS[self.results.workload])
        points = [_unexamined(peer, setting) for setting in settings]
        waiting = [point for point in points if point.key not in self.results.points]
        while waiting:
            with self._worker() as worker:  # a new process after a failure: nobody knows what it left behind
                while waiting:
                    point = waiting.pop(0)
                    point = self._tried(worker, point)
                    self._keep(point)
                    if point.failure:
                        break

    def _tried(self, worker: Worker, point: Point) -> Point:
        log.info("%s: %s", self.results.workload, point.key)
        try:
            program = worker.call("prepare", point.contender, _setting(point))
            return self._examined(worker, replace(point, program=program))
        except WorkerFailed as error:
            return replace(point, failure=_shortened(str(error)))

    # ------------------------------------------------------------------------------------------------------- planning

    def _plan(self, peers: Sequence[str]) -> None:
        """Plans: keep everything, an ample budget, the frontier, and one for each peak that a peer has."""
        with Worker(PlanningSession, self.results.workload) as planner:
            if not self.results.has_frontier:
                self._plan_frontier(planner)
            peaks = {point.peak_bytes for point in self.results.of(peers) if point.peak_bytes is not None}
            for peak_bytes in sorted(peaks, reverse=True):
                if self.results.ours_at(peak_bytes) is None:
                    self._planned(planner, peak_bytes, None)

    def _planned(self, planner: Worker, budget_bytes: int | None, fraction: float | None) -> Point | None:
        what = f"{budget_bytes} bytes" if fraction is None else f"fraction {fraction:g}"
        log.info("%s: planning for %s", self.results.workload, what)
        try:
            point: Point = planner.call("plan", self.folder, budget_bytes, fraction, self.effort.time_limit_s)
        except WorkerFailed as error:
            name = PlacematPlans.name
            self._keep(Point(name, what, name, {}, failure=_shortened(str(error))))
            return None
        self._keep(point)
        return point

    def _plan_frontier(self, planner: Worker) -> None:
        """Keep everything, first of all, which measures the operators; an ample budget; and the curve."""
        whole = self._planned(planner, None, 1.0)
        if whole is not None and whole.plan is not None and whole.plan.eager_bound_bytes is not None:
            self._planned(planner, whole.plan.eager_bound_bytes, None)
        try:
            points = planner.call("frontier", self.folder, self.effort.frontier_points, 3 * self.effort.time_limit_s)
        except WorkerFailed as error:
            log.warning("%s: no frontier: %s", self.results.workload, error)
            return
        for point in points:
            if point.key not in self.results.points:
                self._keep(point)
        self.results.has_frontier = True
        self.results.save(self.path)

    # ---------------------------------------------------------------------------------------------------- op costs

    def _sum_op_costs(self, contender: str) -> None:
        """Sum the costs of operators of all that ran and is not summed yet, one after the other in one process."""
        ran = [p for p in self.results.of([contender]) if p.peak_bytes is not None and p.op_seconds is None]
        distinct = [point for point in ran if self.results.twin(point) is point]
        if not distinct:
            return
        with self._worker() as worker:
            for point in distinct:
                log.info("%s: operators of %s", self.results.workload, point.key)
                try:
                    worker.call("prepare", point.contender, _setting(point))
                    self._keep(replace(point, op_seconds=worker.call("op_seconds")))
                except WorkerFailed as error:
                    log.warning("%s: no operators of %s: %s", self.results.workload, point.key, error)

    # --------------------------------------------------------------------------------------------------------- timing

    def _untimed(self, contenders: Sequence[str]) -> list[list[Point]]:
        """What is still to be timed together: a peer's point with our plan for its peak; then plans of ours alone.

        What trains on wrong gradients comes last: its seconds are worth least, should a run be interrupted.
        """
        groups: list[list[Point]] = []
        for point in sorted(self.results.of(contenders), key=lambda point: point.has_wrong_gradients):
            group = [self.results.twin(p) for p in self._with_ours(point) if not p.failure]
            keys = {p.key for p in group}
            known = [set(batch) for batch in self.results.batches] + [set(_as_batch(other)) for other in groups]
            if keys and not any(keys <= other for other in known):
                groups.append(group)
        return groups

    def _contested(self, peers: Sequence[str]) -> list[list[Point]]:
        """Pairs in which ours seems to cost more, until they have had the rounds of `CONTESTED` batches.

        So does the ample budget, under which we run what eager runs: that it costs nothing shows in many rounds only.
        """
        groups: dict[frozenset[str], list[Point]] = {}
        for point in self.results.of(peers):
            if verdict(self.results, point) != MORE:
                continue
            theirs, ours = pair = [self.results.twin(p) for p in self._with_ours(point)]
            difference = self.results.difference(ours, theirs)
            assert difference is not None, "the verdict rests on it"
            if difference.rounds < CONTESTED * self.effort.rounds:
                groups[frozenset(_as_batch(pair))] = pair
        ample = self.results.ample()
        if ample is not None and ample.peak_bytes is not None and not self._has_rounds(ample):
            groups[frozenset([ample.key])] = [self.results.twin(ample)]
        return list(groups.values())

    def _has_rounds(self, point: Point) -> bool:
        overhead = self.results.overhead(point)
        return overhead is not None and overhead.rounds >= CONTESTED * self.effort.rounds

    def _with_ours(self, point: Point) -> list[Point]:
        if point.contender == PlacematPlans.name or point.peak_bytes is None:
            return [point]
        ours = self.results.ours_at(point.peak_bytes)
        return [point] if ours is None else [point, ours]

    def _time(self, batch: Mapping[str, Point]) -> None:
        """Run one batch, each contender and eager in a new process, and keep its seconds."""
        with contextlib.ExitStack() as stack:
            reference = stack.enter_context(self._worker())
            workers = {key: stack.enter_context(self._worker()) for key in batch}  # they start side by side
            ready = {key: workers[key] for key, point in batch.items() if self._is_ready(workers[key], point)}
            try:
                reference.call("prepare", Eager.name, self._eager)
                seconds = interleave({REFERENCE: reference} | ready, self.effort.rounds)
            except WorkerFailed as error:
                log.warning("%s: a batch was given up: %s", self.results.workload, error)
                return
        if len(seconds) > 1:
            self.results.batches.append(seconds)
            self.results.save(self.path)

    def _is_ready(self, worker: Worker, point: Point) -> bool:
        """Prepare a contender, and examine it if nobody did."""
        if point.peak_bytes is None:
            point = self._tried(worker, point)
            self._keep(point)
            return not point.failure
        try:
            worker.call("prepare", point.contender, _setting(point))
        except WorkerFailed as error:
            log.warning("%s: %s ran before, and now failed: %s", self.results.workload, point.key, error)
            return False
        return True


def interleave(workers: Mapping[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a step of each worker, round by round, one worker at a time.

    As `timing.interleave`, which has the reasons, but with each contender in its own process.
    """
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for name, is_counted in turns(workers, rounds):
        workers[name].call("step")
        elapsed = workers[name].call("step")
        if is_counted:
            seconds[name].append(elapsed)
    return seconds


def _unexamined(contender: str, setting: Setting) -> Point:
    return Point(contender, setting.label, setting.curve, setting.values)


def _setting(point: Point) -> Setting:
    return Setting(point.label, point.curve, point.values)


def _as_batch(group: Sequence[Point]) -> dict[str, Point]:
    return {point.key: point for point in group}


def _batches(groups: Sequence[Sequence[Point]], together: int) -> Iterator[dict[str, Point]]:
    """Groups put together while they have at most `together` members; a group is never divided."""
    batch: dict[str, Point] = {}
    for group in groups:
        joined = batch | _as_batch(group)
        if batch and len(joined) > together:
            yield batch
            joined = _as_batch(group)
        batch = joined
    if batch:
        yield batch


def _shortened(text: str, limit: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + " ..."
