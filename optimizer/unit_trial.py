"""Trial steps of a model whose units are planned one by one: what is beside the units, and when each of them runs.

Nothing of the step outside of the units can be captured: that is why there are units. So it is run, with every unit
under the schedule that keeps least, and the allocator is looked at. What the units keep by then is known to the byte
and taken off; what is left is there whatever schedules they have. Hooks around a unit (FSDP's, which gather and free
parameters) and autograd's work between units are part of that rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from placemat.calls import is_trainable, the_device
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.static import static_bytes
from placemat.handle import Handle
from placemat.installed import ATTRIBUTE, forward_under
from placemat.pipeline import Identity, Planner
from placemat.plan import Plan
from placemat.stages import Stages
from placemat.step_trace import Interval, StepTrace
from placemat.training_state import TrainingState, clone_inputs
from placemat.unit_choice import Moment
from placemat.unit_curve import UnitCurve, UnitPoint
from placemat.verify import differentiate

Part = Literal["forward", "backward"]
Curves = dict[tuple[str, int], UnitCurve]


@dataclass
class UnitTrial:
    """One unit while trial steps run: stands in for its forward.

    Attributes:
        path, module: of the unit.
        planner: captures and costs the unit's call when it comes.
        curves: of the units so far, by graph and static bytes; equal units share one.
        say_mark: is told what begins and ends.
        handle: runs the schedule that keeps least, once the call is known.
        identity: which call that is; `key` is its curve's.
    """

    path: str
    module: nn.Module
    planner: Planner
    curves: Curves
    say_mark: Callable[[Part, str, str], None]
    handle: Handle | None = None
    identity: Identity | None = None
    key: tuple[str, int] | None = None
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.replaced = self.module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not is_trainable(self.module, args, kwargs):
            return self._original()(*args, **kwargs)
        if self.handle is None:
            self._learn(args, kwargs)
        assert self.handle is not None
        call = f"{self.path}#{self.num_calls}"
        self.num_calls += 1
        backend = self.handle._backend
        backend.on_node = lambda node: _watch(node, call, self.say_mark)
        self.say_mark("forward", call, "begin")
        try:
            return self.handle(*args, **kwargs)
        finally:
            self.say_mark("forward", call, "end")
            backend.on_node = None

    def _original(self) -> Callable[..., Any]:
        return forward_under(self.module, self.replaced)

    def _learn(self, args: Any, kwargs: Any) -> None:
        """Capture the call; if no unit before had the same, cost it."""
        original = self._original()
        stages = self.planner.stages(self.module, original, args, kwargs)
        self.identity = Identity.of(self.module, original, args, kwargs)
        self.key = stages.lowering.graph.fingerprint, stages.problem.static_bytes
        if self.key not in self.curves:
            self.curves[self.key] = UnitCurve(stages, self.planner.time_limit_s, self.planner.gap / 4)
        curve = self.curves[self.key]
        self.handle = self.make_handle(self.plan(_Given(curve), curve.stages))

    def plan(self, answer: Any, stages: Stages) -> Plan:
        """A plan of this unit with a schedule that was chosen (see `plan.SolvedProblem`)."""
        assert self.identity is not None
        return self.planner.given(stages, answer, self.identity)

    def make_handle(self, plan: Plan) -> Handle:
        handle = Handle(self.module, None, "eager")
        handle.replaced = self.replaced
        handle.plans[plan.fingerprint] = plan
        handle.plan = plan
        return handle


@dataclass(frozen=True)
class _Given:
    """The schedule of a trial step, as the answer of a solver."""

    curve: UnitCurve
    status: str = "feasible"
    family: str = "recompute everything"
    lower_bound_seconds: float = 0.0
    solve_seconds: float = 0.0

    @property
    def schedule(self) -> Any:
        return self.curve.least.schedule


def _watch(node: Any, call: str, say_mark: Callable[[Part, str, str], None]) -> None:
    """Marks around the backward of a call. Neither hook may hold a tensor, or return one."""

    def begins(grads: Any) -> None:
        say_mark("backward", call, "begin")

    def ends(inputs: Any, outputs: Any) -> None:
        say_mark("backward", call, "end")

    node.register_prehook(begins)
    node.register_hook(ends)


@dataclass
class TrialSteps:
    """Runs training steps of a model, and leaves model and random state as they were.

    Args:
        model, args, kwargs, loss_fn: one step.
        accumulate_grad: gradients exist when it begins.
        reserved_bytes: what the user declares beside it.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[[Any], Tensor] | None
    accumulate_grad: bool
    reserved_bytes: int
    _trace: StepTrace | None = field(default=None, init=False)

    def say_mark(self, part: Part, call: str, what: str) -> None:
        if self._trace is not None:
            self._trace.mark(f"{part} {what} {call}")

    def run(self) -> None:
        """One step, of which nothing is looked at: what is compiled or allocated once is so afterwards."""
        with self._step() as step:
            step()

    def traced(self) -> tuple[list[Interval], int]:
        """The intervals of one step between marks, and the bytes that were there when it began, reserved ones too."""
        self._trace = StepTrace(the_device(self.model, self.args, self.kwargs))
        try:
            with self._step() as step:
                self._trace.run(step)
            start_bytes = self._trace.start_bytes
            if start_bytes is None:
                known = static_bytes(self.model, self.args, self.kwargs, accumulate_grad=self.accumulate_grad)
                start_bytes = sum(known.values())
            return self._trace.intervals, start_bytes + self.reserved_bytes
        finally:
            self._trace = None

    @contextmanager
    def _step(self) -> Iterator[Callable[[], None]]:
        state = TrainingState([self.model])
        try:
            state.clear_grads()
            if self.accumulate_grad:
                for p in self.model.parameters():
                    p.grad = torch.zeros_like(p) if p.requires_grad else None
            args, kwargs = clone_inputs(self.args, self.kwargs, self.model)
            held: list[Any] = []  # as a training loop holds the outputs until backward is over

            def step() -> None:
                held.append(self.model(*args, **kwargs))
                differentiate(held[0], self.loss_fn)

            with torch.enable_grad():
                yield step
        finally:
            state.restore()


