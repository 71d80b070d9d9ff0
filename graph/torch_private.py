"""Every private name of PyTorch that placemat touches; docs/versions.md says in which versions each exists.

Nothing else in placemat imports from `torch._*`, but for Inductor's names in `torch_inductor` and for
`torch.utils._pytree`; of the operators that torch hands out, other modules know the types (`torch._ops`) and dispatch
keys. docs/design.md says why this route was chosen over the public ones.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo
from torch._C._profiler import _ExperimentalConfig
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException, Unsupported
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.utils import numpy_to_tensor_wrapper
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import ProfilerConfig, ProfilerState
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from placemat.graph.composites import dropout, gru_cell
from placemat.graph.cumulative_batch_norm import read_at_run_time
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.forward_hooks import traced_registration

__all__ = [
    "SIDE_EFFECTS",
    "TANGENTS_ARE_FREED",
    "BackendCompilerFailed",
    "FailOnRecompileLimitHit",
    "TorchDynamoException",
    "Unsupported",
    "aot_backend",
    "backward_node",
    "below_transforms",
    "call_settings",
    "common_fake_mode",
    "compile_settings",
    "compiled",
    "cpu_allocations",
    "default_store",
    "disable_modes",
    "eager_decompositions",
    "fake_strides",
    "files_that_asked",
    "forget_compiled",
    "has_autocast_rule",
    "has_ddp_casts",
    "inside_functorch",
    "is_compiled_wrapper",
    "is_flat_fsdp",
    "is_profiling",
    "is_tangent",
    "mutated_input_of_output",
    "opaque_to_dynamo",
    "output_of_tangent",
    "outside_tracing",
    "pending_attribute_writes",
    "real_tensor_of",
    "running_backward",
    "settle_region",
    "splits_for_ddp",
    "strides_of_written",
    "suppose_all_asked",
    "when_backward_ends",
]

_LARGE = 1 << 30

SIDE_EFFECTS = (
    "the model runs operators with ordered side effects (checked linear algebra such as torch.linalg.inv, "
    "solve or cholesky is of that kind), which this version cannot schedule. Remedy: the _ex variants "
    "(torch.linalg.inv_ex, ...), or optimize the submodules around them."
)

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Gradients of outputs reach a compiled backward in a list that it may empty; before torch 2.13 they lived to its end.
TANGENTS_ARE_FREED = _VERSION >= (2, 13)

# AOTAutograd gives the backward of a node its `meta["custom"]`; before torch 2.10 we do.
_MARKS_REACH_BACKWARD = _VERSION >= (2, 10)

# Tracing takes composite operators apart where autograd does; before torch 2.10, wherever it can.
_TAKES_APART_AS_AUTOGRAD = _VERSION >= (2, 10)


def aot_backend(partition: Callable[..., Any], fw_compiler: Callable[..., Any], bw_compiler: Callable[..., Any]) -> Any:
    """A Dynamo backend that traces the joint graph and hands it to `partition`.

    The contract `partition_fn(joint, inputs, *, num_fwd_outputs, static_lifetime_input_indices)` is the one of the
    public "custom backends" documentation.
    """

    def marked(joint: torch.fx.GraphModule, inputs: Sequence[Any], **counts: Any) -> Any:
        _mark_backward(joint.graph)
        return partition(joint, inputs, **counts)

    partition_fn = partition if _MARKS_REACH_BACKWARD else marked
    return aot_autograd(fw_compiler=fw_compiler, bw_compiler=bw_compiler, partition_fn=partition_fn)


def _mark_backward(joint: torch.fx.Graph) -> None:
    """Hand the marks of forward nodes on to those of backward, as AOTAutograd does from torch 2.10 on.

    Sequence numbers say which belong together; of forward nodes that share one, the first made the autograd node.
    """
    marks: dict[int, Any] = {}
    for node in joint.nodes:
        if "seq_nr" not in node.meta:
            continue
        if node.meta.get("partitioner_tag") != "is_backward":
            marks.setdefault(node.meta["seq_nr"], node.meta.get("custom"))
        elif custom := marks.get(node.meta["seq_nr"]):
            node.meta["custom"] = dict(custom)


def compiled(entry: Callable[..., Any], backend: Callable[..., Any], bare: str | None) -> Callable[..., Any]:
    """`entry` under torch.compile(fullgraph=True, dynamic=False), with our settings whenever Dynamo traces it.

    They are set from inside of Dynamo's callback: around each call they took 0.6 ms a step, with caches as the kernels
    of a step leave them (torch 2.13). Calls happen under `call_settings`.

    Args:
        bare: Dynamo's name for a module; the caller sees to it that neither it nor what is registered below it has
            hooks, and nothing that is compiled is guarded against them.
    """
    context: Any = torch._dynamo.optimize(backend, nopython=True, dynamic=False)
    trace = getattr(context, "callback", None)
    if trace is None:  # TORCHDYNAMO_DISABLE=1; the caller notices that nothing was compiled
        return context(entry)

    def callback(*args: Any) -> Any:
        with compile_settings(), _hooks_not_guarded(bare):
            return trace(*args)

    callback._torchdynamo_orig_backend = trace  # type: ignore[attr-defined]  # Dynamo looks up what it compiled by it
    context.callback = callback
    return context(entry)


@contextlib.contextmanager
def call_settings() -> Iterator[None]:
    """What stays changed while a compiled entry is called, since Dynamo's guards see it."""
    with read_at_run_time(), traced_registration():
        yield


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """Dynamo's settings while one of our modules is captured or compiled; the user's own are back afterwards."""
    # A library that logs once from its forward would otherwise end the capture; nothing else of logging is ignored.
    ignored = set(dynamo_config.ignore_logger_methods)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        ignored.add(modeling.logger.warning_once)
    # AOTAutograd would trace the backward under the autocast that is on around the forward, and cast the products of
    # regions that the forward takes out of it. In eager, backward runs outside (`Backend` refuses one that does not).
    outside_autocast = functorch_config.patch(backward_pass_autocast="off")
    with (
        outside_autocast,
        dynamo_config.patch(
            recompile_limit=_LARGE,
            accumulated_recompile_limit=_LARGE,
            skip_nnmodule_hook_guards=False,
            optimize_ddp=False,
            ignore_logger_methods=ignored,
            suppress_errors=False,
            # Recurrent layers are kept eager; what would be traced of them is refused (graph/recurrent.py).
            allow_rnn=True,
            # Otherwise Dynamo draws numpy's random numbers from torch's generator; now such a call ends the capture.
            use_numpy_random_stream=True,
        ),
        # Dead random ops move the generator on in eager. FX's removal of dead code spares them only under this setting
        # (torch/fx/graph.py, eliminate_dead_code), whatever the backend.
        inductor_config.patch(fallback_random=True),
        call_settings(),
        _calls_as_written(),
        eager_decompositions(),
        _device_kernels_stay(),
        _questions_noted(),
    ):
        yield


