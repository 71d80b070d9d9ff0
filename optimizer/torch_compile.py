"""A backend for torch.compile that plans the graph it is given: `torch.compile(model, backend=placemat.backend(...))`.

Refusals are raised by the function that the backend returns, when it is called: raised by the backend itself they would
reach the user in PyTorch's wrapping, or be suppressed.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from placemat.backend import Backend, NoGradient, Planned
from placemat.compilers import COMPILERS, EAGER
from placemat.gradient_watch import GradientWatch
from placemat.graph import torch_private
from placemat.graph.autocast import is_inside_region
from placemat.graph.capture import Interrupt, input_names
from placemat.graph.errors import PlacematError, UnsupportedFeature
from placemat.graph.joint import JointGraph, JointInput
from placemat.graph.loss_region import LossRegion
from placemat.graph.sources import user_line
from placemat.graph.static import graph_static_bytes
from placemat.pipeline import Identity, Planner
from placemat.plan import Plan
from placemat.simulate import steps_below_peak

Run = Callable[..., Any]


class _RunsOriginal(Interrupt):
    """The budget of the graph that is being compiled is ample."""


class CompilerBackend:
    """What `placemat.backend` returns; see there.

    Attributes:
        plans: graph fingerprint -> Plan, of each graph that torch.compile handed over.
        plan: the latest of them, or None.
    """

    __name__ = "placemat"  # what torch.compile calls it

    def __init__(self, planner: Planner, compiler: str) -> None:
        self.planner = planner
        self.compiler = compiler
        self.plans: dict[str, Plan] = {}
        self.plan: Plan | None = None

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Run:
        try:
            _check_settings(settings)
            if not torch.is_grad_enabled() or not any(getattr(t, "requires_grad", False) for t in inputs):
                return graph_module
            _check_graph(graph_module, inputs)
            return self._planned(graph_module, inputs)
        except PlacematError as error:
            return _refusal(error)

    def _planned(self, graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Run:
        """The function for a graph. It must not hold `inputs`: they are those of the first call."""
        known = input_names(graph_module)
        (device,) = {t.device.type for t in inputs if t.dim() > 0} or {"cpu"}
        static = graph_static_bytes(known, inputs, accumulate_grad=self.planner.accumulate_grad)
        identity = _identity(known, inputs)
        graph = PlannedGraph(tuple(weakref.ref(t) for t in inputs if isinstance(t, torch.nn.Parameter)))

        def planner(joint: JointGraph) -> Planned:
            loss = LossRegion(frozenset(range(len(joint.tangents))))
            with torch_private.outside_tracing():
                stages = self.planner.costed(joint, loss, device, static, capture_seconds=0.0)
                graph.plan = self.planner.solved(stages, identity)
            self.plan = self.plans[graph.plan.fingerprint] = graph.plan
            if graph.plan.runs_original and self.compiler == EAGER:
                raise _RunsOriginal
            schedule = graph.plan.schedule
            return Planned(stages.lowering, schedule, steps_below_peak(graph.plan.problem, schedule))

        watch = GradientWatch(graph)
        backend = Backend(planner, watch.before_backward, lambda _: None, COMPILERS[self.compiler])
        try:
            with torch_private.compile_settings():
                torch_private.suppose_all_asked()
                planned = backend(graph_module, inputs)
        except (_RunsOriginal, NoGradient):
            return graph_module
        inside = is_inside_region()

        def run(*args: Any) -> Any:
            if is_inside_region() != inside:
                raise UnsupportedFeature(
                    "the compiled function was planned for calls inside a torch.autocast region and is called outside "
                    "of one, or the reverse. Remedy: torch._dynamo.reset() between the two."
                )
            assert graph.plan is not None
            watch.before_forward()
            return planned(*args)

        return run


@dataclass
class PlannedGraph:
    """What a `GradientWatch` looks at: the plan, and the parameters as if of a module."""

    tensors: tuple[weakref.ref[Any], ...]
    plan: Plan | None = None

    @property
    def module(self) -> PlannedGraph:
        return self

    def parameters(self) -> Iterator[torch.Tensor]:
        return (t for reference in self.tensors if (t := reference()) is not None)


def _refusal(error: PlacematError) -> Run:
    def refuse(*args: Any) -> NoReturn:
        raise error.with_traceback(None)

    return refuse


def _identity(known: Sequence[JointInput], inputs: Sequence[torch.Tensor]) -> Identity:
    """Which call a plan is for: there is no module here, only tensors with names."""
    rows = {
        k.name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for k, t in zip(known, inputs, strict=True)
    }
    digests = []
    for is_parameter in (True, False):
        named = (f"{k.name}|{rows[k.name]}" for k in known if k.is_parameter == is_parameter)
        digests.append(hashlib.sha256("\n".join(named).encode()).hexdigest())
    return Identity(digests[0], digests[1], rows)


def _check_settings(settings: dict[str, Any]) -> None:
    if settings:
        raise UnsupportedFeature(
            f"torch.compile({', '.join(f'{name}=' for name in settings)}...) is for Inductor. Remedy: leave it out, or "
            'placemat.backend(..., compiler="inductor") with Inductor\'s settings in torch._inductor.config.'
        )
    if not torch_private.is_full_graph():
        raise UnsupportedFeature(
            "placemat.backend() needs torch.compile(..., fullgraph=True): a budget is about a whole step, and "
            "otherwise PyTorch runs what is beyond a graph break, or beyond its limit of recompilations, without a "
            "plan and without a word. Remedy: fullgraph=True."
        )
    if torch_private.splits_for_ddp():
        raise UnsupportedFeature(
            "inside DistributedDataParallel torch.compile splits graphs at gradient buckets, and a budget is about a "
            "whole step. Remedy: torch._dynamo.config.optimize_ddp = False, or placemat.optimize(model, ...)."
        )


def _check_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if len(tensors) < len(inputs) or any(type(n) is not int for t in tensors for n in t.shape):
        raise UnsupportedFeature(
            "the graph has symbolic sizes or numbers as inputs, and a plan is for fixed shapes. Remedy: "
            "torch.compile(..., dynamic=False), and tensors in place of numbers that change."
        )
    if foreign := {type(t).__name__ for t in tensors if type(t) not in (torch.Tensor, torch.nn.Parameter)}:
        raise UnsupportedFeature(f"an input of the graph is a {foreign.pop()}; plans are for plain tensors.")
    devices = {t.device for t in tensors if t.dim() > 0 or t.device.type != "cpu"}
    if len(devices) > 1:
        raise UnsupportedFeature(
            f"the graph is on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}); a budget is about one."
        )
    for node in graph_module.graph.nodes:
        if torch_private.draws_for_numpy(node.target):
            where = user_line(node.meta.get("stack_trace")) or "an unknown line"
            raise UnsupportedFeature(
                f"the forward draws numpy's random numbers, for which torch.compile takes PyTorch's. At {where}. "
                "Remedy: draw with torch, or outside of the compiled function."
            )
