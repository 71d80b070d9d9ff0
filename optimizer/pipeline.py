"""The pipeline: capture -> lower -> cost -> solve -> plan. Every stage's result is a frozen value."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from placemat.baselines import save_all
from placemat.calls import check_trainable, describe_call, input_digest, module_digest, the_device
from placemat.compilers import EAGER, fuses
from placemat.constraints import Constraints
from placemat.cost_models.base import CostModel, cost_graph
from placemat.cost_models.fused import fused_costs
from placemat.floor import FLOOR_SHARE, Floor
from placemat.frontier import Frontier, check_points, problem_frontier
from placemat.graph.capture import capture
from placemat.graph.eager_modules import KeptModules
from placemat.graph.fusion import fused
from placemat.graph.joint import JointGraph
from placemat.graph.loss import capture_loss
from placemat.graph.loss_region import LossRegion
from placemat.graph.lower import lower
from placemat.graph.static import static_bytes
from placemat.known_floors import floor_for, known_floor, lowered_floor
from placemat.parallel_wrappers import refuse_parallel
from placemat.plan import Plan, SolvedProblem, build_plan
from placemat.problem import Problem
from placemat.progress import Bar, Progress, shown
from placemat.relower import constrained
from placemat.simulate import simulate
from placemat.solve import solve
from placemat.stages import Stages, eager_bound
from placemat.too_small import too_small
from placemat.units import format_bytes

log = logging.getLogger("placemat")


@dataclass(frozen=True)
class Identity:
    """Which call a plan is for; `call` in words (see `describe_call`)."""

    module_digest: str
    input_digest: str
    call: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Identity:
        return cls(module_digest(model), input_digest(args, kwargs), describe_call(model, forward, args, kwargs))


@dataclass(frozen=True)
class Planner:
    """Everything that was asked for, ready to plan any call of a module. Picklable if its functions are."""

    cost_model: CostModel
    budget_bytes: int | None = None
    budget_fraction: float | None = None
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    reserved_bytes: int = 0
    accumulate_grad: bool = False
    segments: int = 1
    compiler: str = EAGER
    constraints: Constraints = field(default_factory=Constraints)
    keep_eager: tuple[str, ...] = ()
    time_limit_s: float = 60.0
    gap: float = 0.01
    progress: Progress | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "progress": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def plan(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        kept: KeptModules,
        known: Mapping[str, Plan],
    ) -> Plan:
        """Plan one kind of call; a plan in `known` (by graph fingerprint) is taken as it is.

        `kept` are the modules that `keep_eager` and the model itself ask for (`KeptModules.find`).

        Raises:
            CaptureError, UnsupportedFeature: the call cannot be planned.
            ConstraintError: the constraints do not fit the graph.
            BudgetTooSmall: no plan fits the budget.
            SolverFailed: the solver found none in its time.
        """
        with shown(self.progress):
            joint, capture_seconds = self._capture(model, forward, args, kwargs, kept)
            if joint.fingerprint in known:
                return known[joint.fingerprint]
            stages = self._stages(joint, capture_seconds, model, forward, args, kwargs, kept)
            return self.solved(stages, Identity.of(model, forward, args, kwargs))

    def solved(self, stages: Stages, identity: Identity) -> Plan:
        """The plan for these stages.

        Raises:
            BudgetTooSmall, SolverFailed: see `plan`.
        """
        self._search_begins((1.0 + FLOOR_SHARE) * self.time_limit_s)
        floor = self._floor_to_plan_from(stages)
        budget_bytes = self._budget(stages, floor)
        if budget_bytes < floor.minimum_bytes:
            raise too_small(
                stages,
                floor,
                budget_bytes,
                reserved_bytes=self.reserved_bytes,
                constraints=self.constraints,
            )
        self.say(f"solving for {format_bytes(budget_bytes)}")
        result = solve(
            stages.problem,
            budget_bytes,
            time_limit_s=0.0 if floor.interrupted else self.time_limit_s,
            gap=self.gap,
            warm_start=floor.schedule,
            progress=self.say,
        )
        notes = stages.costs.notes
        if floor.interrupted or result.limit == "interrupt":
            self.say("interrupted: going on with the best plan so far")
            notes += ("the search was interrupted: this is the best plan that it had found by then.",)
        floor = lowered_floor(stages.problem, floor, result.schedule)
        return self._built(stages, result, budget_bytes, floor, identity, notes)

    def frontier(
        self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], points: int
    ) -> Frontier:
        """Plans for one kind of call at several budgets; the planner's own budget is not looked at.

        Raises:
            CaptureError, UnsupportedFeature, ConstraintError, SolverFailed: as for `plan`.
            PlacematError: `points` is no number from 2 on.
        """
        check_points(points)
        with shown(self.progress):
            stages = self.stages(model, forward, args, kwargs)
            started = time.monotonic()
            self._search_begins(self.time_limit_s)
            floor = self.floor(stages)
            curve = problem_frontier(
                stages.problem,
                points=points,
                time_limit_s=0.0 if floor.interrupted else self.time_limit_s - (time.monotonic() - started),
                gap=self.gap,
                floor=floor,
                progress=self.say,
            )
            for point in curve:
                floor = lowered_floor(stages.problem, floor, point.schedule)
            identity = Identity.of(model, forward, args, kwargs)
            notes = stages.costs.notes
            planner = replace(self, budget_fraction=None)
            plans = (planner._built(stages, point, point.budget_bytes, floor, identity, notes) for point in curve)
            return Frontier(curve, tuple(plans))

    def _built(
        self,
        stages: Stages,
        answer: SolvedProblem,
        budget_bytes: int,
        floor: Floor,
        identity: Identity,
        notes: tuple[str, ...],
    ) -> Plan:
        return build_plan(
            stages.lowering.graph,
            stages.costs,
            stages.problem,
            answer,
            budget_bytes=budget_bytes,
            reserved_bytes=self.reserved_bytes,
            floor_bytes=floor.minimum_bytes,
            floor_proven=floor.proven,
            floor_bound_bytes=floor.lower_bound_bytes,
            keep_everything_bytes=stages.keep_everything_bytes,
            capture_seconds=stages.capture_seconds,
            module_digest=identity.module_digest,
            input_digest=identity.input_digest,
            runs_original=stages.may_run_original(budget_bytes),
            eager_bound_bytes=stages.eager_bound_bytes,
            options={**self._options(stages), "call": identity.call},
            notes=notes,
        )

    def given(self, stages: Stages, answer: SolvedProblem, identity: Identity) -> Plan:
        """A plan with a schedule that was chosen elsewhere, for the budget that it needs; planned code runs it."""
        budget_bytes = simulate(stages.problem, answer.schedule).peak_bytes
        plan = self._built(stages, answer, budget_bytes, self.floor(stages), identity, stages.costs.notes)
        return replace(plan, runs_original=False)

    def minimum_budget(
        self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> int:
        """Least peak of a plan for one kind of call."""
        with shown(self.progress):
            stages = self.stages(model, forward, args, kwargs)
            self._search_begins(FLOOR_SHARE * self.time_limit_s)
            return self.floor(stages).minimum_bytes

    def stages(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Stages:
        """Capture, lower and cost one kind of call."""
        kept = KeptModules.find(model, self.keep_eager)
        joint, capture_seconds = self._capture(model, forward, args, kwargs, kept)
        return self._stages(joint, capture_seconds, model, forward, args, kwargs, kept)

    def floor(self, stages: Stages) -> Floor:
        """Least peak of a plan for these stages. Found once per process and problem."""
        return known_floor(stages.problem, time_limit_s=self.time_limit_s, progress=self.say)

    def _floor_to_plan_from(self, stages: Stages) -> Floor:
        """Fractions count from the least peak; bytes need it only where they may be too few."""
        if self.budget_fraction is not None or self.budget_bytes is None:
            return self.floor(stages)
        return floor_for(stages.problem, self.budget_bytes, time_limit_s=self.time_limit_s, progress=self.say)

    def _capture(
        self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, kept: KeptModules
    ) -> tuple[JointGraph, float]:
        refuse_parallel(model, is_called=True)
        the_device(model, args, kwargs)
        check_trainable(model, args, kwargs)
        self.say("capturing the model")
        started = time.perf_counter()
        joint = capture(forward, args, kwargs, kept)
        return joint, time.perf_counter() - started

    def _stages(
        self,
        joint: JointGraph,
        capture_seconds: float,
        model: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        kept: KeptModules,
    ) -> Stages:
        started = time.perf_counter()
        loss = LossRegion(frozenset(range(len(joint.tangents))))
        if self.loss_fn is not None:
            self.say("capturing the loss")
            loss = capture_loss(joint, forward, self.loss_fn, args, kwargs, kept)
        capture_seconds += time.perf_counter() - started
        device = the_device(model, args, kwargs).type
        static = static_bytes(model, args, kwargs, accumulate_grad=self.accumulate_grad)
        return self.costed(joint, loss, device, static, capture_seconds)

    def costed(
        self,
        joint: JointGraph,
        loss: LossRegion,
        device: str,
        static: Mapping[str, int],
        capture_seconds: float,
    ) -> Stages:
        """Lower and cost a captured graph."""
        lowering = lower(
            joint,
            device=device,
            static_bytes=static,
            loss=loss,
            accumulate_grad=self.accumulate_grad,
            segments=self.segments,
        )
        lowering = constrained(lowering, self.constraints)
        self.say(f"costing {len(lowering.graph.ops)} ops")
        costs = cost_graph(self.cost_model, lowering.graph, self.progress)
        if fuses(self.compiler):
            costs, lowering = fused_costs(costs, lowering.graph), replace(lowering, graph=fused(lowering.graph))
        problem = Problem.from_op_graph(lowering.graph, costs, reserved_bytes=self.reserved_bytes)
        peak_bytes = simulate(problem, save_all(problem)).peak_bytes
        unread_bytes = None if fuses(self.compiler) else joint.unread_bytes
        bound_bytes = None if unread_bytes is None else eager_bound(problem) + unread_bytes
        return Stages(lowering, costs, problem, loss, peak_bytes, bound_bytes, capture_seconds)

    def _budget(self, stages: Stages, floor: Floor) -> int:
        if self.budget_bytes is not None:
            return self.budget_bytes
        assert self.budget_fraction is not None
        room = max(0, stages.keep_everything_bytes - floor.minimum_bytes)
        return floor.minimum_bytes + int(self.budget_fraction * room)

    def _options(self, stages: Stages) -> dict[str, Any]:
        return {
            "budget_fraction": self.budget_fraction,
            "loss_fn": self.loss_fn is not None,
            "used_tangents": sorted(stages.loss.used_tangents),
            "loss_workspace_bytes": stages.loss.workspace_bytes,
            "loss_held_bytes": stages.loss.held_bytes,
            "tangents_held": stages.loss.tangents_held,
            "accumulate_grad": self.accumulate_grad,
            "segments": self.segments,
            "compiler": self.compiler,
            "keep": self.constraints.keep,
            "recompute": self.constraints.recompute,
            "keep_eager": self.keep_eager,
            "time_limit_s": self.time_limit_s,
            "gap": self.gap,
        }

    def _search_begins(self, limit_s: float) -> None:
        if isinstance(self.progress, Bar):
            self.progress.search_begins(limit_s)

    def say(self, what: str) -> None:
        """Tell who waits, and the log."""
        log.info("%s", what)
        if self.progress is not None:
            self.progress(what)