_BARE: ContextVar[str | None] = ContextVar("placemat: a module without hooks, as Dynamo calls it", default=None)


@contextlib.contextmanager
def _hooks_not_guarded(bare: str | None) -> Iterator[None]:
    """Leave out the guards that `bare` and the modules registered below it have no hooks; all others stay.

    Dynamo's own setting for that, `skip_nnmodule_hook_guards`, also leaves out modules that nobody can know of, such as
    those in a plain list.
    """
    token = _BARE.set(bare)
    try:
        yield
    finally:
        _BARE.reset(token)


_GUARD_AGAINST_HOOKS = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT


@functools.wraps(_GUARD_AGAINST_HOOKS)
def _guard_unless_bare(builder: Any, guard: Any) -> None:
    bare = _BARE.get()
    if bare is None or re.fullmatch(re.escape(bare) + r"(\._modules\['[^']*'\])*\.\w+", guard.name) is None:
        _GUARD_AGAINST_HOOKS(builder, guard)


# Once and for all: put in and taken out again, two threads that trace at a time would leave it there.
GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = _guard_unless_bare  # type: ignore[method-assign]


_REWRITTEN_METHODS = ("add_", "addcmul_", "addcdiv_")
_REWRITTEN_FUNCTIONS = (torch.addcdiv, torch._foreach_lerp_, torch._foreach_pow)


