"""placemat: graph-level activation-checkpoint placement for PyTorch.

`optimize(model, budget_bytes)` returns the same module, whose training steps stay inside the budget.
"""

from placemat import distributed
from placemat.api import apply, backend, frontier, minimum_budget, optimize, plan, restore
from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.checkpoint_modules import CheckpointModules
from placemat.checkpointing import apply_checkpointing
from placemat.cost_models import (
    CostFunction,
    CostTable,
    DeviceSpec,
    Measured,
    OpCost,
    Recorded,
    Roofline,
    device_spec,
    host_spec,
)
from placemat.frontier import Frontier, FrontierPoint, problem_frontier
from placemat.graph.errors import (
    BudgetTooSmall,
    CaptureError,
    ConstraintError,
    InvalidSchedule,
    MissingExtra,
    PlacematError,
    PlanMismatch,
    RanksDisagree,
    RoundingDiffers,
    SolverFailed,
    UndeclaredGradients,
    UnsupportedFeature,
)
from placemat.measure import Measurement, measure, suggest_reserved_bytes
from placemat.plan import Plan
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.schedule import Compute, Free, Schedule
from placemat.simulate import Simulation, simulate
from placemat.solve import SolveResult, solve
from placemat.verify import Report, verify

__all__ = [
    "BudgetTooSmall",
    "CaptureError",
    "CheckpointModules",
    "Compute",
    "ConstraintError",
    "CostFunction",
    "CostTable",
    "DeviceSpec",
    "Free",
    "Frontier",
    "FrontierPoint",
    "InvalidSchedule",
    "Measured",
    "Measurement",
    "MissingExtra",
    "OpCost",
    "PlacematError",
    "Plan",
    "PlanMismatch",
    "Problem",
    "ProblemOp",
    "ProblemValue",
    "RanksDisagree",
    "Recorded",
    "Report",
    "Roofline",
    "RoundingDiffers",
    "Schedule",
    "Simulation",
    "SolveResult",
    "SolverFailed",
    "UndeclaredGradients",
    "UnsupportedFeature",
    "apply",
    "apply_checkpointing",
    "backend",
    "chen_sqrt_n",
    "device_spec",
    "distributed",
    "frontier",
    "host_spec",
    "measure",
    "minimum_budget",
    "optimize",
    "plan",
    "problem_frontier",
    "recompute_all",
    "restore",
    "save_all",
    "simulate",
    "solve",
    "suggest_reserved_bytes",
    "verify",
]
