"""Capture: from a callable and its arguments to a JointGraph, without running it.

Dynamo and AOTAutograd trace the callable; the joint graph is taken at the partition step, and the capture ends there by
an exception of our own. Nothing is executed: random state, buffers, version counters and `.grad` stay as they were.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import fx

from placemat.graph import eager_ops, torch_private
from placemat.graph.aliases import hooked_inputs
from placemat.graph.autocast import is_inside_region, is_used, mark_casts
from placemat.graph.checkpointed import refuse_checkpoints
from placemat.graph.custom_ops import check_nothing_left_out, custom_calls
from placemat.graph.data_dependent import refuse_data_dependent
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import CaptureError, PlacematError, UnsupportedFeature
from placemat.graph.forward_hooks import LEFT_BEHIND, check_removed
from placemat.graph.gradients import mark_blind_gradients
from placemat.graph.guessed_masks import refuse_guessed_masks
from placemat.graph.ir import ModuleCall
from placemat.graph.joint import JointGraph, JointInput, fingerprint
from placemat.graph.kernel_strides import refuse_permuted_writes, true_strides
from placemat.graph.module_calls import module_calls, root_call
from placemat.graph.recurrent import refusal, refuse_layers, what_is_packed
from placemat.graph.returned import note_returned, take_returned
from placemat.graph.sources import is_library_file, shown_file, tidy, user_line
from placemat.graph.unread import unread_bytes


class Interrupt(Exception):
    """Ends a compilation on purpose; never seen by a user."""


class _Captured(Interrupt):
    """Ends a capture with its result."""

    def __init__(self, joint: JointGraph) -> None:
        super().__init__("captured")
        self.joint = joint


FORWARD_OWNER = "L['forward'].__self__"  # what Dynamo calls the module of a bound forward that an entry gets


def make_entry() -> Callable[..., Any]:
    """A function with a code object of its own.

    Dynamo keeps what it compiled on code objects, and its limits too: modules that shared one would evict each other.
    """

    def entry(
        forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], autocast_around: bool
    ) -> Any:
        if autocast_around:  # read here, Dynamo has a guard on it: mark_casts() depends on it
            output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        check_removed()
        note_returned(output)
        return output

    entry.__code__ = entry.__code__.replace(co_name="placemat_step")
    return entry


def capture(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: KeptModules | None = None,
) -> JointGraph:
    """Trace `forward(*args, **kwargs)` and its backward.

    Args:
        forward: of the model.
        args, kwargs: one call.
        kept: modules that stay opaque; of each a copy is run (`eager_facts`).

    Raises:
        CaptureError: the forward cannot be one graph; the message names the user's file and line.
        UnsupportedFeature: it can, but nothing in it requires a gradient, or an operator of it does in eager what a
            captured step cannot.
    """

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any) -> NoReturn:
        raise _Captured(make_joint(joint, num_fwd_outputs, traced[0]))

    def forward_only(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> NoReturn:
        raise UnsupportedFeature(
            "no output of the model requires a gradient, so there is no backward to plan for. Remedy: check "
            "requires_grad of the parameters and inputs, and that the forward does not run under torch.no_grad()."
        )

    backend = torch_private.aot_backend(partition, forward_only, forward_only)
    traced: list[DynamoGraph] = []

    kept = kept or KeptModules({})

    def named_backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        refuse_layers(graph_module)
        kept.refuse_shared(graph_module)
        traced.append(DynamoGraph.of(graph_module))
        with true_strides():
            return backend(graph_module, inputs)

    entry = make_entry()
    compiled = torch.compile(entry, backend=named_backend, fullgraph=True, dynamic=False)
    try:
        with torch_private.compile_settings(), torch.enable_grad():
            with kept.learning((args, kwargs)), kept.installed(), _no_collections(), reported(forward):
                compiled(forward, tuple(args), dict(kwargs), is_inside_region())
    except _Captured as done:
        return replace(done.joint, modules=(root_call(forward), *done.joint.modules))
    finally:
        torch_private.forget_compiled(entry)
    raise UnsupportedFeature(
        "the model's forward ran no tensor operation that could be captured. Remedy: pass the model itself, not a "
        "wrapper that was compiled or scripted already."
    )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Put Python's cyclic garbage collector off: a trace only makes objects that live to its end.

    Looking through them again and again took a sixth of the capture of a 32-layer Llama (torch 2.13).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class DynamoGraph:
    """What is read from Dynamo's graph of the forward before AOTAutograd traces it.

    Attributes:
        inputs: in order.
        custom_calls: calls of custom operators, see `custom_ops`.
        uses_autocast: it runs under autocast, or opens a region of it.
        unread_bytes: at most what calls take that make tensors for nothing, see `unread`.
        times_returned: of each output, see `returned`.
        modules: submodules that are called.
        hooked: names of inputs of which the forward hooks a gradient: their own, or that of a view.
    """

    inputs: Sequence[JointInput]
    custom_calls: Mapping[Any, list[str]]
    uses_autocast: bool
    unread_bytes: int | None
    times_returned: Sequence[int]
    modules: tuple[ModuleCall, ...]
    hooked: frozenset[str]

    @classmethod
    def of(cls, graph_module: fx.GraphModule) -> DynamoGraph:
        """Also marks the graph's casts and writes in place, and takes out what `returned` put in.

        Raises:
            UnsupportedFeature: the graph writes to a tensor in an order that its copy would not keep, calls
                torch.utils.checkpoint, or has attention with a mask that eager may leave out.
        """
        refuse_checkpoints(graph_module)
        refuse_guessed_masks(graph_module, torch_private.files_that_asked())
        times_returned = take_returned(graph_module.graph)
        graph_module.recompile()
        refuse_permuted_writes(graph_module.graph)
        mark_casts(graph_module)
        uses_autocast, unread = is_used(graph_module.graph), unread_bytes(graph_module)
        calls, modules = custom_calls(graph_module), module_calls(graph_module.graph)
        names, hooked = input_names(graph_module), hooked_inputs(graph_module.graph)
        hooked_names = frozenset(known.name for i, known in enumerate(names) if i in hooked)
        return cls(names, calls, uses_autocast, unread, times_returned, modules, hooked_names)


def make_joint(graph_module: fx.GraphModule, num_forward_outputs: int, traced: DynamoGraph) -> JointGraph:
    """JointGraph from what AOTAutograd hands to a partitioner."""
    eager_ops.attach_facts(graph_module.graph)
    check_nothing_left_out(graph_module, traced.custom_calls)
    names = traced.inputs
    identity = fingerprint(graph_module, num_forward_outputs)
    joint = JointGraph(graph_module, num_forward_outputs, (), identity)
    if len(joint.primals) != len(joint.gradients):
        raise UnsupportedFeature(torch_private.SIDE_EFFECTS)
    inputs = tuple(names[i] if i < len(names) else JointInput(node.name, False) for i, node in enumerate(joint.primals))
    times = tuple(_times_returned(node, traced.times_returned) for node in joint.tangents)
    made = JointGraph(graph_module, num_forward_outputs, inputs, identity, traced.unread_bytes, times, traced.modules)
    mark_blind_gradients(made)
    refuse_data_dependent(made, autocast=traced.uses_autocast)
    return made


def _times_returned(tangent: fx.Node, of_output: Sequence[int]) -> int:
    index = torch_private.output_of_tangent(tangent)
    return 1 if index is None else of_output[index]


def input_names(graph_module: fx.GraphModule) -> list[JointInput]:
    """Names of a Dynamo graph's inputs, in order."""
    names = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        example = node.meta.get("grapharg")
        source = getattr(getattr(example, "source", None), "name", node.name)
        text = str(source() if callable(source) else source)
        text = tidy(text.replace("L['args']", "args").replace("L['kwargs']", "kwargs"))
        tensor = getattr(example, "example", None)
        is_leaf = isinstance(tensor, torch.Tensor) and tensor.is_leaf and not tensor._is_view()
        requires_grad = isinstance(tensor, torch.Tensor) and tensor.requires_grad
        names.append(JointInput(text, isinstance(tensor, torch.nn.Parameter), is_leaf, requires_grad))
    return names