@contextlib.contextmanager
def _calls_as_written() -> Iterator[None]:
    """Keep Dynamo from writing one call as several, which round otherwise: `x.addcdiv_(a, b, value=v)` and its like.

    It does so that a factor may be a tensor without its value being read; before 2.13 also with `x.add_(y, alpha=a)` of
    a number. Newer versions have a setting for some of them (`enable_dynamo_decompositions`), none for all.
    """
    methods = {name: method for name in _REWRITTEN_METHODS if (method := vars(TensorVariable).get(f"method_{name}"))}
    table = vars(TensorVariable).get("tp_methods", {})  # where torch 2.14 looks for them
    entries = {name: table.pop(name) for name in _REWRITTEN_METHODS if name in table}
    handlers = TorchInGraphFunctionVariable._get_handlers()  # one dictionary, made once
    functions = {f: handlers.pop(f) for f in _REWRITTEN_FUNCTIONS if f in handlers}
    for name in methods:
        delattr(TensorVariable, f"method_{name}")
    try:
        yield
    finally:
        handlers.update(functions)
        table.update(entries)
        for name, method in methods.items():
            setattr(TensorVariable, f"method_{name}", method)


_FILES_THAT_ASKED: set[str] = set()


@contextlib.contextmanager
def _questions_noted() -> Iterator[None]:
    """Note where forwards that are traced meanwhile ask torch.compiler.is_compiling() or its kin (True in a trace)."""
    present = InstructionTranslatorBase.mark_inconsistent_side_effects  # called for these functions alone

    def noted(translator: Any) -> None:
        frame = translator
        while frame is not None:
            _FILES_THAT_ASKED.add(frame.f_code.co_filename)
            frame = getattr(frame, "parent", None)
        present(translator)

    _FILES_THAT_ASKED.clear()
    owner: Any = InstructionTranslatorBase
    owner.mark_inconsistent_side_effects = noted
    try:
        yield
    finally:
        owner.mark_inconsistent_side_effects = present


def files_that_asked() -> frozenset[str]:
    """Files in which the forward that is being traced asked whether it is compiled, and those of their callers."""
    return frozenset(_FILES_THAT_ASKED)


def suppose_all_asked() -> None:
    """Of a forward that was traced before anything was noted: any module's file may have asked."""
    _FILES_THAT_ASKED.update(
        f for m in list(sys.modules.values()) if isinstance(f := getattr(m, "__file__", None), str)
    )


def is_full_graph() -> bool:
    """Whether the trace that a backend is called in must become one graph: `torch.compile(fullgraph=True)`."""
    return bool(InstructionTranslator.current_tx().one_graph)


def splits_for_ddp() -> bool:
    """Whether Dynamo splits graphs at the buckets of a DistributedDataParallel that runs its forward."""
    active = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return active is not None and bool(dynamo_config.optimize_ddp)


def draws_for_numpy(target: object) -> bool:
    """Whether the target of a call in Dynamo's graph stands for one of numpy's random functions."""
    function = getattr(target, "f", None)
    return isinstance(target, numpy_to_tensor_wrapper) and "random" in str(getattr(function, "__module__", ""))


# A trace runs Python kernels in place of these operators' own, which round otherwise, or decide otherwise between
# products (`should_fold` in torch/_decomp looks at strides that eager's does not), or take more memory. one_hot and
# tensor_split by a tensor are not among them: their own kernels read data.
_PYTHON_KERNELS = """
    matmul.default pad_sequence.default broadcast_tensors.default unsafe_chunk.default
    hardshrink.default softshrink.default multi_margin_loss.default multilabel_margin_loss_forward.default
    upsample_linear1d.vec upsample_bilinear2d.vec upsample_bilinear2d.default upsample_trilinear3d.vec
    upsample_bicubic2d.vec upsample_bicubic2d.default _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec
    upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
    upsample_nearest1d.default upsample_nearest2d.default upsample_nearest3d.default
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec
    _upsample_nearest_exact1d.default _upsample_nearest_exact2d.default _upsample_nearest_exact3d.default
""".split()


