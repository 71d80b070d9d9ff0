"""Ours: plans that `benchmarks.contest.planner` made, read from files and applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import placemat
from benchmarks.peers.contender import Setting
from benchmarks.work import Work
from tests.models import Workload


def setting_for(plan: placemat.Plan, path: Path) -> Setting:
    """The setting that runs a plan from its file."""
    return Setting(f"{plan.budget_bytes} bytes", PlacematPlans.name, {"plan": str(path)})


def program_of(plan: placemat.Plan) -> str:
    """Equal for plans that run the same step."""
    return "the original forward" if plan.runs_original else plan.digest


class PlacematPlans:
    """`placemat.apply` of a plan from a file. Which budgets there are depends on the peaks of the peers."""

    name = "placemat"

    def settings(self, work: Work) -> Sequence[Setting]:
        return []

    def prepare(self, work: Work, workload: Workload, setting: Setting) -> Callable[[], str]:
        plan = placemat.Plan.load(Path(str(setting.values["plan"])))
        placemat.apply(workload.model, plan)
        return lambda: program_of(plan)
