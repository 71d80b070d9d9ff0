"""Capture: from a callable and its arguments to a JointGraph, without running it.

Dynamo and AOTAutograd trace the callable; the joint graph is taken at the partition step, and the capture ends there by
an exception of our own. Nothing is executed: random state, buffers, version counters and `.grad` stay as they were.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from placemat.graph import eager_ops, torch_private
from placemat.graph.autocast import weight_cache_is_on
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import CaptureError, PlacematError, UnsupportedFeature
from placemat.graph.joint import JointGraph, JointInput, fingerprint
from placemat.graph.recurrent import refusal, refuse_layers, what_is_packed
from placemat.graph.sources import is_library_file, tidy, user_line


class Interrupt(Exception):
    """Ends a compilation on purpose; never seen by a user."""


class _Captured(Interrupt):
    """Ends a capture with its result."""

    def __init__(self, joint: JointGraph) -> None:
        super().__init__("captured")
        self.joint = joint


def make_entry() -> Callable[..., Any]:
    """A function with a code object of its own.

    Dynamo keeps what it compiled on code objects, and its limits too: modules that shared one would evict each other.
    """

    def entry(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return forward(*args, **kwargs)

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
        UnsupportedFeature: it can, but nothing in it requires a gradient.
    """

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any) -> NoReturn:
        raise _Captured(make_joint(joint, num_fwd_outputs, names, autocast_cache))

    def forward_only(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> NoReturn:
        raise UnsupportedFeature(
            "no output of the model requires a gradient, so there is no backward to plan for. Remedy: check "
            "requires_grad of the parameters and inputs, and that the forward does not run under torch.no_grad()."
        )

    backend = torch_private.aot_backend(partition, forward_only, forward_only)
    names: list[JointInput] = []
    autocast_cache = weight_cache_is_on()

    kept = kept or KeptModules({})

    def named_backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        refuse_layers(graph_module)
        kept.refuse_shared(graph_module)
        names[:] = input_names(graph_module)
        return backend(graph_module, inputs)

    entry = make_entry()
    compiled = torch.compile(entry, backend=named_backend, fullgraph=True, dynamic=False)
    try:
        with torch_private.compile_settings(), torch_private.composites_on_meta(), torch.enable_grad():
            with kept.learning((args, kwargs)), kept.installed(), _no_collections(), reported(forward):
                compiled(forward, tuple(args), dict(kwargs))
    except _Captured as done:
        return done.joint
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


def make_joint(
    graph_module: fx.GraphModule, num_forward_outputs: int, names: Sequence[JointInput], autocast_cache: bool
) -> JointGraph:
    """JointGraph from what AOTAutograd hands to a partitioner."""
    eager_ops.attach_facts(graph_module.graph)
    identity = fingerprint(graph_module, num_forward_outputs)
    joint = JointGraph(graph_module, num_forward_outputs, (), identity)
    if len(joint.primals) != len(joint.gradients):
        raise UnsupportedFeature(
            "the model runs operators with ordered side effects (checked linear algebra such as torch.linalg.inv, "
            "solve or cholesky is of that kind), which this version cannot schedule. Remedy: the _ex variants "
            "(torch.linalg.inv_ex, ...), or optimize the submodules around them."
        )
    inputs = tuple(names[i] if i < len(names) else JointInput(node.name, False) for i, node in enumerate(joint.primals))
    return JointGraph(graph_module, num_forward_outputs, inputs, identity, autocast_cache)


def input_names(graph_module: fx.GraphModule) -> list[JointInput]:
    """Names of a Dynamo graph's inputs, in order."""
    names = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        example = node.meta.get("grapharg")
        source = getattr(getattr(example, "source", None), "name", node.name)
        text = str(source() if callable(source) else source)
        text = tidy(text.replace("L['args']", "args").replace("L['kwargs']", "kwargs"))
        is_parameter = isinstance(getattr(example, "example", None), torch.nn.Parameter)
        names.append(JointInput(text, is_parameter))
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
    stack = getattr(error, "real_stack", None) or ()
    where = user_frame(stack)
    registration = next((f.name for f in stack if _registers_hook(f)), None)
    if registration is not None:
        return (
            f"the model's forward calls {registration}(), and a graph cannot hold a change of a module's hooks. At "
            f"{where}. Remedy: register the hook once, outside of forward(): it is then captured with the model, with "
            "the arguments that it supplies and the attributes that it sets. What changes from call to call it can "
            "read from an attribute of the module; or pass it as an argument."
        )
    packed = what_is_packed(error)
    if packed is not None:
        return refusal(packed, where)
    kind = getattr(error, "gb_type", None) or "graph break"
    return (
        f"the model's forward cannot be captured as one graph ({kind}; data-dependent control flow, calls out of "
        f"torch and Python side effects end a graph): {first_line(error)}. At {where}. Remedy: rewrite that line "
        "with tensor operations (torch.where, masks), move it out of forward(), or optimize the submodules around "
        "it instead."
    )


def _registers_hook(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is one of torch.nn.Module's methods that register a hook."""
    is_method = frame.name.startswith("register_") and frame.name.endswith("_hook")
    return is_method and frame.filename == torch.nn.Module.register_forward_hook.__code__.co_filename


def user_frame(stack: Sequence[traceback.FrameSummary]) -> str:
    """ "file.py:12, in forward: code" of the deepest frame outside torch, the standard library and placemat."""
    users = [f for f in stack if not is_library_file(f.filename)]
    if not users:
        return "an unknown line"
    frame = users[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


def first_line(error: BaseException) -> str:
    return next(_text_lines(error), type(error).__name__)


def explanation(error: BaseException) -> str:
    """What PyTorch says of an error before it lists frames, on one line."""
    lines = itertools.takewhile(lambda line: not line.startswith("from user code"), _text_lines(error))
    return " ".join(itertools.islice(lines, 6))[:600]


def _text_lines(error: BaseException) -> Iterator[str]:
    return (line.strip() for line in str(error).splitlines() if line.strip())
