"""Measured: every distinct op of a step is run on this machine, one at a time, on synthetic inputs.

The model itself never runs: an op's inputs, results and workspace are real memory for the moment of its trial, nothing
else is, so a step that does not fit can be costed as well. Ops are sampled in rounds, all of them once in each: where
the machine is slower for a while, it is so for all ops of that round alike, and the ratios that a plan depends on stay.
An op's seconds are the median over rounds, without the samples that took more than twice as long as the fastest.

What was measured is kept in the user's cache directory under the op's signature, the machine and PyTorch's settings,
and the first measurement stands: the same call gets the same costs, hence the same plan, in every process.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from placemat.cost_models.base import CostModel, OpCost, Progress, prepare
from placemat.cost_models.cache import JsonCache
from placemat.cost_models.distance import cpu_far_s_per_byte
from placemat.cost_models.flops import bytes_moved, flops
from placemat.cost_models.machine import machine_key, settings_key
from placemat.cost_models.modes import outside_dispatch_modes
from placemat.cost_models.present import present_roofline
from placemat.cost_models.recorded import Recorded
from placemat.cost_models.signature_text import signature_text
from placemat.cost_models.trial import Trial
from placemat.cost_models.workspaces import is_bound, is_free, is_known, workspace_bytes
from placemat.graph import torch_private
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.ir import Op, OpSignature

METHOD = 2  # of measuring: counted up when its figures change
ROUNDS = 7
_OUTLIER = 2.0  # times the fastest sample
_PROGRESS_S = 1.0  # between two lines

_LATE = "they were not measured within the time limit"
_PROFILED = "nothing can be measured while a torch.profiler is running"
_FOREIGN = "only PyTorch's own operators are run to be measured"


@dataclass
class Samples:
    """What the rounds found of one op so far; `failed` says why there will be no more."""

    seconds: list[float] = field(default_factory=list)
    workspace_bytes: int = 0
    failed: str | None = None

    def entry(self) -> dict[str, Any]:
        """For the cache."""
        if self.failed is not None:
            return {"failed": self.failed}
        usual = [s for s in self.seconds if s <= _OUTLIER * min(self.seconds)]
        return {"runtime_s": float(f"{statistics.median(usual):.3e}"), "workspace_bytes": self.workspace_bytes}


class Measured:
    """Cost model of the present machine, by measurement.

    Views and pseudo-ops take no time, recurrent layers what they took on the CPU when the graph was made. Ops that are
    not PyTorch's (custom operators, other modules that are kept eager), that do not run on synthetic inputs, or that
    the time limit cuts off, get `otherwise`'s figures, and `plan.notes` names them.
    Workspaces on the CPU come from formulas where these are exact (`cost_models.workspaces`), and from the same run
    where they are bounds or there is none; on CUDA always from the run.

    Args:
        device: "cpu" or "cuda" (the current device); by default CUDA where there is a device, otherwise the CPU.
        otherwise: cost model for what cannot be measured; by default the roofline of the device.
        cache_dir: for `measured.json`; `$PLACEMAT_CACHE_DIR` or the user's cache directory if None.
        time_limit_s: for the measurements of one step; ops that are in the cache take none of it.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        otherwise: CostModel | None = None,
        cache_dir: Path | str | None = None,
        time_limit_s: float = 60.0,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise UnsupportedFeature(
                f"there is no device of type {device!r} here on which ops could be measured. Remedy: pass "
                "`cost_model=Roofline(device_spec('H100 SXM'))`, another one of `placemat.cost_models.devices`, rates "
                "of your own, `Roofline(DeviceSpec(...))`, or a recording that was made where the device is, "
                "`Recorded.load(path)`."
            )
        self._otherwise = otherwise
        self.device = device
        self.time_limit_s = time_limit_s
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._cache = JsonCache("measured", self._cache_dir, _is_entry)
        self._entries: dict[str, Any] = {}  # what the cache said, or would have if it could be written; by key
        self._late: set[str] = set()  # keys of ops that the time limit cut off
        self._costed: dict[str, OpCost] = {}  # by signature text, for `recorded`

    @property
    def otherwise(self) -> CostModel:
        """Cost model for what cannot be measured.

        Raises:
            UnsupportedFeature: none was given, and the CUDA device is not in the table of devices.
        """
        if self._otherwise is None:
            self._otherwise = present_roofline(self.device)
        return self._otherwise

    @property
    def source(self) -> str:
        return f"measured: {machine_key(self.device)}"

    @property
    def far_s_per_byte(self) -> float:
        """See `cost_models.distance`; 0 on CUDA, where it was not measured."""
        return cpu_far_s_per_byte(self._cache_dir) if self.device == "cpu" else 0.0

    def prepare(self, ops: Sequence[Op], progress: Progress | None) -> None:
        """Measure what is not in the cache, all ops together, within the time limit."""
        ops = [op for op in ops if not is_free(op.signature) and self._known(op) is None]
        if never := [op for op in ops if _why_never(op.signature)]:
            prepare(self.otherwise, never, progress)
        wanted = [op.signature for op in ops if _why_never(op.signature) is None]
        missing = {key: s for s in wanted if self._entry(key := self._key(s)) is None}
        if not missing or torch_private.is_profiling():
            return
        # What takes longest first: should the time not suffice, the figures that matter are there.
        order = sorted(missing, key=lambda key: -flops(missing[key]) - bytes_moved(missing[key]))
        with outside_dispatch_modes(), torch.random.fork_rng(devices=self._cuda_devices()):
            samples = measure([missing[key] for key in order], self._torch_device(), self.time_limit_s, progress)
        found = {key: s.entry() for key, s in zip(order, samples, strict=True) if s.failed or s.seconds}
        kept = {key: entry for key, entry in found.items() if "failed" not in entry}  # memory may suffice next time
        self._entries.update(found)
        self._entries.update(self._cache.put_all(kept))
        self._late = set(missing) - set(found)

    def op_cost(self, op: Op) -> OpCost:
        if is_free(op.signature):
            return OpCost(0.0, 0)
        if (known := self._known(op)) is not None:
            self._costed[signature_text(op.signature)] = known
            return known
        estimated = _why_never(op.signature) or self._why_not(op)
        entry = self._entry(self._key(op.signature))
        if entry is not None and "failed" in entry:
            estimated = f"they do not run on synthetic inputs ({entry['failed']})"
        if estimated is not None or entry is None:
            return replace(self.otherwise.op_cost(op), estimated=estimated)
        cost = OpCost(float(entry["runtime_s"]), self._workspace_bytes(op.signature, int(entry["workspace_bytes"])))
        self._costed[signature_text(op.signature)] = cost
        return cost

    def recorded(self) -> Recorded:
        """Everything that this object has costed by measurement so far, to save and to plan with elsewhere."""
        return Recorded(dict(self._costed), source=self.source, far_s_per_byte=self.far_s_per_byte)

    def _known(self, op: Op) -> OpCost | None:
        """Cost of what was timed on this CPU while the graph was made; as elsewhere the first measurement stands."""
        if op.known_runtime_s is None or self.device != "cpu":
            return None
        key = self._key(op.signature)
        if self._entry(key) is None:
            entry = {"runtime_s": float(f"{op.known_runtime_s:.3e}"), "workspace_bytes": 0}  # those are known, too
            self._entries.update(self._cache.put_all({key: entry}))
        return OpCost(float(self._entry(key)["runtime_s"]), 0)

    def _why_not(self, op: Op) -> str | None:
        """Why there is no measurement of an op that could be measured; makes it if nothing is in the way."""
        key = self._key(op.signature)
        if self._entry(key) is not None:
            return None
        if torch_private.is_profiling():
            return _PROFILED
        if key not in self._late:
            self.prepare([op], None)
        return None if self._entry(key) is not None else _LATE

    def _workspace_bytes(self, signature: OpSignature, measured_bytes: int) -> int:
        if self.device == "cpu" and is_known(signature.target) and not is_bound(signature):
            return workspace_bytes(signature, torch.get_num_threads())
        return measured_bytes

    def _entry(self, key: str) -> Any:
        if key not in self._entries:
            entry = self._cache.get(key)
            if entry is None:
                return None
            self._entries[key] = entry
        return self._entries[key]

    def _key(self, signature: OpSignature) -> str:
        where = f"{machine_key(self.device)}; {settings_key(self.device)}; method {METHOD}"
        return hashlib.sha256(f"{where}; {signature_text(signature)}".encode()).hexdigest()

    def _torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def _cuda_devices(self) -> list[int]:
        return [torch.cuda.current_device()] if self.device == "cuda" else []


