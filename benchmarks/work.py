"""Training steps that run here, on one thread, in about a second: what `side_by_side` runs every peer on.

Every entry of `WORKS` builds one workload, the same bits in every process, and says which of its modules are the blocks
that one would wrap by hand in `torch.utils.checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import zoo
from tests import library_models, models
from tests.models import CrossEntropy, Workload, seeded


@dataclass(frozen=True)
class Work:
    """A training step to be run by every contender.

    Attributes:
        title: what it is, with its sizes.
        build: the workload, in training mode; depends on nothing but the code.
        blocks: regular expression of the paths of the modules to wrap, one by one.
        is_chain: the blocks run in their order, each on what the one before returned, with the same other arguments.
        is_random: a step draws random numbers.
    """

    title: str
    build: Callable[[], Workload]
    blocks: str
    is_chain: bool
    is_random: bool = True

    def block_paths(self, model: nn.Module) -> list[str]:
        """Paths of the blocks, in the order of `named_modules`."""
        return [path for path, _ in model.named_modules() if re.fullmatch(self.blocks, path)]


def chain(layers: int = 256, width: int = 128, batch: int = 256) -> Workload:
    """`layers` times linear and tanh; (batch, width) to logits, loss outside the module."""
    with seeded(0):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
        model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(width, 10))
        inputs, labels = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    return Workload(model.train(), (inputs,), {}, CrossEntropy(labels))


class Recurrent(nn.Module):
    """Layers of one LSTM each between an embedding and a head; (batch, sequence) int64 to (batch, 256, sequence)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return self.head(x).transpose(1, 2)


def lstm(layers: int = 4, width: int = 256, sequence: int = 64, batch: int = 32) -> Workload:
    """Stacked LSTM layers over bytes with residual connections, loss outside the module."""
    with seeded(0):
        model = Recurrent(layers, width)
        text = torch.randint(0, 256, (batch, sequence + 1))
    return Workload(model.train(), (text[:, :-1].contiguous(),), {}, CrossEntropy(text[:, 1:].contiguous()))


def densenet121() -> Workload:
    with seeded(0):
        return zoo.densenet121(batch=8, size=64)


_DENSE = r"stages\.([2-9]|[1-5]\d|6[0-2])"  # dense layers and transitions, without the stem and the last norm

WORKS: Mapping[str, Work] = {
    "gpt2": Work("GPT-2, 12 layers, width 256, 8 x 128 tokens, dropout 0.1", models.gpt2, r"transformer\.h\.\d+", True),
    "gpt2_wide": Work(
        "GPT-2, 12 layers, width 512, 8 x 128 tokens, dropout 0.1",
        partial(models.gpt2, width=512, heads=8),
        r"transformer\.h\.\d+",
        True,
    ),
    "gpt2_deep": Work(
        "GPT-2, 48 layers, width 128, 4 x 128 tokens, dropout 0.1",
        partial(models.gpt2, layers=48, width=128, batch=4),
        r"transformer\.h\.\d+",
        True,
    ),
    "bert": Work(
        "BERT, 8 layers, width 256, 8 x 128 tokens, dropout 0.1",
        partial(library_models.bert, layers=8, width=256, sequence=128, batch=8),
        r"bert\.encoder\.layer\.\d+",
        True,
    ),
    "t5": Work(
        "T5, 4 + 4 layers, width 256, 8 x 128 tokens, dropout 0.1",
        partial(library_models.t5, layers=4, width=256, sequence=128, batch=8),
        r"(encoder|decoder)\.block\.\d+",
        False,
    ),
    "vit": Work(
        "ViT, 8 layers, width 192, 16 images of 64 patches, dropout 0.1",
        partial(library_models.vit, layers=8, width=192, batch=16),
        r"vit\.encoder\.layer\.\d+|vit\.layers\.\d+",
        True,
    ),
    "resnet50": Work(
        "ResNet-50, 8 images of 96 x 96",
        partial(models.resnet50, batch=8, size=96),
        r"stages\.\d+",
        True,
        is_random=False,
    ),
    "densenet121": Work("DenseNet-121, 8 images of 64 x 64", densenet121, _DENSE, True, is_random=False),
    "unet": Work(
        "U-Net, 4 levels, width 16, 4 images of 128 x 128",
        models.unet,
        r"(encoders|decoders)\.\d+",
        False,
        is_random=False,
    ),
    "inception": Work(
        "9 Inception blocks, width 32, 8 images of 64 x 64, dropout 0.2",
        partial(models.inception, blocks=9, width=32, batch=8, size=64),
        r"blocks\.\d+",
        True,
    ),
    "moe": Work(
        "Mixtral, 8 layers, width 256, 4 experts, 8 x 64 tokens",
        partial(library_models.mixtral, "grouped_mm", layers=8, width=256, sequence=64, batch=8),
        r"model\.layers\.\d+",
        True,
        is_random=False,
    ),
    "chain": Work("256 layers of linear and tanh, width 128, batch 256", chain, r"0\.\d+", True, is_random=False),
    "lstm": Work("4 LSTM layers, width 256, 32 x 64 bytes", lstm, r"layers\.\d+", False, is_random=False),
    "tiny_dropout": Work(
        "3 transformer blocks with dropout, for tests",
        partial(models.transformer, layers=3, width=64, sequence=32, batch=8),
        r"blocks\.\d+",
        True,
    ),
    "tiny": Work(
        "4 layers of linear and tanh, for tests",
        partial(chain, layers=4, width=32, batch=1024),
        r"0\.\d+",
        True,
        is_random=False,
    ),
}
