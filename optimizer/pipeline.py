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
from placemat.constraints import Constraints, constrain
from placemat.cost_models.base import CostModel, Costs, cost_graph
from placemat.floor import Floor, lowered, minimum_budget
from placemat.frontier import Frontier, check_points, problem_frontier
from placemat.graph.capture import capture
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import BudgetTooSmall, InvalidSchedule, PlanMismatch
from placemat.graph.forced import why_not_even_if_asked
from placemat.graph.ir import OpGraph
from placemat.graph.joint import JointGraph
from placemat.graph.loss import capture_loss
from placemat.graph.lower import LossRegion, Lowering, lower
from placemat.graph.static import static_bytes
from placemat.parallel_wrappers import refuse_parallel
from placemat.plan import Plan, SolvedProblem, build_plan, peak_breakdown
from placemat.problem import Problem
from placemat.progress import Bar, Progress, shown
from placemat.schedule import Schedule
from placemat.simulate import simulate
from placemat.solve import solve
from placemat.units import format_bytes

log = logging.getLogger("placemat")


@dataclass(frozen=True)
class Stages:
    """What planning knows of a call before a budget is looked at.

    Attributes:
        lowering: ops and values as constrained by the user, and the way back to the captured graph.
        costs: seconds and workspaces per op.
        problem: the rematerialization instance.
        loss: what the caller does between forward and backward.
        keep_everything_bytes: peak of the emitted step without recomputation, but for what the user asked for.
        eager_bound_bytes: no step with the original forward needs more; None if it makes tensors for nothing, which
            are not in the graph.
        capture_seconds: time that capturing took.
    """

    lowering: Lowering
    costs: Costs
    problem: Problem
    loss: LossRegion
    keep_everything_bytes: int
    eager_bound_bytes: int | None
    capture_seconds: float

    def may_run_original(self, budget_bytes: int) -> bool:
        """Whether the module's original forward fits the budget and does what was asked for: it recomputes nothing."""
        fits = self.eager_bound_bytes is not None and budget_bytes >= self.eager_bound_bytes
        return fits and not self.problem.dropped


