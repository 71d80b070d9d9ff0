"""Distance: what a step pays for values that it reads long after it made them.

Ops are measured with their inputs in a cache, as they find them in a step that has just made them. A value that waits
for the backward leaves the caches meanwhile, is written to memory and read back from there. A plan that recomputes it
saves that: the value is read right after it was made again. So a recomputation costs its seconds less that difference,
and a step that keeps everything costs the difference of all its values more than its ops.

On a Xeon with an L3 of 300 MiB for all its tenants the difference is 0.05 ns per byte, beside 0.08 that reading and
writing take in the cache, and appears once 64 to 128 MiB lie between. Where it was left out, overheads of GPT-2 and a
U-Net were expected to be a tenth to a half higher than they were measured (`benchmarks/cost_models.py`).

A value that is recomputed several times saves the difference each time here, though the step pays it only once.
"""

from __future__ import annotations

import math
import statistics
import time
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from placemat.cost_models.cache import JsonCache
from placemat.cost_models.machine import machine_key
from placemat.cost_models.modes import outside_dispatch_modes
from placemat.graph import torch_private
from placemat.graph.ir import OpGraph

# Bytes written between making and reading a value from which on it counts as far.
FAR_BYTES = 2**26
# A value that is larger is not all in a cache even right after it was made.
_NEAR_BYTES = FAR_BYTES // 4

_TENSOR_BYTES = 2**22
_NEAR_ROTATION_BYTES = 2**23  # one tensor and its result
_FAR_ROTATION_BYTES = 2**28
_RUNS = 64
_REPEATS = 7


def far_values_bytes(graph: OpGraph) -> list[int]:
    """Per op, the bytes of its results that the backward reads from afar in a step that keeps them."""
    written = [0, *accumulate(sum(graph.values[v].bytes for v in op.outputs) for op in graph.ops)]
    first_read: dict[int, int] = {}
    for op in graph.ops[graph.border + 1 :]:
        for v in op.inputs:
            first_read.setdefault(v, op.index)
    far = [0] * len(graph.ops)
    for v, reader in first_read.items():
        value = graph.values[v]
        is_far = written[reader] - written[value.producer + 1] > FAR_BYTES
        if value.producer < graph.border and is_far and value.bytes <= _NEAR_BYTES and not value.pinned:
            far[value.producer] += value.bytes
    return far


def cpu_far_s_per_byte(cache_dir: Path | None = None) -> float:
    """Seconds per byte of a value that writing it to memory and reading it back takes longer than in a cache.

    Measured on the first call per machine, torch version and thread count (a quarter of a second, 256 MiB), afterwards
    read from `<cache_dir>/distance.json`. Inside a running torch.profiler, which would slow it down, what is not there
    counts as 0.
    """
    cache, key = JsonCache("distance", cache_dir, _is_measurement), machine_key()
    entry = cache.get(key)
    if entry is None and torch_private.is_profiling():
        return 0.0
    return float(entry if entry is not None else cache.put(key, _measure()))


def _measure() -> float:
    with outside_dispatch_modes():
        near, far = _Rotation(_NEAR_ROTATION_BYTES), _Rotation(_FAR_ROTATION_BYTES)
        pairs = [(near.seconds(), far.seconds()) for _ in range(_REPEATS)]
        difference_s = statistics.median(f for _, f in pairs) - statistics.median(n for n, _ in pairs)
    return float(f"{max(0.0, difference_s / _TENSOR_BYTES):.2g}")


class _Rotation:
    """Tensors that take turns in being read, each with a result that is held, and bytes of them all."""

    def __init__(self, num_bytes: int) -> None:
        count = num_bytes // (2 * _TENSOR_BYTES)
        self.tensors = [torch.ones(_TENSOR_BYTES // 4, dtype=torch.float32, device="cpu") for _ in range(count)]
        self.results: list[Tensor | None] = [None] * count
        self.seconds()  # the first results are memory that was never touched

    def seconds(self) -> float:
        """Of one multiplication by a number."""
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for i in range(_RUNS):
            turn = i % len(self.tensors)
            self.results[turn] = None
            self.results[turn] = self.tensors[turn].mul(2.0)
        return (clock() - start) / _RUNS


def _is_measurement(entry: object) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool) and 0 <= entry < math.inf
