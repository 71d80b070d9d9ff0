"""`torch.utils.checkpoint` by hand: around every block, every second, every fourth, and around segments of blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.contender import NotApplicable, Setting, nothing_known
from benchmarks.work import Work
from tests.models import Workload

ContextFn = Callable[[], tuple[Any, Any]]
_STRIDES = {1: "every block", 2: "every second block", 4: "every fourth block"}


def wrap_blocks(model: nn.Module, paths: Sequence[str], context_fn: ContextFn | None = None) -> None:
    """Let these modules' forwards run in `torch.utils.checkpoint(..., use_reentrant=False)`, each in one of its own."""
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    for path in paths:
        block = model.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def wrap_segment(model: nn.Module, paths: Sequence[str]) -> None:
    """Let a run of consecutive blocks be one checkpoint: the first one runs them all, the others pass on what they get.

    Right where each block gets what the one before returned as its first argument, and all get the same others.
    """
    blocks = [model.get_submodule(path) for path in paths]
    forwards = [block.forward for block in blocks]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for path, forward in zip(paths, forwards, strict=True):
            x = forward(x, *args, **kwargs)
            if not isinstance(x, Tensor):
                raise NotApplicable(f"{path} returns {type(x).__name__}, no tensor to hand to the next block")
        return x

    blocks[0].forward = functools.partial(checkpoint, run, use_reentrant=False)
    for block in blocks[1:]:
        block.forward = _first


def _first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


class TorchCheckpoint:
    """What the documentation of PyTorch shows, and segments of about sqrt(n) of n blocks (Chen et al. 2016)."""

    name = "torch.utils.checkpoint"

    def settings(self, work: Work) -> Sequence[Setting]:
        blocks = [Setting(label, "blocks", {"stride": stride}) for stride, label in _STRIDES.items()]
        if not work.is_chain:
            return blocks
        return [*blocks, Setting("segments of sqrt(n) blocks", "segments", {"segments": True})]

    def prepare(self, work: Work, workload: Workload, setting: Setting) -> Callable[[], str]:
        paths = work.block_paths(workload.model)
        if "segments" not in setting.values:
            wrap_blocks(workload.model, paths[:: int(setting.values["stride"])])
            return nothing_known
        size = max(1, round(math.sqrt(len(paths))))
        for start in range(0, len(paths), size):
            wrap_segment(workload.model, paths[start : start + size])
        return nothing_known
