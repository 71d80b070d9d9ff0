"""Planner: makes our plans for a workload, in a process of its own, and writes them to files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import placemat
from benchmarks.contest.results import PlanFigures, Point
from benchmarks.peers.placemat_plans import program_of, setting_for
from benchmarks.work import WORKS


@dataclass(frozen=True)
class PlanningSession:
    """Commands of a worker that plans. Each plan is made from the start: captured, costed and solved."""

    work_name: str

    def plan(self, folder: Path, budget_bytes: int | None, fraction: float | None, time_limit_s: float) -> Point:
        """The plan for a budget, or for a part of the way from the floor to keeping everything.

        Raises:
            BudgetTooSmall, PlacematError: as `placemat.plan`.
        """
        work = WORKS[self.work_name]
        workload = work.build()
        start_s = time.perf_counter()
        plan = placemat.plan(
            workload.model,
            budget_bytes,
            workload.args,
            workload.kwargs,
            budget_fraction=fraction,
            loss_fn=workload.loss,
            time_limit_s=time_limit_s,
            progress=False,
        )
        return _written(plan, folder, time.perf_counter() - start_s)

    def frontier(self, folder: Path, points: int, time_limit_s: float) -> Sequence[Point]:
        """The points of `placemat.frontier`; the seconds are those of the whole curve."""
        work = WORKS[self.work_name]
        workload = work.build()
        start_s = time.perf_counter()
        curve = placemat.frontier(
            workload.model,
            workload.args,
            workload.kwargs,
            points=points,
            loss_fn=workload.loss,
            time_limit_s=time_limit_s,
            progress=False,
        )
        seconds = time.perf_counter() - start_s
        return [_written(plan, folder, seconds) for plan in curve.plans]


def _written(plan: placemat.Plan, folder: Path, planning_seconds: float) -> Point:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plan.budget_bytes}.json"
    plan.save(path)
    setting = setting_for(plan, path)
    return Point(
        contender=setting.curve,
        label=setting.label,
        curve=setting.curve,
        values=setting.values,
        program=program_of(plan),
        plan=PlanFigures(
            budget_bytes=plan.budget_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            predicted_overhead=plan.overhead,
            lower_bound=plan.lower_bound,
            gap=plan.gap,
            status=plan.status,
            family=plan.family,
            floor_bytes=plan.floor_bytes,
            floor_proven=plan.floor_proven,
            keep_everything_bytes=plan.keep_everything_bytes,
            eager_bound_bytes=plan.eager_bound_bytes,
            runs_original=plan.runs_original,
            ops=len(plan.problem.ops),
            solve_seconds=plan.solve_seconds,
            capture_seconds=plan.capture_seconds,
            planning_seconds=planning_seconds,
        ),
    )
