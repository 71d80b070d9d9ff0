"""What has to be known of a kept module before its step is planned, learnt from one run of a copy of it.

The copy shares the module's parameters and has its buffers cloned; its arguments are zeros, but for tensors that are
arguments of the model's example call: those are taken as they are. Random state is put back. It is the module alone
that runs, never the model.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placemat.graph import lstm_kernels, torch_private
from placemat.graph.eager_run import Call, InnerGraph, run, trace_edges
from placemat.graph.errors import CaptureError, UnsupportedFeature

_FIXED = (nn.LSTM, nn.GRU, nn.RNN)
_TIMED_RUNS = 3
_OTHER_WAY = "Remedy: rewrite that part of the module, or keep a smaller or larger module eager."


@dataclass(frozen=True)
class Layout:
    """Geometry of one tensor, in elements, and of the storage below it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            int(tensor.untyped_storage().nbytes()),
            tensor.dtype,
            tensor.device,
        )

    def empty(self) -> Tensor:
        flat = torch.empty(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return flat.as_strided(self.size, self.stride, self.offset)

    def matches(self, tensor: Tensor) -> bool:
        return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) == (self.size, self.stride, self.dtype)


@dataclass(frozen=True)
class Facts:
    """One kind of call of a kept module.

    Attributes:
        call: how it is called.
        structure, constants: of what it returns; a constant is None where a tensor belongs.
        outputs, requires_grad: its tensors, in order.
        reaches: per output, the inputs to which its gradient flows.
        gradients: per input, the layout of its gradient; None where there is none.
        edges: per input, how many edges of the inner graph lead to it: so many terms its gradient is summed from.
        owners: numbers of the inputs and outputs (counted on) that the inner graph takes from the plan.
        saved_bytes: what the inner graph holds beside those.
        forward_workspace_bytes, backward_workspace_bytes: beside results and what is saved; None if not measured.
        is_fixed: a layer of PyTorch's, of which it is known that the graph is the same at every such call.
        by_kernels: the plan's runs call its kernels without a graph around them (`lstm_kernels`).
        may_run_again: such a layer that draws no random numbers: a second run does what the first did.
        forward_s, backward_s: how long runs took, without the first; None if they were not timed.
        summed: inputs whose gradient the step around adds to others; filled in when the graph is there (`eager_lower`).
    """

    call: Call
    structure: pytree.TreeSpec
    constants: tuple[Any, ...]
    outputs: tuple[Layout, ...]
    requires_grad: tuple[bool, ...]
    reaches: tuple[frozenset[int], ...]
    gradients: tuple[Layout | None, ...]
    edges: tuple[int, ...]
    owners: frozenset[int]
    saved_bytes: int
    forward_workspace_bytes: int | None
    backward_workspace_bytes: int | None
    is_fixed: bool
    by_kernels: bool = False
    may_run_again: bool = False
    forward_s: float | None = None
    backward_s: float | None = None
    summed: set[int] = field(default_factory=set, compare=False)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns, with these tensors in it."""
        supply = iter(tensors)
        leaves = [next(supply) if constant is Tensor else constant for constant in self.constants]
        return pytree.tree_unflatten(leaves, self.structure)

    def wanted(self, given: Sequence[bool]) -> list[int]:
        """Inputs that get a gradient if these outputs do."""
        reached = set().union(*(r for r, there in zip(self.reaches, given, strict=True) if there))
        return sorted(reached)


def learn(module: nn.Module, call: Call, tensors: Sequence[Tensor]) -> Facts:
    """Run a copy of `module` forward and backward.

    Args:
        module: the one that is kept.
        call: how it is called.
        tensors: real ones, in the order of the op's inputs; arguments may be made up.

    Raises:
        CaptureError: the module does not run on them.
        UnsupportedFeature: it does what cannot be part of a planned step.
    """
    versions = [t._version for t in tensors]
    with _undisturbed():
        twin = _copy_of(module, call.path)
        before = _attributes(twin)
        forward_allocations, (result, outputs, graph) = _observed(lambda: _run(twin, call, tensors))
        _check_effects(twin, call, tensors, versions, before)
        _check_sharing(twin, call, tensors, outputs)
        reaches, edges = trace_edges(graph)
        passed = {i: t for i, t in enumerate([*tensors, *(t.detach() for t in outputs)]) if i in graph.owners}
        given = list(_gradients(graph, outputs))
        runs = [_backward(graph, grads, passed) for grads in given]
        is_fixed = type(module) in _FIXED
        by_kernels = lstm_kernels.is_for_kernels(module, call, tensors) and _kernels_agree(
            module, call, tensors, outputs, graph
        )
        is_timed = is_fixed and all(t.device.type == "cpu" for t in tensors)
        forward_s = _seconds(lambda: _run(twin, call, tensors)) if is_timed else None
        backward_s = _seconds(lambda: graph.backward(given[0], passed)) if is_timed and given else None
    leaves, structure = pytree.tree_flatten(result)
    layouts = tuple(Layout.of(t) for t in outputs)
    gradient_layouts = runs[0][0] if runs else (None,) * len(tensors)
    workspaces = [workspace for _, workspace in runs]
    return Facts(
        call=call,
        structure=structure,
        constants=tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        outputs=layouts,
        requires_grad=tuple(t.requires_grad for t in outputs),
        reaches=reaches,
        gradients=gradient_layouts,
        edges=edges,
        owners=graph.owners,
        saved_bytes=graph.saved_bytes,
        forward_workspace_bytes=_workspace_bytes(forward_allocations, layouts, graph.saved_bytes),
        backward_workspace_bytes=None if None in workspaces else max(workspaces, default=0),  # type: ignore[type-var]
        is_fixed=is_fixed,
        by_kernels=by_kernels,
        may_run_again=is_fixed and not _draws(module),
        forward_s=forward_s,
        backward_s=backward_s,
    )


def _kernels_agree(
    layer: nn.Module, call: Call, tensors: Sequence[Tensor], outputs: Sequence[Tensor], graph: InnerGraph
) -> bool:
    """Whether kernels that are called directly make the same bits as the layer did, and save as much.

    Their gradients are compared by tests: the layer's here are of zeros.
    """
    results, direct = lstm_kernels.run(layer, call, tensors, graph.owners)
    passed = frozenset(range(1, len(tensors) + 1))  # the parameters, and the first result
    same = all(torch.equal(a, b) for a, b in zip(results, outputs, strict=True))
    return same and graph.owners - {0} == passed and direct.saved_bytes == graph.saved_bytes


def _draws(layer: Any) -> bool:
    """Whether a recurrent layer has dropout. That of cuDNN has a generator of its own, which nobody can set back."""
    return layer.training and layer.dropout > 0 and layer.num_layers > 1


def _seconds(call: Callable[[], Any]) -> float:
    """Of the fastest of a few runs; others may have been held up."""

    def elapsed_s() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(elapsed_s() for _ in range(_TIMED_RUNS))


def _gradients(graph: InnerGraph, outputs: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Gradients that may come: for all results, and for each alone; dense, and in the layout of the result.

    What a backward allocates depends on both: kernels copy what is not dense, and make zeros for what is not there.
    """
    differentiable = [i for i, edge in enumerate(graph.outputs) if edge is not None]
    subsets = dict.fromkeys([tuple(differentiable), *((i,) for i in differentiable)] if differentiable else [])
    for subset in subsets:
        for memory_format in (torch.preserve_format, torch.contiguous_format):
            yield [
                torch.zeros_like(t, memory_format=memory_format) if i in subset else None for i, t in enumerate(outputs)
            ]