@contextlib.contextmanager
def eager_decompositions() -> Iterator[None]:
    """Trace what eager runs: operators' own kernels where Python ones would take their place, and ours of `composites`.

    On the meta device composite operators decompose, so that autograd sees what they are made of. Some have a Python
    kernel for meta tensors as well (nll_loss, where with a scalar, std, var, ...). The Python dispatcher, under which
    AOTAutograd traces, takes that for a device kernel without a derivative, and their backward is missing in the graph
    (torch 2.13; the rule is `has_backend_kernel` in torch/_ops.py). No other device has them.
    """
    keys = torch._C.DispatchKey
    aten = torch.ops.aten
    ours: dict[Any, Callable[..., Any]] = {aten.dropout.default: dropout, aten.gru_cell.default: gru_cell}
    present = {op: dict(op.py_kernels) for op in (*_with_python_kernels(), *_composites_with_meta_kernels(), *ours)}
    for op in _with_python_kernels():
        for key in (keys.Autograd, keys.CompositeImplicitAutograd):
            op.py_kernels.pop(key, None)
    for op in _composites_with_meta_kernels():
        op.py_kernels[keys.AutogradMeta] = op.decompose
    for op, made_of in ours.items():
        for key in (keys.Autograd, keys.CompositeImplicitAutograd):
            op.py_kernels[key] = made_of
    _forget_dispatch(present)
    try:
        yield
    finally:
        for op, kernels in present.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
        _forget_dispatch(present)


def _forget_dispatch(ops: Iterable[Any]) -> None:
    for op in ops:
        op._dispatch_cache.clear()


@functools.cache
def _with_python_kernels() -> tuple[Any, ...]:
    names = (name.split(".") for name in _PYTHON_KERNELS)
    return tuple(getattr(getattr(torch.ops.aten, base), overload) for base, overload in names)


@functools.cache
def _composites_with_meta_kernels() -> tuple[Any, ...]:
    """Composite operators without a derivative of their own that have a kernel for meta tensors."""
    keys = torch._C.DispatchKey
    tables = torch._decomp.global_decomposition_table.values()  # where the kernels for meta tensors come from
    return tuple(
        op
        for op in {op: None for table in tables for op in table}
        if isinstance(op, torch._ops.OpOverload)
        and keys.Meta in op.py_kernels
        and op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
        and not op.has_kernel_for_dispatch_key(keys.Autograd)
        and not op.has_kernel_for_dispatch_key(keys.AutogradMeta)
    )


