"""What a step costs by its operators: each call that PyTorch dispatches, at what one like it takes alone, summed.

Free of what timing suffers from (other processes, where a process's memory lies), and blind to what it sees: calls of
Python, and what caches hold from one operator to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placemat.cost_models import Measured
from placemat.graph.ir import Op, OpSignature
from placemat.graph.signature import argument_spec, tensor_spec


class Calls(TorchDispatchMode):
    """Counts calls by their signatures."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[OpSignature] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise Dynamo would run compiled modules as they were written, and their operators would be counted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        signature = OpSignature(
            target=str(func),
            args=tuple(argument_spec(a) for a in args),
            kwargs=tuple(sorted((name, argument_spec(a)) for name, a in (kwargs or {}).items())),
            outputs=tuple(tensor_spec(t) for t in outputs),
        )
        self.counts[signature] += 1
        return result


def op_seconds(step: Callable[[], object]) -> float:
    """Seconds of the operators that a step calls on the CPU. What is not in the cache of costs is measured."""
    with Calls() as calls:
        step()
    ops = {signature: _op(signature) for signature in calls.counts}
    costs = Measured("cpu")
    costs.prepare(list(ops.values()), None)
    return sum(count * costs.op_cost(ops[signature]).runtime_s for signature, count in calls.counts.items())


def _op(signature: OpSignature) -> Op:
    return Op(
        index=0,
        name=signature.target,
        signature=signature,
        phase="forward",
        inputs=(),
        recompute_inputs=(),
        outputs=(),
        recomputable=False,
    )
