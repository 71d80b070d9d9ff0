"""Measure one training step: the allocator's peak and the wall-clock seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from placemat.graph import torch_private
from placemat.graph.errors import PlacematError
from placemat.units import format_bytes


@dataclass(frozen=True)
class Measurement:
    """What one run of a step took.

    Attributes:
        peak_bytes: highest number of bytes that were allocated above what was live when the step began.
        seconds: wall-clock time of the step. On the CPU this includes recording the allocator's events, some ten
            microseconds for each operator call.
        end_bytes: bytes that the step left behind (gradients, usually), counted like `peak_bytes`.
        start_bytes: bytes live on the device when the step began; None on the CPU, whose allocator keeps no count
            (`placemat.graph.static.static_bytes` adds up what is known to be there).
        device: the device that was measured.
    """

    peak_bytes: int
    seconds: float
    end_bytes: int
    start_bytes: int | None
    device: str

    def __str__(self) -> str:
        start = "" if self.start_bytes is None else f" above {format_bytes(self.start_bytes)}"
        return f"peak {format_bytes(self.peak_bytes)}{start}, {self.seconds * 1e3:.1f} ms on {self.device}"


def measure(step: Callable[[], object], *, device: torch.device | str | None = None) -> Measurement:
    """Run `step` once and measure its peak memory and time.

    On the CPU the peak is replayed from the events of PyTorch's allocator: blocks that were live before the step count
    as live throughout, so freeing them (an old `.grad`, say) does not lower the peak; memory inside oneDNN or MKL that
    bypasses the allocator is not seen. On CUDA it is `torch.cuda.max_memory_allocated` less `memory_allocated` at the
    start, where freeing earlier blocks does lower what follows. Clear old gradients before the step and both agree.

    Args:
        step: called once without arguments; what it returns is dropped.
        device: where to measure; by default the current CUDA device if CUDA is in use, otherwise the CPU.

    Raises:
        PlacematError: another profiler is running, or the device is neither CPU nor CUDA.
    """
    target = _device(device)
    gc.collect()  # garbage of earlier steps would be freed at some moment of this one
    if target.type == "cuda":
        return _measure_cuda(step, target)
    if target.type == "cpu":
        return _measure_cpu(step)
    raise PlacematError(f"`measure` knows CPU and CUDA devices; got {target}. Pass `device=` of one of these.")


def suggest_reserved_bytes(step: Callable[[], object], *, device: torch.device | str | None = None) -> int:
    """Bytes to declare as `reserved_bytes=`: what the device's allocator holds at most in a trial step beyond tensors.

    PyTorch's CUDA allocator takes memory in segments of 2 MiB to 20 MiB and more, and cannot hand out what lies between
    live blocks. A budget bounds the tensors; the device must have room for the segments. `step` runs twice, the first
    time to settle what libraries allocate once; then the cache is emptied and the peaks of one step are compared
    (`torch.cuda.max_memory_reserved` less `max_memory_allocated`). Try the step that will be trained: the planned one,
    with the optimizer's part in it. What libraries take from the driver (contexts, NCCL) is in neither figure.

    Raises:
        PlacematError: the device is not a CUDA device; others hold nothing back.
    """
    target = _device(device)
    if target.type != "cuda":
        raise PlacematError(
            "`suggest_reserved_bytes` compares what CUDA's caching allocator reserves with what it hands out; "
            f"{target} has no such allocator. Remedy: none is needed there, only declare what the step does not show "
            "(optimizer state)."
        )
    step()
    torch.cuda.synchronize(target)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(target)
    step()
    torch.cuda.synchronize(target)
    return torch.cuda.max_memory_reserved(target) - torch.cuda.max_memory_allocated(target)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _measure_cuda(step: Callable[[], object], device: torch.device) -> Measurement:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start_bytes = torch.cuda.memory_allocated(device)
    start_s = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start_s
    return Measurement(
        peak_bytes=torch.cuda.max_memory_allocated(device) - start_bytes,
        seconds=seconds,
        end_bytes=torch.cuda.memory_allocated(device) - start_bytes,
        start_bytes=start_bytes,
        device=str(device),
    )


def _measure_cpu(step: Callable[[], object]) -> Measurement:
    if torch_private.is_profiling():
        raise PlacematError("`measure` records with PyTorch's profiler and one is already running: stop it first.")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        start_s = time.perf_counter()
        step()
        seconds = time.perf_counter() - start_s
    peak_bytes, end_bytes = _replay((event.address, event.num_bytes) for event in allocation_events(profiler))
    return Measurement(peak_bytes, seconds, end_bytes, start_bytes=None, device="cpu")


@dataclass(frozen=True)
class AllocationEvent:
    """A block that the CPU allocator gave out, or took back (negative bytes); or a mark, which is text."""

    address: int
    num_bytes: int
    mark: str | None = None


def allocation_events(profiler: profile, mark_prefix: str | None = None) -> list[AllocationEvent]:
    """The CPU allocator's events in time order, and the ranges of `record_function` whose names begin so as marks."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: list[tuple[int, AllocationEvent]] = []
    stack: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            events.append((event.start_time_ns, AllocationEvent(fields.ptr, fields.alloc_size)))
        elif mark_prefix is not None and event.name.startswith(mark_prefix):
            events.append((event.start_time_ns, AllocationEvent(0, 0, event.name.removeprefix(mark_prefix))))
    events.sort(key=lambda timed: timed[0])
    return [event for _, event in events]


def _replay(allocations: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Peak and final bytes of the blocks that these events allocate.

    The allocator remembers the blocks of earlier profiled runs and reports their release with its bytes, while it
    does not report the release of blocks that were never profiled. To treat both alike, releases count only for
    addresses that were allocated here.
    """
    live: dict[int, int] = {}
    current = peak = 0
    for address, num_bytes in allocations:
        if num_bytes > 0:
            live[address] = num_bytes
            current += num_bytes
            peak = max(peak, current)
        else:
            current -= live.pop(address, 0)
    return peak, current
