"""Workspaces by measurement: what one run of the op on this machine allocates.

For ops whose formula is only an upper bound (`is_bound`: convolutions, 16-bit products and attention), where oneDNN
chooses how much to allocate. Each distinct signature is run once on zeros, so planning needs the op's inputs, outputs
and workspace as real memory for that moment, and about the time of one training step in total.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from placemat.cost_models.base import CostModel, OpCost
from placemat.cost_models.cache import JsonCache
from placemat.cost_models.host import machine_key
from placemat.cost_models.modes import outside_dispatch_modes
from placemat.cost_models.operands import input_tensors, output_tensors, storage_bytes
from placemat.cost_models.workspaces import is_bound
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.ir import Op, OpSignature, TensorSpec


def peak_allocated_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """Largest sum of live CPU allocations during `run()`, beyond what lived before, and its result.

    Reads the "[memory]" events of torch.profiler, which c10's CPU allocator reports for every block.

    Raises:
        UnsupportedFeature: a profiler is already running; there can be only one.
    """
    if torch._C._autograd._profiler_enabled():
        raise UnsupportedFeature("workspaces cannot be measured inside a running torch.profiler; plan outside of it.")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = run()
    assert prof.profiler is not None
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, result


def _materialize(value: Any) -> Any:
    """Zeros in the layout of every TensorSpec of nested tuples."""
    if isinstance(value, TensorSpec):
        dtype: torch.dtype = getattr(torch, value.dtype)
        flat = torch.zeros(storage_bytes(value) // value.itemsize, dtype=dtype, device="cpu")
        return flat.as_strided(value.shape, value.strides)
    if isinstance(value, tuple):
        return [_materialize(v) for v in value]
    return value


def _overload(target: str) -> Callable[..., Any]:
    namespace, packet, name = target.split(".")
    overload: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), name)
    return overload


def measure_workspace_bytes(signature: OpSignature) -> int:
    """Peak of one run of a CPU op, less the bytes of its outputs as their specs give them.

    The op must take any values: zeros are passed for all tensors.
    """
    with outside_dispatch_modes():
        args = [_materialize(a) for a in signature.args]
        kwargs = {name: _materialize(value) for name, value in signature.kwargs}
        function = _overload(signature.target)
        peak, result = peak_allocated_bytes(lambda: function(*args, **kwargs))
        assert any(isinstance(t, torch.Tensor) for t in tree_leaves(result)), signature.target
    return max(0, peak - sum(t.nbytes for t in output_tensors(signature)))


class MeasuredWorkspaces:
    """A cost model whose bounds on CPU workspaces are replaced by measurements, kept in the user's cache directory.

    Args:
        base: gives seconds, and the workspaces of all other ops.
        cache_dir: for `workspaces.json`; `$PLACEMAT_CACHE_DIR` or the user's cache directory if None.
    """

    def __init__(self, base: CostModel, cache_dir: Path | None = None) -> None:
        self.base = base
        self._cache = JsonCache("workspaces", cache_dir, lambda entry: isinstance(entry, int) and entry >= 0)
        self._machine = machine_key(torch.get_num_threads())

    @property
    def source(self) -> str:
        return f"{self.base.source}; workspaces of vendor-library ops measured"

    def op_cost(self, op: Op) -> OpCost:
        cost = self.base.op_cost(op)
        inputs = input_tensors(op.signature)
        if not is_bound(op.signature) or any(t.device != "cpu" for t in inputs):
            return cost
        return OpCost(runtime_s=cost.runtime_s, workspace_bytes=self._workspace_bytes(op.signature))

    def _workspace_bytes(self, signature: OpSignature) -> int:
        key = hashlib.sha256(f"{self._machine}; {signature!r}".encode()).hexdigest()
        entry = self._cache.get(key)
        if entry is None:
            entry = self._cache.put(key, measure_workspace_bytes(signature))
        return int(entry)