def _why_never(signature: OpSignature) -> str | None:
    """Custom operators may do anything: print, count, communicate. Kept modules need their inner graph."""
    own = signature.target.startswith(("aten.", "prims.", "placemat_ops."))
    return None if own and not signature.target.startswith("placemat_ops.eager_") else _FOREIGN


def measure(
    signatures: Sequence[OpSignature], device: torch.device, time_limit_s: float, progress: Progress | None
) -> list[Samples]:
    """Sample all ops in rounds, the last of which the time limit may cut short; one `Samples` for each signature."""
    samples = [Samples() for _ in signatures]
    started = told = time.monotonic()
    for round_index in range(ROUNDS):
        for i, signature in enumerate(signatures):
            now = time.monotonic()
            if now - started > time_limit_s:
                return samples
            if progress is not None and now - told > _PROGRESS_S:
                told = now
                progress(f"measuring ops: round {round_index + 1} of {ROUNDS}, {i} of {len(signatures)}")
            if samples[i].failed is None:
                _sample(samples[i], signature, device)
    return samples


def _sample(samples: Samples, signature: OpSignature, device: torch.device) -> None:
    try:
        trial = Trial.of(signature, device)
        if not samples.seconds:
            samples.workspace_bytes = trial.workspace_bytes()
        samples.seconds.append(trial.sample_s())
    except Exception as error:  # an operator may refuse inputs in any way it likes
        samples.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else repr(error)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, Mapping):
        return False
    seconds, workspace_bytes = entry.get("runtime_s"), entry.get("workspace_bytes")
    is_time = isinstance(seconds, (int, float)) and 0 <= seconds < math.inf
    return is_time and isinstance(workspace_bytes, int) and workspace_bytes >= 0
