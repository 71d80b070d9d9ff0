"""Generator state of a device: saved before a random op, replayed for its recomputation.

A replay leaves the stream as it found it, so that the random numbers after the step are those of the unoptimized model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def default_generator(device_type: str, index: int | None) -> torch.Generator:
    if device_type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def save_state(device_type: str, index: int | None) -> torch.Tensor:
    """Copy of the device's generator state (uint8: 5056 bytes on CPU, 16 bytes for CUDA)."""
    return default_generator(device_type, index).get_state()


def replay(
    state: torch.Tensor, device_type: str, index: int | None, op: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a random op with a saved state; the generator is put back afterwards."""
    generator = default_generator(device_type, index)
    present = generator.get_state()
    generator.set_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(present)
