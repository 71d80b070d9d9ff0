"""Every private name of Inductor that placemat touches, seen to work with torch 2.13.0.

Imported only by those who ask for Inductor: its import takes a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._guards
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx_inner, select_decomp_table
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler, OperatorIssue
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

# What a plan rests on, whatever the user's settings: random numbers are eager's and come in their order; CUDA graphs
# would keep all memory in pools of their own; results have the strides that were traced; kernels run in the order of
# the schedule; and a buffer is freed when it is dead instead of being held until another one of its size is wanted
# (without `inplace_buffers` the peak of a small attention block's backward is 13 % lower).
_FIXED: dict[str, Any] = {
    "fallback_random": True,
    "triton.cudagraphs": False,
    "keep_output_stride": True,
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}

# What Inductor raises when it cannot compile a graph; most come in an InductorError, a BackendCompilerFailed.
FAILURES = (BackendCompilerFailed, OperatorIssue, CppCompileError, InvalidCxxCompiler)


def present_settings() -> dict[str, Any]:
    """Settings of Inductor that are not the defaults."""
    config: Any = inductor_config
    settings: dict[str, Any] = config._get_dict(skip_default=True)
    return settings


def compile_graph(
    graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], settings: Mapping[str, Any], *, is_backward: bool
) -> Callable[[list[Any]], Any]:
    """Inductor's code for a graph of ATen ops; boxed: it empties the list of its arguments.

    Args:
        graph_module: of one output, a tuple of tensors and None. All its outputs get the strides that they have traced.
        inputs: fake tensors of one mode, one for each placeholder.
        settings: what `present_settings` gave.
        is_backward: it is the backward of a step.
    """
    mode = inputs[0].fake_mode if inputs else FakeTensorMode()  # type: ignore[attr-defined]
    with _compiling(mode, settings):
        decomposed = _decomposed(graph_module, inputs, mode)
        (output,) = decomposed.graph.find_nodes(op="output")
        results = output.args[0]
        output.meta["user_visible_output_idxs"] = [i for i, r in enumerate(results) if isinstance(r, fx.Node)]
        code: Callable[[list[Any]], Any] = compile_fx_inner(
            decomposed,
            list(inputs),
            is_backward=is_backward,
            cudagraphs=BoxedBool(False),
            layout_opt=False,
        )
    return code


class _InPlanOrder(InductorChoices):
    """Fuses only what no external kernel (a product, a convolution, a random op) lies between.

    Otherwise operators of one kind are fused that the schedule has far apart: the recomputations of two layer norms
    that share a weight, say, of which one result then waits until the other has been used.
    """

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if _is_parted(scheduler, node1, node2):
            return False
        return bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))

    def uuid(self) -> str:
        """What tells compiled code of this class in Inductor's cache from others."""
        return "placemat: in plan order, 1"


def _is_parted(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether an external kernel lies between two nodes of a scheduler, fused ones or single ones."""
    first, last = min(node1.min_order, node2.min_order), max(node1.max_order, node2.max_order)
    return any(node.is_extern() and first < node.min_order < last for node in scheduler.nodes)


@contextlib.contextmanager
def _compiling(mode: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    with (
        inductor_config.patch({**settings, **_FIXED, "inductor_choices_class": _InPlanOrder}),
        V.set_choices_handler(_InPlanOrder()),
        torch._guards.tracing(TracingContext(mode)),
        mock.patch.object(mode, "allow_non_fake_inputs", True),  # constants of the graph are real tensors
        torch.no_grad(),
    ):
        yield


def _decomposed(graph_module: fx.GraphModule, inputs: Sequence[Any], mode: Any) -> fx.GraphModule:
    """The same calls in the same order, made of the operators that Inductor has code for."""
    with mode, enable_python_dispatcher():
        made = make_fx(fx.Interpreter(graph_module).run, decomposition_table=select_decomp_table())(*inputs)
    return made
