"""PyTorch's own knob: `torch._functorch.config.activation_memory_budget` and the min-cut partitioner behind it.

The graphs run op by op, as those of placemat do (backend aot_eager), so that what differs is what is kept. The budget
is a part of what the partitioner would save by itself; solvers choose under budgets strictly between 0 and 1.

Below 1 the partitioner recomputes random operators with new random numbers (pytorch issue 190758): gradients of models
with dropout are silently wrong. Settings "random kept" mark those operators as to be saved, which it honours for
budgets above 0; at 0 it saves nothing but inputs, whatever is marked. BatchNorm is decomposed: otherwise the statistics
are saved, changed in place, and backward refuses to run.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.peers.contender import NotApplicable, Setting
from benchmarks.work import Work
from tests.models import Workload

_aten = torch.ops.aten
_BATCH_NORM = (
    _aten.native_batch_norm,
    _aten._native_batch_norm_legit,
    _aten._native_batch_norm_legit_functional,
    _aten.native_batch_norm_backward,
)
BUDGETS = (0.75, 0.5, 0.25, 0.1)
SOLVERS = ("dp", "greedy", "ilp")


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention without dropout is tagged as if it did, and does not."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given))
    return True


def _keep_random(joint: fx.GraphModule) -> None:
    """Mark what draws random numbers as to be saved."""
    for node in joint.graph.nodes:
        if _draws(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _partition(joint: fx.GraphModule, inputs: Any, *, keeps_random: bool, **kwargs: Any) -> Any:
    if keeps_random:
        _keep_random(joint)
    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


class MemoryBudget:
    """torch.compile with backend aot_eager, its min-cut partitioner, and a memory budget."""

    name = "activation_memory_budget"

    def settings(self, work: Work) -> Sequence[Setting]:
        listed = [_setting(1.0, "dp", False)]
        for keeps_random in (True, False) if work.is_random else (False,):
            listed += [_setting(budget, solver, keeps_random) for solver in SOLVERS for budget in BUDGETS]
            listed.append(_setting(0.0, "dp", keeps_random))
        return listed

    def prepare(self, work: Work, workload: Workload, setting: Setting) -> Callable[[], str]:
        values = setting.values
        config.activation_memory_budget = float(values["budget"])
        config.activation_memory_budget_solver = str(values["solver"])
        graphs: list[str] = []

        def compiler(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            graphs.append(graph.code)
            return boxed_nop(graph, inputs)

        backend = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=functools.partial(_partition, keeps_random=bool(values["keeps_random"])),
            decompositions=get_decompositions(_BATCH_NORM),
            keep_inference_input_mutations=True,
        )
        forward = workload.model.forward

        # `model.compile` would compile nothing of a model that is made of torch's own modules alone.
        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        workload.model.forward = torch.compile(call, backend=backend)
        return functools.partial(_digest, graphs)


def _digest(graphs: Sequence[str]) -> str:
    if not graphs:
        raise NotApplicable("torch.compile compiled nothing of it")
    return hashlib.sha256("\n".join(graphs).encode()).hexdigest()


def _setting(budget: float, solver: str, keeps_random: bool) -> Setting:
    suffix = ", random kept" if keeps_random else ""
    label = f"{budget:g}, {solver}{suffix}" if 0 < budget < 1 else f"{budget:g}{suffix}"
    return Setting(label, f"{solver}{suffix}", {"budget": budget, "solver": solver, "keeps_random": keeps_random})
