"""Operators of a user's own that random modules call: an `autograd.Function`, custom operators, an output class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class Squash(torch.autograd.Function):
    """x / (1 + |x|), whose backward reads a result of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        denominator = 1 + x.abs()
        ctx.save_for_backward(denominator)
        ctx.scale = scale
        return scale * x / denominator

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (denominator,) = ctx.saved_tensors
        return ctx.scale * grad / denominator.square(), None


class StraightThrough(torch.autograd.Function):
    """Rounds in forward and does nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@torch.library.custom_op("placemat_tests::wave", mutates_args=())
def wave(x: torch.Tensor) -> torch.Tensor:
    """An operator that placemat knows nothing of, so that its result has to be kept."""
    return torch.sin(x) * 2


@wave.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _wave_setup(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _wave_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return torch.cos(ctx.saved_tensors[0]) * 2 * grad


wave.register_autograd(_wave_backward, setup_context=_wave_setup)


@torch.library.custom_op("placemat_tests::halve_", mutates_args={"x"})
def halve_(x: torch.Tensor) -> None:
    """An operator that writes to its argument."""
    x.mul_(0.5)


@dataclass
class Scores:
    """An output class."""

    scores: torch.Tensor
    extra: Any = None
