"""Running real torch code while something else is being traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_dispatch_modes() -> Iterator[None]:
    """Suspend fake-tensor, tracing and user dispatch modes, autograd and autocast for the block.

    Planning happens while `torch.compile` captures, under a FakeTensorMode in which no kernel would run.
    `_disable_current_modes` is private, and is what torch itself uses for this (2.9 to 2.14).
    """
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