@dataclass(frozen=True)
class _Identity:
    """Which call a plan is for; `call` in words (see `describe_call`)."""

    module_digest: str
    input_digest: str
    call: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> _Identity:
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
            self._search_begins((1.0 + _FLOOR_SHARE) * self.time_limit_s)
            is_ample = self.budget_bytes is not None and stages.may_run_original(self.budget_bytes)
            floor = _quick_floor(stages.problem) if is_ample else self.floor(stages)
            budget_bytes = self._budget(stages, floor)
            if budget_bytes < floor.minimum_bytes:
                raise _too_small(stages, floor, budget_bytes, self)
            self._say(f"solving for {format_bytes(budget_bytes)}")
            result = solve(
                stages.problem,
                budget_bytes,
                time_limit_s=0.0 if floor.interrupted else self.time_limit_s,
                gap=self.gap,
                warm_start=floor.schedule,
                progress=self._say,
            )
            notes = stages.costs.notes
            if floor.interrupted or result.limit == "interrupt":
                self._say("interrupted: going on with the best plan so far")
                notes += ("the search was interrupted: this is the best plan that it had found by then.",)
            floor = _lowered(stages.problem, floor, result.schedule)
            return self._built(stages, result, budget_bytes, floor, _Identity.of(model, forward, args, kwargs), notes)

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
                progress=self._say,
            )
            for point in curve:
                floor = _lowered(stages.problem, floor, point.schedule)
            identity = _Identity.of(model, forward, args, kwargs)
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
        identity: _Identity,
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
            keep_everything_bytes=stages.keep_everything_bytes,
            capture_seconds=stages.capture_seconds,
            module_digest=identity.module_digest,
            input_digest=identity.input_digest,
            runs_original=stages.may_run_original(budget_bytes),
            eager_bound_bytes=stages.eager_bound_bytes,
            options={**self._options(stages), "call": identity.call},
            notes=notes,
        )

    def minimum_budget(
        self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> int:
        """Least peak of a plan for one kind of call."""
        with shown(self.progress):
            stages = self.stages(model, forward, args, kwargs)
            self._search_begins(_FLOOR_SHARE * self.time_limit_s)
            return self.floor(stages).minimum_bytes

    def stages(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Stages:
        """Capture, lower and cost one kind of call."""
        kept = KeptModules.find(model, self.keep_eager)
        joint, capture_seconds = self._capture(model, forward, args, kwargs, kept)
        return self._stages(joint, capture_seconds, model, forward, args, kwargs, kept)

    def floor(self, stages: Stages) -> Floor:
        """Least peak of a plan for these stages. Found once per process and problem."""
        if stages.problem in _FLOORS:
            return _FLOORS[stages.problem]
        self._say("finding the smallest budget")
        time_limit_s = _FLOOR_SHARE * self.time_limit_s
        floor = minimum_budget(stages.problem, time_limit_s=time_limit_s, progress=self._say)
        if not floor.interrupted:
            _FLOORS[stages.problem] = floor
        while len(_FLOORS) > _MOST_FLOORS:
            del _FLOORS[next(iter(_FLOORS))]
        return floor

    def _capture(
        self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, kept: KeptModules
    ) -> tuple[JointGraph, float]:
        refuse_parallel(model, is_called=True)
        the_device(model, args, kwargs)
        check_trainable(model, args, kwargs)
        self._say("capturing the model")
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
            self._say("capturing the loss")
            loss = capture_loss(joint, forward, self.loss_fn, args, kwargs, kept)
        capture_seconds += time.perf_counter() - started
        lowering = lower(
            joint,
            device=the_device(model, args, kwargs).type,
            static_bytes=static_bytes(model, args, kwargs, accumulate_grad=self.accumulate_grad),
            loss=loss,
            accumulate_grad=self.accumulate_grad,
        )
        lowering = _constrained(lowering, self.constraints)
        self._say(f"costing {len(lowering.graph.ops)} ops")
        costs = cost_graph(self.cost_model, lowering.graph, self.progress)
        problem = Problem.from_op_graph(lowering.graph, costs, reserved_bytes=self.reserved_bytes)
        peak_bytes = simulate(problem, save_all(problem)).peak_bytes
        bound_bytes = eager_bound(problem) if joint.unread_call is None else None
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
            "keep": self.constraints.keep,
            "recompute": self.constraints.recompute,
            "keep_eager": self.keep_eager,
            "time_limit_s": self.time_limit_s,
            "gap": self.gap,
        }

    def _search_begins(self, limit_s: float) -> None:
        if isinstance(self.progress, Bar):
            self.progress.search_begins(limit_s)

    def _say(self, what: str) -> None:
        log.info("%s", what)
        if self.progress is not None:
            self.progress(what)


def _constrained(lowering: Lowering, constraints: Constraints) -> Lowering:
    graph = constrain(lowering.graph, constraints, lambda index: why_not_even_if_asked(lowering, index))
    return replace(lowering, graph=graph)


# A floor takes seconds, and the budgets that people ask for come from it: what minimum_budget() said must hold for the
# optimize() that follows.
_FLOORS: dict[Problem, Floor] = {}
_MOST_FLOORS = 32
_FLOOR_SHARE = 0.2  # of the time limit: the floor is context for most budgets, and the plan itself for few


def _lowered(problem: Problem, floor: Floor, schedule: Schedule) -> Floor:
    """The floor, or a lower one that a plan has shown; what is known of the problem from then on."""
    if simulate(problem, schedule).peak_bytes < floor.minimum_bytes:
        floor = _FLOORS[problem] = lowered(floor, problem, schedule)
    return floor


def _quick_floor(problem: Problem) -> Floor:
    """A floor for a budget that does not need one: the lowest peak that is found without a solver."""
    return minimum_budget(problem, time_limit_s=0.0)


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
    )
    lowering = _constrained(lowering, Constraints(tuple(options["keep"]), tuple(options["recompute"])))
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


def eager_bound(problem: Problem) -> int:
    """Bytes that no step with the original forward exceeds: nothing is freed before the step is over.

    Eager frees earlier, but when depends on Python locals and on what autograd saves; this bound needs to know neither.
    """
    values = sum(v.bytes for v in problem.values)
    return problem.static_bytes + values + max((op.workspace_bytes for op in problem.ops), default=0)


def _too_small(stages: Stages, floor: Floor, budget_bytes: int, planner: Planner) -> BudgetTooSmall:
    """The floor's answer, with the decomposition at the binding step and the user's line."""
    graph = stages.lowering.graph
    simulation = simulate(stages.problem, floor.schedule)
    breakdown = peak_breakdown(graph, simulation, planner.reserved_bytes)
    op = next(o for o in graph.ops if o.name == floor.binding_op)
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in breakdown.items() if size)
    where = f"{op.name} ({op.target}{', in ' + op.module_path if op.module_path else ''})"
    proven = (
        f"no plan needs less ({floor.family})"
        if floor.proven
        else f"no smaller one was found, and below {floor.lower_bound_bytes} bytes there is none"
    )
    constraints = planner.constraints
    return BudgetTooSmall(
        f"budget {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small: the smallest budget"
        f"{f' with {constraints}' if constraints else ''} is "
        f"{floor.minimum_bytes} bytes ({format_bytes(floor.minimum_bytes)}), {proven}. There the peak is at "
        f"{where}{', ' + op.source if op.source else ''}: {parts}. Remedy: budget_bytes={floor.minimum_bytes} or "
        f"more, a smaller batch, or fewer {'entries in keep=' if constraints.keep else 'outputs held by the caller'}.",
        minimum_budget_bytes=floor.minimum_bytes,
        budget_bytes=budget_bytes,
        breakdown=breakdown,
        binding_op=op.name,
        source=op.source,
    )
