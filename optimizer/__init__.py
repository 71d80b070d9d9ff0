"""placemat: graph-level activation-checkpoint placement for PyTorch.

`optimize(model, budget_bytes)` returns the same module, whose training steps stay inside the budget.
"""

from placemat.api import apply, minimum_budget, optimize, plan, restore
from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.graph.errors import (
    BudgetTooSmall,
    CaptureError,
    InvalidSchedule,
    PlacematError,
    PlanMismatch,
    SolverFailed,
    UnsupportedFeature,
)
from placemat.measure import Measurement, measure
from placemat.plan import Plan
from placemat.problem import Problem
from placemat.schedule import Compute, Free, Schedule
from placemat.simulate import Simulation, simulate
from placemat.solve import SolveResult, solve
from placemat.verify import Report, verify

__all__ = [
    "BudgetTooSmall",
    "CaptureError",
    "Compute",
    "Free",
    "InvalidSchedule",
    "Measurement",
    "PlacematError",
    "Plan",
    "PlanMismatch",
    "Problem",
    "Report",
    "Schedule",
    "Simulation",
    "SolveResult",
    "SolverFailed",
    "UnsupportedFeature",
    "apply",
    "chen_sqrt_n",
    "measure",
    "minimum_budget",
    "optimize",
    "plan",
    "recompute_all",
    "restore",
    "save_all",
    "simulate",
    "solve",
    "verify",
]
