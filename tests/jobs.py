"""Small jobs of two processes on this machine: gloo over the loopback device, a file as the store."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from placemat.training_state import same_bits

NUM_RANKS = 2


def run_job(job: Callable[..., None], tmp_path: Path, *args: Any) -> None:
    """Run `job(rank, *args)` on every rank; an assertion that fails on one of them fails here."""
    torch.multiprocessing.spawn(_rank, args=(job, str(tmp_path / "store"), args), nprocs=NUM_RANKS)


def _rank(rank: int, job: Callable[..., None], store: str, args: tuple[Any, ...]) -> None:
    use_loopback()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("error", module="placemat")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    job(rank, *args)
    dist.destroy_process_group()


def use_loopback() -> None:
    names = [name for _, name in socket.if_nameindex()]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next((name for name in ("lo", "lo0") if name in names), names[0]))


def train(
    wrapped: Callable[..., Any],
    module: nn.Module,
    batches: list[tuple[Any, ...]],
    loss_of: Callable[[Any], Tensor] = lambda output: output,
) -> list[list[Tensor | None]]:
    """What each of some SGD steps leaves: loss, gradients, parameters, buffers, and the state of the generator."""
    torch.manual_seed(17 + dist.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    steps = []
    for args in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(wrapped(*args))
        loss.backward()
        left: list[Tensor | None] = [loss.detach().clone(), *(whole(p.grad) for p in module.parameters())]
        optimizer.step()
        left += [whole(t) for t in (*module.parameters(), *module.buffers())]
        steps.append([*left, torch.get_rng_state()])
    return steps


def whole(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor's content, or of this rank's shard of it."""
    if tensor is None:
        return None
    local = getattr(tensor, "to_local", lambda: tensor)()
    return local.detach().clone()


def same(steps: list[list[Tensor | None]], others: list[list[Tensor | None]]) -> bool:
    """Whether two trainings left the same bits, and gradients that are None at the same places."""
    pairs = [pair for a, b in zip(steps, others, strict=True) for pair in zip(a, b, strict=True)]
    return all((a is None and b is None) or (a is not None and b is not None and same_bits(a, b)) for a, b in pairs)
