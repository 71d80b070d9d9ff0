"""Small training steps, and ways to run one and to look at what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placemat.cost_models.base import OpCost
from placemat.graph.ir import Op

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


class FreeOfWorkspace:
    """A cost model for tests about graphs: every op takes a second and needs no workspace."""

    source = "one second per op"

    def op_cost(self, op: Op) -> OpCost:
        return OpCost(1.0 if op.recomputable else 0.0, 0)


class Applied(nn.Module):
    """A layer, and a function of it and the inputs."""

    def __init__(self, layer: nn.Module, forward: Callable[..., object]) -> None:
        super().__init__()
        self.layer = layer
        self.function = forward

    def forward(self, *args: Tensor) -> object:
        return self.function(self.layer, *args)


class Branches(nn.Module):
    """Two branches with dropout and BatchNorm, a skip, views, and a list-valued view."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(width)
        self.left = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3))
        self.right = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.stem(x).split(x.shape[1], dim=1)
        a = self.left(self.norm(a))
        b = self.right(b) * a
        return self.head(torch.relu(a + b + x)).pow(2).sum()


class Attention(nn.Module):
    """A causal attention block with a mask that is expanded, softmax dropout and a tied projection."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        for _ in range(2):
            q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask[:length, :length], float("-inf"))
            weights = nn.functional.dropout(scores.softmax(-1), 0.2, self.training)
            x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x.mean()


class Convolutions(nn.Module):
    """A small U: convolutions, BatchNorm, pooling with indices, upsampling, concatenation, in-place ReLU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.mid = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.up = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        y = self.mid(nn.functional.max_pool2d(skip, 2))
        y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.up(torch.cat([y, skip], 1)).abs().mean()


STEPS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "branches": lambda: (Branches(), (torch.randn(48, 64),)),
    "attention": lambda: (Attention(), (torch.randn(2, 24, 32),)),
    "convolutions": lambda: (Convolutions(), (torch.randn(2, 3, 16, 16),)),
}


def make_step(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return STEPS[name]()


@dataclass
class Outcome:
    """What a training step leaves behind."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    rng_state: torch.Tensor

    def same_as(self, other: Outcome) -> bool:
        def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
            return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))

        return (
            same(self.loss, other.loss)
            and all(same(a, b) for a, b in zip(self.gradients, other.gradients, strict=True))
            and all(same(a, b) for a, b in zip(self.buffers, other.buffers, strict=True))
            and same(self.rng_state, other.rng_state)
        )


def run_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 3,
) -> Outcome:
    """One forward and backward from fixed random numbers; buffers are put back afterwards."""
    before = [b.clone() for b in model.buffers()]
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(seed)
    output = model(*args, **(kwargs or {}))
    loss = output if loss_fn is None else loss_fn(output)
    loss.backward()
    outcome = Outcome(
        loss.detach().clone(),
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        torch.get_rng_state(),
    )
    with torch.no_grad():
        for b, old in zip(model.buffers(), before, strict=True):
            b.copy_(old)
    for p in model.parameters():
        p.grad = None
    return outcome
