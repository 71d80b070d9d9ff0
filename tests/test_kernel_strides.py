"""Law: a trace has the strides that kernels give. Random layouts of arguments, kernels against fake tensors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from placemat.graph.kernel_strides import true_strides

aten = torch.ops.aten
_FEW = torch.zeros(2, dtype=torch.long)

# Operator of tensors of one shape, how many it takes, and whether they may be broadcast.
OPERATORS: dict[str, tuple[Callable[..., Tensor], int, bool]] = {
    "add": (aten.add.Tensor, 2, True),
    "add with alpha": (lambda a, b: aten.add.Tensor(a, b, alpha=2), 2, True),
    "rsub": (aten.rsub.Tensor, 2, True),
    "copysign": (aten.copysign.Tensor, 2, True),
    "ldexp": (aten.ldexp.Tensor, 2, True),
    "xlogy": (aten.xlogy.Tensor, 2, True),
    "clamp": (aten.clamp.Tensor, 3, True),
    "lerp": (aten.lerp.Tensor, 3, True),
    "pow of a number": (lambda a: aten.pow.Scalar(2.0, a), 1, False),
    "reciprocal": (aten.reciprocal.default, 1, False),
    "roll": (lambda a: aten.roll.default(a, [1], [0]), 1, False),
    "index": (lambda a: aten.index.Tensor(a, [None, _FEW]), 1, False),
    "index apart": (lambda a: aten.index.Tensor(a, [_FEW, None, _FEW]), 1, False),
    "gelu_backward": (aten.gelu_backward.default, 2, False),
    "threshold_backward": (lambda a, b: aten.threshold_backward.default(a, b, 0.0), 2, False),
    "leaky_relu_backward": (lambda a, b: aten.leaky_relu_backward.default(a, b, 0.1, False), 2, False),
    "hardswish_backward": (aten.hardswish_backward.default, 2, False),
    "mish_backward": (aten.mish_backward.default, 2, False),
    "mse_loss": (lambda a, b: aten.mse_loss.default(a, b, 0), 2, False),
    "huber_loss": (lambda a, b: aten.huber_loss.default(a, b, 0, 1.0), 2, False),
    "mse_loss_backward": (lambda a, b: aten.mse_loss_backward.default(a, b, b, 0), 2, False),
    "smooth_l1_loss_backward": (lambda a, b: aten.smooth_l1_loss_backward.default(a, b, b, 0, 1.0), 2, False),
    "rrelu_backward": (
        lambda a, b: aten.rrelu_with_noise_backward.default(a, b, torch.zeros(a.shape), 0.1, 0.3, True, False),
        2,
        False,
    ),
    "batch norm in eval": (
        lambda a: aten._native_batch_norm_legit_no_training.default(a, *_statistics(a), 0.1, 1e-5)[0],
        1,
        False,
    ),
    "softmax_backward": (lambda a, b: aten._log_softmax_backward_data.default(a, b, -1, torch.float32), 2, False),
}


def _statistics(x: Tensor) -> list[Tensor]:
    """Weight, bias, running mean and variance."""
    return [torch.ones(x.shape[1]) for _ in range(4)]


def _laid_out(shape: list[int], choose: random.Random) -> Tensor:
    """Zeros of a shape, permuted in memory, some of their dimensions expanded or with gaps."""
    order = choose.sample(range(len(shape)), len(shape))
    kinds = [choose.choice(("plain", "plain", "plain", "expanded", "gaps")) for _ in shape]
    stored = [
        {"plain": n, "expanded": 1, "gaps": 2 * n}[k] for n, k in zip((shape[d] for d in order), kinds, strict=True)
    ]
    cut = tuple(slice(None, None, 2 if k == "gaps" else 1) for k in kinds)
    return (
        torch.zeros(stored)[cut].expand([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    )


def _arguments(count: int, may_broadcast: bool, choose: random.Random) -> list[Tensor]:
    shape = [choose.choice((1, 2, 3, 4)) for _ in range(choose.choice((3, 4, 4, 5)))]
    shapes = [[1 if may_broadcast and choose.random() < 0.15 else n for n in shape] for _ in range(count)]
    made = [_laid_out(s, choose) for s in shapes]
    if may_broadcast and choose.random() < 0.2:
        made[-1] = made[-1][0]
    return made


def _that_count(tensor: Tensor) -> list[int]:
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results_have_the_strides_of_kernels(name):
    operator, count, may_broadcast = OPERATORS[name]
    choose = random.Random(0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for _ in range(60):
        arguments = _arguments(count, may_broadcast, choose)
        expected = operator(*arguments)
        with true_strides(), fake:
            found = operator(*(torch.empty_strided(a.shape, a.stride()) for a in arguments))
        assert _that_count(found) == _that_count(expected), [(a.shape, a.stride()) for a in arguments]