def _backward(
    graph: InnerGraph, given: Sequence[Tensor | None], passed: Mapping[int, Tensor]
) -> tuple[tuple[Layout | None, ...], int | None]:
    """Layouts of the gradients that flow from given ones, and the workspace of that."""
    allocations, gradients = _observed(lambda: graph.backward(given, passed))
    layouts = tuple(None if g is None else Layout.of(g) for g in gradients)
    return layouts, _workspace_bytes(allocations, layouts, 0)


def _copy_of(module: nn.Module, path: str) -> nn.Module:
    """Parameters shared, everything else copied."""
    shared = {id(p): p for p in module.parameters()}
    try:
        return copy.deepcopy(module, shared)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedFeature(
            f"the module {path} is to be kept eager, but cannot be copied to learn the shapes of its results: {error}. "
            "Remedy: give what cannot be copied a __deepcopy__."
        ) from error


def _run(module: nn.Module, call: Call, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor], InnerGraph]:
    try:
        return run(module, call, tensors)
    except Exception as error:  # whatever the user's code raises
        raise CaptureError(
            f"the module {call.path} ({type(module).__name__}) is to be kept eager, but a copy of it does not run on "
            f"zeros in the place of its arguments, from which the shapes of its results are learnt: "
            f"{type(error).__name__}: {error}. Remedy: let it accept zeros, or pass what it depends on (lengths, "
            "indices) to the model as a tensor of its own, which is then taken from the example call."
        ) from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Real kernels outside of any trace; generators are put back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch_private.outside_tracing(), torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _observed(call: Callable[[], Any]) -> tuple[list[int] | None, Any]:
    """CPU allocations during a call, None if a profiler is in the way, and the result."""
    if torch_private.is_profiling():
        return None, call()
    results: list[Any] = []
    allocations = torch_private.cpu_allocations(lambda: results.append(call()))
    return allocations, results[0]


