"""The CPU that runs this process, measured once per machine, torch version and thread count.

Four figures, together well under two seconds: sustained FLOP/s of a square matrix product in float32 and bfloat16,
bytes per second of a copy that does not fit the caches, random numbers per second (a generator of one thread, by far
the slowest part of a dropout on CPU), and seconds to dispatch a tiny op. They are rounded to two significant digits
and kept on disk, because plans must come out the same in every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import floor, log10
from pathlib import Path
from typing import Any

import torch

from placemat.cost_models.cache import JsonCache
from placemat.cost_models.devices import DeviceSpec
from placemat.cost_models.machine import machine_key
from placemat.cost_models.modes import outside_dispatch_modes

_REPEATS = 5
# Smaller in bfloat16: without hardware support it is a hundred times slower.
_MATRIX = {"float32": 768, "bfloat16": 384}
_COPY_BYTES = 2**26
_RANDOM_NUMBERS = 2**18
_DISPATCHES = 500


def _round_two_digits(value: float) -> float:
    return round(value, 1 - floor(log10(value)))


def _best_seconds(run: Callable[[], object]) -> float:
    """The fastest of several runs after one that warms up: other load only ever adds time."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _matmul_flops_per_s(dtype_name: str) -> float:
    size = _MATRIX[dtype_name]
    a = torch.ones(size, size, dtype=getattr(torch, dtype_name), device="cpu")
    out = torch.empty_like(a)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(a, a, out=out))


def _copy_bytes_per_s() -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: target.copy_(source))


def _random_numbers_per_s() -> float:
    """Bernoulli draws, from a generator of our own: the user's random state stays as it is."""
    generator = torch.Generator(device="cpu")
    mask = torch.empty(_RANDOM_NUMBERS, dtype=torch.bool, device="cpu")
    return _RANDOM_NUMBERS / _best_seconds(lambda: mask.bernoulli_(0.5, generator=generator))


def _dispatch_s() -> float:
    x = torch.ones(1, dtype=torch.float32, device="cpu")

    def run() -> None:
        for _ in range(_DISPATCHES):
            torch.add(x, x)

    return _best_seconds(run) / _DISPATCHES


def _measure() -> dict[str, Any]:
    with outside_dispatch_modes():
        return {
            "flops_per_s": {dtype: _round_two_digits(_matmul_flops_per_s(dtype)) for dtype in _MATRIX},
            "bytes_per_s": _round_two_digits(_copy_bytes_per_s()),
            "random_numbers_per_s": _round_two_digits(_random_numbers_per_s()),
            "dispatch_s": _round_two_digits(_dispatch_s()),
        }


def _is_measurement(entry: object) -> bool:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("flops_per_s"), Mapping):
        return False
    rates = [entry["flops_per_s"].get(dtype) for dtype in _MATRIX]
    values = [*rates, *(entry.get(name) for name in ("bytes_per_s", "random_numbers_per_s", "dispatch_s"))]
    return all(isinstance(v, (int, float)) and v > 0 for v in values)


def host_spec(cache_dir: Path | None = None) -> DeviceSpec:
    """The host as a DeviceSpec for the present intra-op thread count.

    Measures on the first call per machine, torch version and thread count, afterwards reads
    `<cache_dir>/host.json` (`$PLACEMAT_CACHE_DIR`, otherwise the user's cache directory). Draws no random numbers and
    works while a graph is being captured.
    """
    num_threads = torch.get_num_threads()
    cache, key = JsonCache("host", cache_dir, _is_measurement), machine_key()
    entry = cache.get(key) or cache.put(key, _measure())
    rates = {dtype: float(entry["flops_per_s"][dtype]) for dtype in _MATRIX}
    return DeviceSpec(
        name=f"host CPU, {num_threads} threads",
        # float64 lanes are twice as wide as float32 ones; float16 is converted, at the rate of float32 at best.
        peak_flops_per_s={**rates, "float64": rates["float32"] / 2, "float16": rates["float32"]},
        bandwidth_bytes_per_s=float(entry["bytes_per_s"]),
        launch_s=float(entry["dispatch_s"]),
        memory_bytes=0,
        source=f"measured: {key}",
        random_numbers_per_s=float(entry["random_numbers_per_s"]),
    )
