"""Results: what was run on one workload, as a JSON file that later runs add to."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest.comparison import Comparison
from benchmarks.peers.contender import Value

REFERENCE = "eager"
# 1.4826 median absolute deviations are a standard deviation of normal noise; the standard error of a median is 1.2533
# times that of a mean. Twice that, for 95 %.
_ENOUGH_BATCHES = 3  # to see how processes differ
_MARGIN = 2 * 1.2533 * 1.4826


@dataclass(frozen=True)
class PlanFigures:
    """What was known of a plan before it ran. `planning_seconds`: capture, costs and solving; of a whole frontier."""

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_overhead: float
    lower_bound: float
    gap: float
    status: str
    family: str
    floor_bytes: int
    floor_proven: bool
    keep_everything_bytes: int
    eager_bound_bytes: int | None
    runs_original: bool
    ops: int
    solve_seconds: float
    capture_seconds: float
    planning_seconds: float


@dataclass(frozen=True)
class Point:
    """One setting of one contender.

    Attributes:
        contender, label, curve, values: see `peers.Setting`.
        program: equal for points of a contender that run the same; "" if unknown.
        peak_bytes: measured, of a whole step; None if it has not run, or failed.
        comparison: with eager's step.
        failure: why it did not run, beginning with the error's type; "" otherwise.
        plan: of ours.
        op_seconds: what its step's operators cost, see `op_costs`.
    """

    contender: str
    label: str
    curve: str
    values: dict[str, Value]
    program: str = ""
    peak_bytes: int | None = None
    comparison: Comparison | None = None
    failure: str = ""
    plan: PlanFigures | None = None
    op_seconds: float | None = None

    @property
    def key(self) -> str:
        return f"{self.contender}: {self.label}"

    @property
    def has_wrong_gradients(self) -> bool:
        """Whether its step is known to make other gradients, or another loss, than eager's."""
        return self.comparison is not None and not self.comparison.has_right_gradients


@dataclass(frozen=True)
class Estimate:
    """A median over rounds and its margin of noise, about 95 %; `rounds` tells how much it rests on.

    Two processes that run the same differ by up to 2 % (two of eager's U-Net, 15 rounds; 0.3 % of the chain's), and
    keep to that. Rounds of one batch do not show it; of several batches, each with new processes, the margin is at
    least what the spread of their medians makes it.
    """

    value: float
    margin: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        value = statistics.median(samples)
        deviation = statistics.median(abs(s - value) for s in samples)
        return cls(value, _MARGIN * deviation / math.sqrt(len(samples)), len(samples))

    @classmethod
    def of_batches(cls, batches: Sequence[Sequence[float]]) -> Estimate:
        within = cls.of([sample for batch in batches for sample in batch])
        if len(batches) < _ENOUGH_BATCHES:
            return within
        between = 2 * statistics.stdev(statistics.median(batch) for batch in batches) / math.sqrt(len(batches))
        return replace(within, margin=max(within.margin, between))


@dataclass
class Results:
    """Everything of one workload.

    Attributes:
        workload, title, machine: what ran where.
        points: by their keys.
        batches: seconds by key of a point, and of `REFERENCE`, round by round, of what ran in turns.
        has_frontier: plans that no peer's peak asks for are made.
    """

    workload: str
    title: str
    machine: dict[str, Any]
    points: dict[str, Point] = field(default_factory=dict)
    batches: list[dict[str, list[float]]] = field(default_factory=list)
    has_frontier: bool = False

    def add(self, point: Point) -> None:
        self.points[point.key] = point

    def of(self, contenders: Iterable[str]) -> list[Point]:
        names = set(contenders)
        return [point for point in self.points.values() if point.contender in names]

    def twin(self, point: Point) -> Point:
        """The first point that runs the same; itself, if none does."""
        if not point.program:
            return point
        same = (p for p in self.of([point.contender]) if p.program == point.program and not p.failure)
        return next(same, point)

    def overhead(self, point: Point) -> Estimate | None:
        """Seconds of a step over those of eager's in the same round, less one; None if it was not timed."""
        key = self.twin(point).key
        ratios = [
            [own / reference - 1 for own, reference in zip(batch[key], batch[REFERENCE], strict=True)]
            for batch in self.batches
            if key in batch
        ]
        return Estimate.of_batches(ratios) if ratios else None

    def overhead_of_ops(self, point: Point) -> float | None:
        """The same by what operators cost alone; None if they were not summed."""
        own = self.twin(point).op_seconds
        reference = next((p.op_seconds for p in self.of([REFERENCE])), None)
        return None if own is None or reference is None else own / reference - 1

    def difference(self, point: Point, other: Point) -> Estimate | None:
        """What `point` costs more than `other`, as a part of eager's step, in rounds that had both; None without."""
        key, other_key = self.twin(point).key, self.twin(other).key
        both = [batch for batch in self.batches if key in batch and other_key in batch]
        differences = [
            [(a - b) / eager for a, b, eager in zip(batch[key], batch[other_key], batch[REFERENCE], strict=True)]
            for batch in both
        ]
        return Estimate.of_batches(differences) if differences else None

    def ours_at(self, budget_bytes: int, name: str = "placemat") -> Point | None:
        """Our plan for exactly this budget, or the failure to make one."""
        return self.points.get(f"{name}: {budget_bytes} bytes")

    def ample(self, name: str = "placemat") -> Point | None:
        """Our plan under which the original forward runs."""
        return next((p for p in self.of([name]) if p.plan is not None and p.plan.runs_original), None)

    def eager_seconds(self) -> float | None:
        """Median seconds of eager's step."""
        seconds = [s for batch in self.batches for s in batch[REFERENCE]]
        return statistics.median(seconds) if seconds else None

    def save(self, path: Path) -> None:
        """Write JSON; what was there is replaced in one go."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1) + "\n"
        beside = path.with_suffix(".part")
        beside.write_text(text)
        os.replace(beside, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        content = json.loads(path.read_text())
        points = {key: _point(values) for key, values in content.pop("points").items()}
        return cls(**content, points=points)


def _point(values: dict[str, Any]) -> Point:
    comparison, plan = values.pop("comparison"), values.pop("plan")
    return Point(
        **values,
        comparison=None if comparison is None else Comparison(**comparison),
        plan=None if plan is None else PlanFigures(**plan),
    )


def this_machine() -> dict[str, Any]:
    """Where figures come from."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "placemat": version("placemat"),
    }


def _cpu_name() -> str:
    """The processor's name as Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