class reported:
    """Context that turns PyTorch's capture errors into ours, with the user's file and line."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, torch_private.BackendCompilerFailed):
            inner = error.inner_exception
            if isinstance(inner, (PlacematError, Interrupt)):
                raise inner from None
            raise CaptureError(
                f"PyTorch failed while tracing the backward of the model: {type(inner).__name__}: "
                f"{first_line(inner)}. Remedy: run the model eagerly once; if that works, restore() it and report "
                "the operation named above."
            ) from inner
        if isinstance(error, torch_private.TorchDynamoException) and (own := _own_error(error)) is not None:
            where = user_frame(getattr(error, "real_stack", None) or ())
            raise type(own)(f"{own} At {where}.") from error
        if isinstance(error, torch_private.Unsupported):
            raise CaptureError(_graph_break_text(error)) from error
        if isinstance(error, torch_private.TorchDynamoException):
            raise CaptureError(
                f"the model's forward cannot be captured as one graph: {explanation(error)}. At "
                f"{user_line(str(error)) or 'an unknown line'}. Remedy: if the forward runs eagerly, rewrite that "
                "line with tensor operations, or optimize the submodules around it."
            ) from error


def _own_error(error: BaseException) -> PlacematError | None:
    """The error of ours that is behind one of Dynamo's: a kept module is looked at while Dynamo traces."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PlacematError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _graph_break_text(error: Any) -> str:
    if (left := re.search(LEFT_BEHIND + r" on ([\w, ]+)", str(error))) is not None:
        return (
            f"the model's forward registers hooks that are still there when it returns (on {left[1]}): every call "
            "would add one, and be another graph. Remedy: register the hook once, outside of forward(), or remove it "
            "before forward() returns."
        )
    stack = getattr(error, "real_stack", None) or ()
    where = user_frame(stack)
    registration = next((f.name for f in stack if _registers_hook(f)), None)
    if registration is not None:
        return (
            f"the model's forward calls {registration}(), and a graph cannot hold this kind of hook. At {where}. "
            "Remedy: register_forward_pre_hook() or register_forward_hook() without always_call=True, removed before "
            "forward() returns; or register the hook once, outside of forward()."
        )
    packed = what_is_packed(error)
    if packed is not None:
        return refusal(packed, where)
    kind = getattr(error, "gb_type", None) or "graph break"
    return (
        f"the model's forward cannot be captured as one graph ({kind}; data-dependent control flow, calls out of "
        f"torch and Python side effects end a graph): {first_line(error)}. At {where}. Remedy: rewrite that line "
        "with tensor operations (torch.where, masks), move it out of forward(), or leave the module that it is in to "
        "eager with keep_eager=[its path]."
    )


def _registers_hook(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is one of torch.nn.Module's methods that register a hook."""
    is_method = frame.name.startswith("register_") and frame.name.endswith("_hook")
    return is_method and frame.filename == torch.nn.Module.register_buffer.__code__.co_filename


def user_frame(stack: Sequence[traceback.FrameSummary]) -> str:
    """ "file.py:12, in forward: code" of the deepest frame outside torch, the standard library and placemat."""
    users = [f for f in stack if not is_library_file(f.filename)]
    if not users:
        return "an unknown line"
    frame = users[-1]
    return f"{shown_file(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line}"


def first_line(error: BaseException) -> str:
    return next(_text_lines(error), type(error).__name__)


def explanation(error: BaseException) -> str:
    """What PyTorch says of an error before it lists frames, on one line. Of values it speaks in symbols of its own."""
    if "data-dependent expression" in str(error):
        return "it decides by the value of a tensor, and a trace has no values"
    lines = itertools.takewhile(lambda line: not line.startswith("from user code"), _text_lines(error))
    return textwrap.shorten(" ".join(itertools.islice(lines, 6)), 600, placeholder=" ...")


def _text_lines(error: BaseException) -> Iterator[str]:
    return (line.strip() for line in str(error).splitlines() if line.strip())