@contextlib.contextmanager
def _device_kernels_stay() -> Iterator[None]:
    """Composite operators that a device has a kernel for, such as silu_backward, are not taken apart: eager runs it.

    The rule is torch.utils._python_dispatch.autograd_would_have_decomposed of torch 2.10, where tracing has it itself.
    """
    if _TAKES_APART_AS_AUTOGRAD:
        yield
        return
    owner: Any = torch._ops.OpOverload
    present = owner.decompose

    def decompose(op: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = next((t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None)
        if tensor is not None and not any(a.alias_info for a in op._schema.arguments):
            key = torch._C._dispatch_key_for_device(tensor.device.type)
            if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
                return NotImplemented
        return present(op, *args, **kwargs)

    owner.decompose = decompose
    try:
        yield
    finally:
        owner.decompose = present


@contextlib.contextmanager
def fake_strides(rule: Callable[[Any, tuple[int, ...], Sequence[Any]], tuple[int, ...] | None]) -> Iterator[None]:
    """Fake tensors on the CPU get the strides of a rule: operator, shape of the first result, arguments -> its strides.

    None leaves them as they are; so do symbolic shapes and operators that write or give views.

    Raises (while tracing):
        UnsupportedFeature: the model checks whether linear algebra has failed.
    """
    present = FakeTensorMode._dispatch_impl

    @functools.wraps(present)
    def restrided(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._linalg_check_errors.default:  # before torch 2.13 it is lost without a word
            raise UnsupportedFeature(SIDE_EFFECTS)
        made: Any = present(self, func, types, args, kwargs)
        first: Any = made[0] if isinstance(made, (tuple, list)) and made else made
        if not isinstance(first, FakeTensor) or first.fake_device.type != "cpu" or _writes_or_views(func):
            return made
        if not all(type(n) is int for n in (*first.shape, *first.stride())):
            return made
        strides = rule(func, tuple(first.shape), [*args, *(a for a in kwargs.values() if isinstance(a, torch.Tensor))])
        if strides is None or strides == first.stride():
            return made
        with self:
            first = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.fake_device)
        return (first, *made[1:]) if isinstance(made, (tuple, list)) else first

    FakeTensorMode.cache_clear()  # it has results with other strides
    FakeTensorMode._dispatch_impl = restrided  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode._dispatch_impl = present  # type: ignore[method-assign]
        FakeTensorMode.cache_clear()


@contextlib.contextmanager
def strides_of_written() -> Iterator[None]:
    """What was written through a view keeps its strides along dimensions of one entry, as in eager.

    In a trace a write makes a new tensor, of which the written one becomes a view: what was transposed for the write
    and back may come with another stride along such a dimension. It means nothing, but BLAS chooses kernels by it.
    """
    present = FunctionalTensorMode.__torch_dispatch__

    @functools.wraps(present)
    def restrided(self: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func not in FunctionalTensor.metadata_fns:
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, FunctionalTensor) and 1 in tensor.shape:
                    _restride(tensor)
        return present(self, func, types, args, kwargs)

    FunctionalTensorMode.__torch_dispatch__ = restrided  # type: ignore[method-assign]
    try:
        yield
    finally:
        FunctionalTensorMode.__torch_dispatch__ = present  # type: ignore[method-assign]


def _restride(tensor: FunctionalTensor) -> None:
    """Give the present content of a traced tensor the strides that the tensor itself has had from the beginning."""
    torch._sync(tensor.elem)
    content = torch._from_functional_tensor(tensor.elem)
    strides = tensor.stride()
    if content.shape != tensor.shape or content.stride() == strides:
        return
    if all(size == 1 or a == b for size, a, b in zip(content.shape, content.stride(), strides, strict=True)):
        torch._functionalize_replace(tensor.elem, content.as_strided(content.shape, strides))


@functools.cache
def _writes_or_views(func: Any) -> bool:
    """Whether an operator writes or gives views; taken to be so of higher-order ones, which 2.14 sends here, too."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    schema = func._schema
    return schema.is_mutable or any(r.alias_info is not None for r in schema.returns)


def disable_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave fake-tensor and proxy modes: real tensors can be made inside."""
    return _disable_current_modes()


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Run real kernels in the middle of a trace, as eager picks them.

    No modes, no Python kernels in their place, and hooks on saved tensors run, which a trace puts off.
    """
    present = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with _disable_current_modes(), no_python_dispatcher():
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(present)


def opaque_to_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo does not look into: AOTAutograd runs it and records the operators that it calls."""
    opaque: Callable[..., Any] = torch._dynamo.nonstrict_trace(function)
    return opaque


def real_tensor_of(fake: torch.Tensor, candidates: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The candidate that a trace stands a fake tensor in for, if there is one."""
    mode = getattr(fake, "fake_mode", None)
    if mode is None:
        return None
    return next((t for t in candidates if mode.fake_tensor_converter._get_memo(t) is fake), None)


def common_fake_mode(tensors: Iterable[torch.Tensor]) -> FakeTensorMode | None:
    """The mode that all these fake tensors are of; None if there are none, or others among them."""
    modes = [t.fake_mode if isinstance(t, FakeTensor) else None for t in tensors]
    return modes[0] if modes and all(mode is modes[0] for mode in modes) else None


def pending_attribute_writes(modules: Container[Any]) -> str | None:
    """Name of an attribute of one of the modules that the traced forward has written to so far.

    Dynamo does such writes only when the compiled code has run.
    """
    for variable, attributes in InstructionTranslator.current_tx().output.side_effects.store_attr_mutations.items():
        value = getattr(variable, "value", None)
        if attributes and isinstance(value, torch.nn.Module) and value in modules:
            return next(iter(attributes))
    return None


def settle_region() -> Any:
    """While compiling: tell AOT how the region that it compiles is to be run.

    - No saved tensor may be overwritten ("donated"), so that backward(retain_graph=True) works.
    - Gradients of outputs come to backward with the strides that the loss gives them. AOT would copy them into those of
      the outputs, and sums over them then run in another order than in eager.

    Returns AOT's description of the region, by which `backward_node` knows the region's node again.
    """
    context = TracingContext.try_get()
    assert context is not None, "called outside a compilation"
    assert context.fw_metadata is not None, "called before AOTAutograd has traced"
    context.fw_metadata.bw_donated_idxs = []
    for meta in context.fw_metadata.subclass_tangent_meta:
        if isinstance(meta, PlainTensorMeta):
            # Read when backward runs (`coerce_to_expected_memory_format`): what has the size and strides is not copied.
            meta.memory_format = MemoryFormatMeta(size=_ANY, stride=_ANY)
    return context.fw_metadata


class _Any:
    """Equal to every size and to all strides."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_ANY: Any = _Any()


def is_tangent(placeholder: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph is the gradient of an output."""
    return type(placeholder.meta.get("desc")).__name__ == "TangentAOTInput" or placeholder.name.startswith("tangents")


def output_of_tangent(placeholder: torch.fx.Node) -> int | None:
    """Index of the Dynamo graph's output of which a placeholder is the gradient; None if it is of none."""
    index: int | None = getattr(getattr(placeholder.meta.get("desc"), "output", None), "idx", None)
    return index


def mutated_input_of_output(desc: Any) -> int | None:
    """Index of the input whose new content an output carries, or None if the output is the user's."""
    if type(desc).__name__ != "InputMutationAOTOutput":
        return None
    index: int | None = getattr(desc.mutated_input, "idx", None)
    if index is None:
        raise UnsupportedFeature(
            "the forward overwrites an input or buffer that shares its storage with another one. Remedy: clone() "
            "one of them, or write to a tensor of its own."
        )
    return index


def backward_node(outputs: Any, region: Any) -> Any:
    """The autograd node of a compiled region, found from its outputs (a view output sits a step or two above it).

    `region` is what `settle_region` returned for it; nodes of other regions, before this one, are passed over.
    """
    queue = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set()
    while queue:
        node = queue.pop(0)
        forward = getattr(node, "_forward_cls", None)
        if getattr(forward, "metadata", None) is region:
            return node
        if forward is not None and hasattr(forward, "compiled_bw"):
            continue
        seen.add(node)
        queue.extend(n for n, _ in node.next_functions if n is not None and n not in seen)
    return None


def has_autocast_rule(op: Any, device: str) -> bool:
    """Whether autocast intercepts an operator on a device type."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}.get(device)
    if key is None or not isinstance(op, torch._ops.OpOverload):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def inside_functorch() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_compiled_wrapper(model: object) -> bool:
    """Whether a module is what `torch.compile` makes of another one."""
    return isinstance(model, OptimizedModule)


def below_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the wrappers of torch.func transforms stand for: they have no storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_flat_fsdp(module: torch.nn.Module) -> bool:
    """Whether FullyShardedDataParallel (FSDP1) has replaced the module's parameters by views of a flat tensor.

    fully_shard() (FSDP2) marks modules the same way, but its parameters are always nn.Parameter.
    """
    if not getattr(module, "_is_fsdp_managed_module", False):
        return False
    own = (p for p in module._parameters.values() if p is not None)
    return not module._fsdp_use_orig_params or any(not isinstance(p, torch.nn.Parameter) for p in own)


def has_ddp_casts(module: torch.nn.Module) -> bool:
    """Whether DistributedDataParallel(mixed_precision=) exchanges the contents of the module's own parameters."""
    return any(hasattr(p, "_mp_param") for p in module.parameters(recurse=False))


def default_store() -> Any:
    """The key-value store (torch.distributed.Store) that the default process group was made with."""
    return torch.distributed.distributed_c10d._get_default_store()


def running_backward() -> int:
    """Number of the backward that runs on this thread; -1 if none does."""
    return int(torch._C._current_graph_task_id())


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call this when the backward that runs on this thread has run its last node."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def forget_compiled(function: Callable[..., Any]) -> None:
    """Drop what Dynamo compiled for one function, and only that."""
    torch._dynamo.reset_code(function.__code__)


def is_profiling() -> bool:
    """Whether a profiler of PyTorch is recording here; there can be only one."""
    return bool(torch._C._autograd._profiler_enabled())


def cpu_allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of the blocks that the CPU allocator gives out (positive) and takes back (negative) during `run()`.

    The recorder from before Kineto (`torch.autograd.profiler_legacy`): a hundred microseconds, and it writes nothing to
    standard error, where `torch.profiler` takes milliseconds and may leave two lines for every start.
    """
    settings = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch._C._autograd._enable_profiler_legacy(settings)
    try:
        run()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    return [event.cpu_memory_usage() for events in threads for event in events if str(event.kind()) == "memory_alloc"]
