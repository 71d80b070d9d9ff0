"""What the allocator of a device type takes for a storage."""

from __future__ import annotations

# CUDACachingAllocator rounds every block to a multiple of 512 bytes: kMinBlockSize in
# https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.h (the ROCm build shares it). The CPU
# allocator reports what was asked for. A model on the meta device stands for one on a GPU.
GRANULARITY_BYTES = {"cpu": 1, "cuda": 512, "meta": 512}


def allocated_bytes(nbytes: int, device: str) -> int:
    """Bytes of the block that holds a storage of `nbytes` on a device type."""
    granularity = GRANULARITY_BYTES.get(device, 1)
    return -(-nbytes // granularity) * granularity
