"""A step's memory between marks: the allocator's level at each mark and its peak up to the next one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from placemat.graph import torch_private
from placemat.graph.errors import PlacematError
from placemat.measure import allocation_events

_PREFIX = "placemat.mark."


@dataclass(frozen=True)
class Interval:
    """From one mark to the next; bytes above what was live when the step began.

    Attributes:
        mark: what was said at its beginning; "" for the beginning of the step.
        start_bytes, peak_bytes: live at its beginning, and at most up to the next mark.
    """

    mark: str
    start_bytes: int
    peak_bytes: int


@dataclass
class StepTrace:
    """Runs a step once, in which `mark` is called; `intervals` has the result, in order.

    On the CPU levels come from the events of PyTorch's allocator, as in `measure`: blocks that were live before count
    as live throughout. On CUDA they are the caching allocator's statistics, of which the peak is reset at every mark.

    Attributes:
        device: where memory is looked at.
        start_bytes: live on the device when the step began; None on the CPU, whose allocator keeps no count.
    """

    device: torch.device
    intervals: list[Interval] = field(default_factory=list)
    start_bytes: int | None = None
    _marks: list[str] = field(default_factory=list)
    _is_running: bool = False
    _name: str = ""
    _level_bytes: int = 0

    def run(self, step: Callable[[], object]) -> None:
        """Run `step` and fill `intervals`.

        Raises:
            PlacematError: a profiler is running, or the device is neither CPU nor CUDA.
        """
        if self.device.type not in ("cpu", "cuda"):
            raise PlacematError(f"a step's memory is traced on CPU and CUDA devices; got {self.device}.")
        gc.collect()
        self._is_running = True
        try:
            if self.device.type == "cuda":
                self._run_cuda(step)
            else:
                self._run_cpu(step)
        finally:
            self._is_running = False

    def mark(self, name: str) -> None:
        """Begin a new interval; does nothing while no step is traced."""
        if not self._is_running:
            return
        if self.device.type == "cuda":
            self._end_interval(name)
            return
        with record_function(f"{_PREFIX}{len(self._marks)}"):
            self._marks.append(name)

    def _run_cpu(self, step: Callable[[], object]) -> None:
        if torch_private.is_profiling():
            raise PlacematError("memory is traced with PyTorch's profiler and one is already running: stop it first.")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        name, start, peak, level = "", 0, 0, 0
        live: dict[int, int] = {}
        for event in allocation_events(profiler, _PREFIX):
            if event.mark is not None:
                self.intervals.append(Interval(name, start, peak))
                name, start, peak = self._marks[int(event.mark)], level, level
            elif event.num_bytes > 0:
                live[event.address] = event.num_bytes
                level += event.num_bytes
                peak = max(peak, level)
            else:
                level -= live.pop(event.address, 0)
        self.intervals.append(Interval(name, start, peak))

    def _run_cuda(self, step: Callable[[], object]) -> None:
        torch.cuda.synchronize(self.device)
        self.start_bytes = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._name, self._level_bytes = "", 0
        step()
        self._end_interval("")

    def _end_interval(self, following: str) -> None:
        assert self.start_bytes is not None
        peak = torch.cuda.max_memory_allocated(self.device) - self.start_bytes
        self.intervals.append(Interval(self._name, self._level_bytes, peak))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._name = following
        self._level_bytes = torch.cuda.memory_allocated(self.device) - self.start_bytes
