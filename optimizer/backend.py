"""Backend: what Dynamo and AOTAutograd call to compile one of our modules, and what then runs.

AOTAutograd traces the joint graph and keeps everything at its edges (mutation, aliasing, outputs); at the partition
step the plan decides, and the two emitted functions run inside its autograd node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from placemat.codegen import Boxed, boxed_function
from placemat.emit import IN_PLACE, EmittedStep, emit
from placemat.graph import gradients, torch_private
from placemat.graph.aliases import guard_views, split_gradients
from placemat.graph.arriving import take_as_they_come
from placemat.graph.autocast import LOW_PRECISION, casts_outlive_forward, sensitive_backward_op
from placemat.graph.capture import DynamoGraph, Interrupt, make_joint
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.joint import JointGraph
from placemat.graph.kernel_strides import true_strides
from placemat.graph.lower import Lowering
from placemat.graph.recurrent import refuse_layers
from placemat.schedule import Schedule
from placemat.segments import Chain
from placemat.shared_casts import SharedCasts, present_region
from placemat.tied_weights import TiedWeights, tied_leaves


@dataclass(frozen=True)
class Planned:
    """A joint graph's lowering under its plan, the plan's schedule, and which steps of it are below the peak."""

    lowering: Lowering
    schedule: Schedule
    below_peak: Container[int] = ()


Planner = Callable[[JointGraph], Planned]

# From an emitted graph and its name, "forward" or "backward", to the function that runs it.
Function = Callable[[fx.GraphModule, str], Boxed]


class NoGradient(Interrupt):
    """No output of the graph that is being compiled requires a gradient: there is no backward."""


class Backend:
    """A Dynamo backend for one module. `before_backward` runs when a backward begins. Neither it nor `planner` may hold
    the module: Dynamo's cache would keep it alive.

    `compiler` is called for each graph that is compiled and gives what makes functions of its forward and backward.

    `refuse_shared` is `KeptModules.refuse_shared` of the module, and must not hold it either.

    `on_node`, if it is set, is called with the autograd node of each forward that ran, for who traces a step.

    `runs` counts forwards of emitted code, so that the handle notices a call that did not go through it;
    `compilations` counts graphs that were emitted.
    """

    def __init__(
        self,
        planner: Planner,
        before_backward: Callable[[], None],
        refuse_shared: Callable[[fx.GraphModule], None],
        compiler: Callable[[], Function] = lambda: boxed_function,
    ) -> None:
        self.planner = planner
        self.before_backward = before_backward
        self.refuse_shared = refuse_shared
        self.compiler = compiler
        self.on_node: Callable[[Any], None] | None = None
        self.shared_casts = SharedCasts()
        self.tied_weights = TiedWeights()
        self.runs = 0
        self.compilations = 0

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_layers(graph_module)
        self.refuse_shared(graph_module)
        traced = DynamoGraph.of(graph_module)
        emitted: dict[str, Any] = {}
        function = self.compiler()

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            made = make_joint(joint, num_fwd_outputs, traced)
            planned = self.planner(made)
            lowering = planned.lowering
            emitted["autocast"] = _AutocastGuard(made, lowering.graph.device)
            leaves = [p for p, known in zip(made.primals, made.inputs, strict=True) if known.is_leaf]
            emitted["shares"] = lowering.graph.device if casts_outlive_forward(leaves) else None
            step = emit(lowering, planned.schedule, planned.below_peak)
            emitted["chain"] = Chain.of(made, step.segments, len(inputs)) if step.segments else None
            emitted["backward"] = _backward(step, lowering, function, emitted["chain"])
            emitted["split"] = split_gradients(made, traced.hooked)
            emitted["tied"] = tied_leaves(made)
            self.compilations += 1
            return step.forward, step.backward

        def compile_forward(forward: fx.GraphModule, example_inputs: Any) -> Boxed:
            if not emitted:
                raise NoGradient
            emitted["region"] = torch_private.settle_region()
            return self._counted(function(forward, "forward"))

        def compile_backward(backward: fx.GraphModule, example_inputs: Any) -> Any:
            torch_private.settle_region()
            return emitted["backward"]

        with true_strides():
            compiled = torch_private.aot_backend(partition, compile_forward, compile_backward)(graph_module, inputs)

        def run(*args: Any) -> Any:
            chain: Chain | None = emitted["chain"]
            checks = [emitted["autocast"], lambda grads: self.before_backward()]
            passed: Sequence[Any] = args
            if chain is not None:
                passed, expected = chain.link(args)
                checks.append(expected)
            outputs = compiled(*passed)
            checks.append(lambda grads: self.tied_weights.check(emitted["tied"]))
            if emitted["shares"] is not None and (cache := present_region(emitted["shares"])) is not None:
                checks.append(lambda grads: self.shared_casts.check(cache))
            node = guard_backward(outputs, emitted["region"], checks)
            if self.on_node is not None and node is not None:
                self.on_node(node)
            guard_views(outputs, emitted["split"])
            return outputs

        return run

    def _counted(self, forward: Boxed) -> Boxed:
        def counted(args: list[Any]) -> list[Any]:
            self.runs += 1
            return forward(args)

        counted._boxed_call = True  # type: ignore[attr-defined]
        return counted


def guard_backward(outputs: Any, region: Any, checks: Sequence[Callable[[Any], None]]) -> Any:
    """Prepare the autograd node of a forward that just ran, and return it; None if there is none.

    Gradients that the loss does not send stay None instead of zeros; a backward that is itself recorded for a second
    derivative is refused, because PyTorch would return wrong values for some inputs without a word. `checks` are called
    with the gradients when the backward begins.
    """
    node = torch_private.backward_node(outputs, region)
    if node is None:
        return None
    node.set_materialize_grads(False)
    node.register_prehook(_refuse_double_backward)
    node.register_prehook(_plain)
    for check in checks:
        node.register_prehook(check)
    return node


class _AutocastGuard:
    """Refuses a backward inside an autocast region where eager's would be another than the captured one."""

    def __init__(self, joint: JointGraph, device: str) -> None:
        self.device = device
        self.sensitive_op = {dtype: sensitive_backward_op(joint, device, dtype) for dtype in LOW_PRECISION}

    def __call__(self, grads: Any) -> None:
        if not torch.is_autocast_enabled(self.device):
            return
        dtype = torch.get_autocast_dtype(self.device)
        if (name := self.sensitive_op.get(dtype)) is not None:
            raise UnsupportedFeature(
                f"backward() runs inside a torch.autocast region ({dtype}), which changes gradients of this model: its "
                f"backward has {name}, which autocast would cast, and was captured outside autocast. Remedy: call "
                "loss.backward() after the autocast block, as PyTorch recommends."
            )


