"""One op, run alone on synthetic inputs: how long it takes, and what it allocates.

In a step an op reads what was written a moment ago and what was written long ago, and its results go where other
tensors have just been freed. Run again and again on the same inputs it would find all of them in the innermost caches,
and be up to twice as fast. So a trial takes turns among copies of the inputs, and holds as many results, until they
fill `ROTATION_BYTES`: more than the second-level cache of a core, less than the last-level cache of a server. An op
whose own tensors are larger evicts itself, and one of a few KiB stays warm, as it is in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from placemat.cost_models.operands import output_tensors
from placemat.cost_models.synthetic import arguments, input_bytes, overload
from placemat.graph import torch_private
from placemat.graph.ir import OpSignature

ROTATION_BYTES = 2**23
_MOST_COPIES = 16
_SAMPLE_S = 3e-4  # of ops that are shorter, as many runs as fill it make one sample
_MOST_RUNS = 256


@dataclass
class Trial:
    """An op and its synthetic inputs, in as many copies as a sample rotates through."""

    device: torch.device
    calls: list[Callable[[], Any]]
    inputs: list[Tensor]  # of the first call

    @classmethod
    def of(cls, signature: OpSignature, device: torch.device, copies: int | None = None) -> Trial:
        """Make the inputs, in as many copies as fill `ROTATION_BYTES` unless told.

        Raises:
            Exception: whatever torch raises for an operator that is not there, or a lack of memory.
        """
        function = overload(signature.target)._op
        own_bytes = input_bytes(signature) + sum(t.nbytes for t in output_tensors(signature))
        if copies is None:
            copies = min(_MOST_COPIES, max(1, ROTATION_BYTES // max(1, own_bytes)))
        all_arguments = [arguments(signature, device) for _ in range(copies)]
        return cls(device, [_bound(function, *a) for a in all_arguments], _tensors(all_arguments[0]))

    def sample_s(self) -> float:
        """Seconds of one run, from one uninterrupted sample of runs."""
        first_s = self._seconds(1)
        num_runs = min(_MOST_RUNS, max(1, int(_SAMPLE_S / max(first_s, 1e-9))))
        return self._seconds(num_runs) / num_runs

    def _seconds(self, num_runs: int) -> float:
        held: list[Any] = [None] * len(self.calls)
        clock = _cuda_seconds if self.device.type == "cuda" else _cpu_seconds

        def runs() -> None:
            for i in range(num_runs):
                turn = i % len(held)
                held[turn] = None
                held[turn] = self.calls[turn]()

        return clock(runs, self.device)

    def workspace_bytes(self) -> int:
        """Peak of one run beside the storages of its results; that of a first run is in it."""
        if self.device.type == "cuda":
            return _cuda_workspace_bytes(self.calls[0], self.device)
        peak_bytes, result = peak_allocated_bytes(self.calls[0])
        inputs = {t.untyped_storage()._cdata for t in self.inputs}
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
        return max(0, peak_bytes - sum(size for key, size in storages.items() if key not in inputs))


def _bound(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: function(*args, **kwargs)


def peak_allocated_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """Largest sum of live CPU allocations during `run()`, beyond what lived before, and its result."""
    results: list[Any] = []
    live = peak = 0
    for num_bytes in torch_private.cpu_allocations(lambda: results.append(run())):
        live += num_bytes
        peak = max(peak, live)
    return peak, results[0]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _cpu_seconds(runs: Callable[[], None], device: torch.device) -> float:
    """With one thread its processor time, of which other processes take nothing; otherwise wall-clock time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    runs()
    return clock() - start


def _cuda_seconds(runs: Callable[[], None], device: torch.device) -> float:
    """Between two events on the stream: kernels, and the gaps between them where launching takes longer."""
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        runs()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _cuda_workspace_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """From the allocator's statistics. A library's own workspace, made once per stream, is made by a run before."""
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    held_bytes = torch.cuda.memory_allocated(device) - before_bytes
    del result
    return max(0, peak_bytes - held_bytes)
