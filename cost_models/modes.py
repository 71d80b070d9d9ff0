"""Running real torch code while something else is being traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from placemat.graph import torch_private


@contextmanager
def outside_dispatch_modes() -> Iterator[None]:
    """Suspend fake-tensor, tracing and user dispatch modes, autograd and autocast for the block.

    Planning happens while `torch.compile` captures, under a FakeTensorMode in which no kernel would run.
    """
    with torch_private.disable_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