@contextmanager
def units_watched(trials: Sequence[UnitTrial]) -> Iterator[None]:
    """Let the units run what stands in for their forwards."""
    for trial in trials:
        trial.module.forward = trial
    try:
        yield
    finally:
        for trial in trials:
            if trial.replaced is None:
                del trial.module.__dict__["forward"]
            else:
                trial.module.forward = trial.replaced
            trial.module.__dict__.pop(ATTRIBUTE, None)


def read_moments(
    intervals: Sequence[Interval], start_bytes: int, points: Mapping[str, UnitPoint]
) -> tuple[tuple[str, ...], list[Moment]]:
    """What a traced step says of its calls, in order, and of the memory beside what the units keep and run with.

    Args:
        intervals: of the step.
        points: what each unit keeps and runs with in it.
        start_bytes: what is there when the step begins.

    Returns:
        The path of each call's unit, and the moments.

    Raises:
        UnsupportedFeature: a unit runs inside another one, or none ran.
    """
    calls: list[str] = []
    number: dict[str, int] = {}
    alive: list[int] = []
    running: tuple[int, Part] | None = None
    moments: list[Moment] = []
    for interval in intervals:
        if interval.mark:
            part, what, call = interval.mark.split(" ", 2)
            if what == "begin":
                if running is not None:
                    raise UnsupportedFeature(
                        f"the unit {_path(call)} runs while {_path(calls[running[0]])} does. Remedy: name units of "
                        "which none is inside another."
                    )
                if part == "forward":
                    number[call] = len(calls)
                    calls.append(call)
                running = number[call], "forward" if part == "forward" else "backward"
            else:
                running = None
                if part == "forward":
                    alive.append(number[call])
                else:
                    alive.remove(number[call])
        holding = tuple(c for c in alive if running is None or c != running[0])
        held = sum(points[_path(calls[c])].kept_bytes for c in holding)
        beside = interval.peak_bytes - held
        if running is not None:
            beside = _beside(interval, held, running[0] in alive, points[_path(calls[running[0]])])
        moments.append(Moment(_place(interval.mark, running, calls), start_bytes + beside, holding, running))
    if not calls:
        raise UnsupportedFeature(
            "no unit ran with gradients in a trial step. Remedy: name units that the forward calls, with parameters "
            "or inputs that require a gradient."
        )
    return tuple(_path(call) for call in calls), moments


def _beside(interval: Interval, held_bytes: int, is_backward: bool, point: UnitPoint) -> int:
    """Bytes that are neither kept by other units nor the running one's: when it begins, and at its peak."""
    own = point.backward_bytes if is_backward else point.forward_bytes
    at_start = interval.start_bytes - (point.kept_bytes if is_backward else 0)
    return max(at_start, interval.peak_bytes - own) - held_bytes


def _place(mark: str, running: tuple[int, Part] | None, calls: Sequence[str]) -> str:
    if running is not None:
        return f"the {running[1]} of {_path(calls[running[0]])}"
    if not mark:
        return "the beginning, before any unit"
    part, _, call = mark.split(" ", 2)
    return f"after the {part} of {_path(call)}"


def _path(call: str) -> str:
    return call.rpartition("#")[0]