def _workspace_bytes(allocations: list[int] | None, layouts: Sequence[Layout | None], saved_bytes: int) -> int | None:
    """Peak beside the results and what is saved; on the CPU only, whose allocator is watched."""
    if allocations is None or any(layout is not None and layout.device.type != "cpu" for layout in layouts):
        return None
    results = sum(layout.storage_bytes for layout in layouts if layout is not None)
    return max(0, max(itertools.accumulate(allocations), default=0) - results - saved_bytes)


def _attributes(module: nn.Module) -> dict[tuple[str, str], object]:
    return {(name, key): value for name, m in module.named_modules() for key, value in m.__dict__.items()}


def _check_effects(
    module: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    versions: Sequence[int],
    before: dict[tuple[str, str], object],
) -> None:
    """Refuse what the planned step would not see: arguments and parameters written to, tensors left on the module."""
    if written := [i for i, (t, v) in enumerate(zip(tensors, versions, strict=True)) if t._version != v]:
        what = "an argument" if written[0] < call.num_arguments else "a parameter"
        raise UnsupportedFeature(
            f"the module {call.path} is kept eager, but its forward writes to {what} in place, which the step around "
            "it would not see. Remedy: clone() it first, inside the module."
        )
    for (name, key), value in _attributes(module).items():
        if key == "_flat_weights" or value is before.get((name, key)):
            continue
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            where = f"{call.path}.{name}" if name else call.path
            raise UnsupportedFeature(
                f"the module {call.path} is kept eager, but its forward sets the tensor attribute {where}.{key}, which "
                "the step around it would not see. Remedy: return the tensor, or register it as a buffer and write to "
                "it in place."
            )


def _check_sharing(module: nn.Module, call: Call, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    owners = {t.untyped_storage()._cdata: "an argument" for t in tensors[: call.num_arguments]}
    owners.update({t.untyped_storage()._cdata: "a parameter" for t in module.parameters()})
    owners.update({t.untyped_storage()._cdata: "a buffer" for t in module.buffers()})
    for output in outputs:
        if output.layout != torch.strided or type(output) is not Tensor:
            raise UnsupportedFeature(
                f"the module {call.path} is kept eager and returns a {type(output).__name__} of "
                f"layout {output.layout}; only dense tensors can be planned. {_OTHER_WAY}"
            )
        key = output.untyped_storage()._cdata
        if key in owners:
            raise UnsupportedFeature(
                f"the module {call.path} is kept eager, but one of its results shares its storage with {owners[key]}. "
                "Remedy: let it return a clone(), or take the view outside of the module."
            )
        owners[key] = "another result"