def _plain(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A parameter that is handed to backward() as a gradient, as the tensor that it is: AOT takes it for a subclass."""
    if not any(isinstance(g, torch.nn.Parameter) for g in grads):
        return None
    return tuple(g.detach() if isinstance(g, torch.nn.Parameter) else g for g in grads)


def _refuse_double_backward(grads: Any) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedFeature(
            "double backward (create_graph=True, gradient penalties, higher-order gradients) through an optimized "
            "module is not supported. Remedy: placemat.restore(model) for such steps, or wrap submodules in "
            "torch.utils.checkpoint.checkpoint(use_reentrant=False) instead."
        )


@dataclass(frozen=True)
class _Arrival:
    """Which gradients of outputs arrive, and whether they have the strides that they had in the trace."""

    present: tuple[bool, ...]
    as_traced: bool


def _backward(step: EmittedStep, lowering: Lowering, function: Function, chain: Chain | None) -> Boxed:
    """The backward, specialized on demand for the tangents that arrive; of a chain, its first segment.

    The plan covers the case that all tangents it knows are there; with fewer, calls only fall away.
    """
    planned = lowering.planned_tangents
    traced = [t.meta["val"].stride() for t in lowering.joint.tangents]
    variants: dict[_Arrival, Boxed] = {}

    def backward(args: list[Any]) -> list[Any]:
        tangents = args[step.num_saved :]
        present = tuple(t is not None for t in tangents)
        as_traced = all(t is None or t.stride() == s for t, s in zip(tangents, traced, strict=True))
        del tangents
        arrival = _Arrival(present, as_traced)
        if arrival not in variants:
            _check_tangents(present, planned)
            variants[arrival] = function(_specialized(step, arrival, planned), "backward")
        result: Any = variants[arrival](args)
        return result if chain is None else chain.begin(result)

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def _check_tangents(present: Sequence[bool], planned: frozenset[int]) -> None:
    surplus = [i for i, there in enumerate(present) if there and i not in planned]
    if surplus:
        raise UnsupportedFeature(
            f"the backward sends a gradient into differentiable output(s) {surplus} of the model, but the plan was "
            f"made for a loss_fn that reaches only {sorted(planned)}. Remedy: plan with the loss_fn that is trained "
            "with, or without loss_fn, which plans for a gradient into every output."
        )


def _specialized(step: EmittedStep, arrival: _Arrival, planned: frozenset[int]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(step.backward.graph, copies))
    is_planned = arrival.as_traced and all(arrival.present[i] for i in planned)
    for old, new in copies.items():
        new.meta = dict(old.meta)
        if not is_planned:  # calls fall away, or results have other strides: what was argument of one may be another's
            new.meta.pop(IN_PLACE, None)
    tangents = list(graph.find_nodes(op="placeholder"))[step.num_saved :]
    absent = [t for t, there in zip(tangents, arrival.present, strict=True) if not there]
    moved = gradients.prune_tangents(graph, absent)
    take_as_they_come(graph, moved if arrival.as_traced else [*tangents, *moved])
    if step.segments:
        (output,) = graph.find_nodes(op="output")
        output.args = ((),)  # all gradients are handed out before
    return fx.GraphModule(step.backward, graph)
