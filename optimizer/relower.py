"""Lowering under constraints: of a call that is planned, and again of a graph that is compiled for its plan."""

from __future__ import annotations

from dataclasses import replace

from placemat.compilers import EAGER, fuses
from placemat.constraints import Constraints, constrain
from placemat.cost_models.base import Costs
from placemat.graph.errors import InvalidSchedule, PlanMismatch
from placemat.graph.forced import why_not_even_if_asked
from placemat.graph.fusion import fused
from placemat.graph.ir import OpGraph
from placemat.graph.joint import JointGraph
from placemat.graph.loss_region import LossRegion
from placemat.graph.lower import Lowering, lower
from placemat.plan import Plan
from placemat.problem import Problem
from placemat.simulate import simulate


def constrained(lowering: Lowering, constraints: Constraints) -> Lowering:
    """The lowering with what `keep=` and `recompute=` ask for written to its ops.

    Raises:
        ConstraintError: they do not fit the graph.
    """
    graph = constrain(lowering.graph, constraints, lambda index: why_not_even_if_asked(lowering, index))
    return replace(lowering, graph=graph)


def relower(joint: JointGraph, plan: Plan) -> Lowering:
    """Lower a graph that is being compiled as it was lowered for its plan.

    Raises:
        PlanMismatch: the plan's steps do not fit the graph (the plan is of another placemat version).
    """
    options = plan.options
    lowering = lower(
        joint,
        device=plan.device,
        static_bytes=plan.static_bytes,
        loss=LossRegion(
            frozenset(options["used_tangents"]),
            options["loss_workspace_bytes"],
            options["loss_held_bytes"],
            options["tangents_held"],
        ),
        accumulate_grad=options["accumulate_grad"],
        segments=options.get("segments", 1),
    )
    lowering = constrained(lowering, Constraints(tuple(options["keep"]), tuple(options["recompute"])))
    if fuses(options.get("compiler", EAGER)):
        lowering = replace(lowering, graph=fused(lowering.graph))
    planned_ops = 1 + max(plan.schedule.computes, default=-1)
    if planned_ops != len(lowering.graph.ops):
        raise PlanMismatch(
            f"the plan schedules {planned_ops} ops and this placemat makes {len(lowering.graph.ops)} of the same "
            f"graph: it was saved by placemat {plan.placemat_version}. Remedy: plan() again."
        )
    _check_schedule(lowering.graph, plan)
    return lowering


def _check_schedule(graph: OpGraph, plan: Plan) -> None:
    """The referee once more, workspaces left out: a plan file may have been edited."""
    nothing = (0,) * len(graph.ops)
    problem = Problem.from_op_graph(graph, Costs((0.0,) * len(graph.ops), nothing, nothing, ""))
    try:
        peak_bytes = simulate(problem, plan.schedule).peak_bytes
    except InvalidSchedule as error:
        raise PlanMismatch(f"the plan's schedule is not one for this graph: {error}. Remedy: plan() again.") from None
    if peak_bytes > plan.predicted_peak_bytes:
        raise PlanMismatch(
            f"the plan's schedule needs at least {peak_bytes} bytes, more than the {plan.predicted_peak_bytes} that it "
            "predicts: it was edited. Remedy: plan() again."
        )
