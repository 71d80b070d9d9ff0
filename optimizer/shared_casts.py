"""Several calls of a module in one autocast region: eager sums their gradients of a weight before the cast back.

Autocast keeps its copy of a weight to the end of the outermost region, so calls in one region share it. Emitted code
casts in every call. Each backward alone has eager's bits; one backward through several such calls does not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from placemat.graph import torch_private
from placemat.graph.autocast import is_inside_region
from placemat.graph.errors import UnsupportedFeature


def present_region(device: str) -> Any:
    """An object that stands for the autocast region that is open and keeps casts, or None: autograd's node of the cast
    of a probe, which is the same for the same region."""
    if not is_inside_region() or not torch.is_autocast_cache_enabled():
        return None
    probe = _probe(device)
    with torch.enable_grad(), torch.autocast(device, dtype=torch.bfloat16):
        product = torch.mm(probe, probe)
    assert product.grad_fn is not None
    return product.grad_fn.next_functions[0][0]


@functools.cache
def _probe(device: str) -> torch.Tensor:
    return torch.zeros(0, 0, device=device, requires_grad=True)  # its cast lives as long as the region: no bytes


class SharedCasts:
    """Refuses one backward through several calls of a module that were made in one autocast region."""

    def __init__(self) -> None:
        self._last: tuple[int, Any] | None = None  # the backward that ran last, and the region of its call

    def check(self, region: Any) -> None:
        """To be called when the backward of a call begins that was made in `region`.

        Raises:
            UnsupportedFeature: another call of that region is part of the same backward.
        """
        backward = torch_private.running_backward()
        if self._last is not None and self._last[0] == backward and self._last[1] is region:
            self._last = None
            raise UnsupportedFeature(
                "one backward() goes through several calls of an optimized module that were made in one torch.autocast "
                "region: eager shares the casts of weights between them and rounds the sum of their gradients once, "
                "which planned code does not. Remedy: a torch.autocast block for each call, or "
                "torch.autocast(..., cache_enabled=False), or one call on the concatenated batch, or a backward() for "
                "each call."
            )
        self._last = backward, region
