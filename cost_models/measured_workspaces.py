"""Workspaces by measurement: what one run of the op on this machine allocates.

For ops whose formula is only an upper bound (`is_bound`: convolutions, 16-bit products and attention), where oneDNN
chooses how much to allocate. Each distinct signature is run once on synthetic inputs, so planning needs the op's
inputs, outputs and workspace as real memory for that moment, and without a limit about the time of one training step in
total.

`present_roofline` measures ops of up to `DEFAULT_LIMIT_BYTES`. Their bounds are the loose ones: what oneDNN takes
per thread, whatever the shape, is a hundred times such an op's tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from placemat.cost_models.base import CostModel, OpCost
from placemat.cost_models.cache import JsonCache
from placemat.cost_models.machine import machine_key
from placemat.cost_models.modes import outside_dispatch_modes
from placemat.cost_models.operands import input_tensors, output_tensors, storage_bytes
from placemat.cost_models.trial import Trial
from placemat.cost_models.workspaces import is_bound
from placemat.graph import torch_private
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.ir import Op, OpSignature

# Arguments and results of an op that `present_roofline` runs for its workspace: memory that a plan may take for a
# moment, and milliseconds of arithmetic.
DEFAULT_LIMIT_BYTES = 2**24


def measure_workspace_bytes(signature: OpSignature) -> int:
    """Peak of one run of a CPU op on synthetic inputs, beside its results.

    Raises:
        UnsupportedFeature: a profiler is already running; there can be only one.
    """
    if torch_private.is_profiling():
        raise UnsupportedFeature("workspaces cannot be measured inside a running torch.profiler; plan outside of it.")
    with outside_dispatch_modes():
        return Trial.of(signature, torch.device("cpu"), copies=1).workspace_bytes()


def _is_measurement(entry: object) -> bool:
    return isinstance(entry, int) and entry >= 0


class MeasuredWorkspaces:
    """A cost model whose bounds on CPU workspaces are replaced by measurements, kept in the user's cache directory.

    While a torch.profiler is running nothing can be measured, and an op that is not in the cache keeps its bound.

    Args:
        base: gives seconds, and the workspaces of all other ops.
        cache_dir: for `workspaces.json`; `$PLACEMAT_CACHE_DIR` or the user's cache directory if None.
        limit_bytes: ops with more bytes of arguments and results than this keep their bound; None measures all.
    """

    def __init__(self, base: CostModel, cache_dir: Path | None = None, limit_bytes: int | None = None) -> None:
        self.base = base
        self.limit_bytes = limit_bytes
        self._cache = JsonCache("workspaces", cache_dir, _is_measurement)

    @property
    def source(self) -> str:
        which = "" if self.limit_bytes is None else f" of up to {self.limit_bytes / 2**20:.3g} MiB"
        return f"{self.base.source}; workspaces of vendor-library ops{which} measured"

    def op_cost(self, op: Op) -> OpCost:
        cost = self.base.op_cost(op)
        tensors = [*input_tensors(op.signature), *output_tensors(op.signature)]
        if not is_bound(op.signature) or any(t.device != "cpu" for t in tensors):
            return cost
        if self.limit_bytes is not None and sum(map(storage_bytes, tensors)) > self.limit_bytes:
            return cost
        measured_bytes = self._workspace_bytes(op.signature, bound_bytes=cost.workspace_bytes)
        return replace(cost, workspace_bytes=measured_bytes)

    def _workspace_bytes(self, signature: OpSignature, bound_bytes: int) -> int:
        machine = machine_key()
        key = hashlib.sha256(f"{machine}; {signature!r}".encode()).hexdigest()
        entry = self._cache.get(key)
        if entry is None and torch_private.is_profiling():
            return bound_bytes
        if entry is None:
            entry = self._cache.put(key, measure_workspace_bytes(signature))
        return int(entry)
