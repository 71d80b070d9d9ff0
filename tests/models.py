"""The models that tests and benchmarks train: written here, but for GPT-2, which is the `transformers` library's.

Every builder returns a `Workload` and leaves the global random state as it was. Weights and inputs depend on the
builder's arguments and `seed` alone, so two calls give two bitwise equal workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LossFn = Callable[[Any], Tensor]


class Workload(NamedTuple):
    """A model, one call of it, and the loss to apply to what the call returns (None: the call returns the loss)."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFn | None

    def loss(self, output: Any) -> Tensor:
        """Scalar loss of one call's output; `.loss` of a `transformers` output."""
        if self.loss_fn is not None:
            return self.loss_fn(output)
        return output if isinstance(output, Tensor) else output.loss

    def step(self) -> Tensor:
        """One forward and backward pass without an optimizer; returns the detached loss."""
        loss = self.loss(self.model(*self.args, **self.kwargs))
        loss.backward()
        return loss.detach()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws inside depend on `seed` alone; the global CPU generator is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class CrossEntropy:
    """Mean cross entropy against fixed integer targets; logits (batch, classes, ...), targets (batch, ...)."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets

    def __call__(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, self.targets)


# ---------------------------------------------------------------------------------------------------- language models


def gpt2(
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    sequence: int = 128,
    batch: int = 8,
    dropout: float = 0.1,
    seed: int = 0,
) -> Workload:
    """Byte-level GPT-2 of the `transformers` library with random weights; the loss is inside the model.

    Inputs are (batch, sequence) int64 bytes, passed by keyword as the library's users do.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=sequence,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        # Keys and values would become outputs of the graph, two more per layer that no plan may drop.
        use_cache=False,
    )
    with seeded(seed):
        model = GPT2LMHeadModel(config)
        ids = torch.randint(0, 256, (batch, sequence))
    # The library finds the loss by the model's class name and warns once about it, which a capture cannot trace.
    model.loss_type = "ForCausalLM"
    return Workload(model.train(), (), {"input_ids": ids, "labels": ids}, None)


class TransformerBlock(nn.Module):
    """Pre-norm block: causal attention and a GELU MLP, dropout after each; (batch, sequence, width) to the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, sequence, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Byte-level decoder; (batch, sequence) int64 to next-byte logits (batch, 256, sequence)."""

    def __init__(self, layers: int, width: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(sequence, width) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def transformer(
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    sequence: int = 16,
    batch: int = 2,
    dropout: float = 0.1,
    seed: int = 0,
) -> Workload:
    """Decoder in plain PyTorch, loss outside the module."""
    with seeded(seed):
        model = Transformer(layers, width, heads, sequence, dropout)
        text = torch.randint(0, 256, (batch, sequence + 1))
    return Workload(model.train(), (text[:, :-1].contiguous(),), {}, CrossEntropy(text[:, 1:].contiguous()))


# ------------------------------------------------------------------------------------------------------ vision models


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, relu: bool = True) -> nn.Sequential:
    """Convolution without bias (padding keeps the size at stride 1), BatchNorm, and in-place ReLU if asked."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if relu else nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """Residual block of He et al. 2015 (arXiv:1512.03385, fig. 5 right); the 3x3 convolution carries the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            conv_norm(inputs, width, 1), conv_norm(width, width, 3, stride), conv_norm(width, outputs, 1, relu=False)
        )
        changes_shape = stride != 1 or inputs != outputs
        self.skip = conv_norm(inputs, outputs, 1, stride, relu=False) if changes_shape else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    """Bottleneck ResNet; (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
        stages: list[nn.Module] = []
        channels = width
        for level, count in enumerate(blocks):
            planes = width * 2**level
            for k in range(count):
                stages.append(Bottleneck(channels, planes, stride=2 if level > 0 and k == 0 else 1))
                channels = 4 * planes
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))


def resnet50(batch: int = 8, size: int = 128, classes: int = 1000, seed: int = 0) -> Workload:
    """ResNet-50 (arXiv:1512.03385, table 1): 3, 4, 6 and 3 bottleneck blocks, 25.6 million parameters."""
    return resnet((3, 4, 6, 3), width=64, batch=batch, size=size, classes=classes, seed=seed)


def resnet(
    blocks: tuple[int, ...] = (1, 1),
    width: int = 8,
    batch: int = 2,
    size: int = 32,
    classes: int = 10,
    seed: int = 0,
) -> Workload:
    """Bottleneck ResNet with any number of blocks per stage, loss outside the module."""
    with seeded(seed):
        model = ResNet(blocks, width, classes)
        images = torch.randn(batch, 3, size, size)
        labels = torch.randint(0, classes, (batch,))
    return Workload(model.train(), (images,), {}, CrossEntropy(labels))


class UNet(nn.Module):
    """U-Net (arXiv:1505.04597) with BatchNorm and size-keeping convolutions; `levels` resolutions, skips between.

    (batch, 3, height, width) to per-pixel logits (batch, classes, height, width); sides divide by 2**(levels - 1).
    """

    def __init__(self, levels: int, width: int, classes: int, transposed: bool) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(levels)]
        self.encoders = nn.ModuleList(
            nn.Sequential(conv_norm(a, b, 3), conv_norm(b, b, 3))
            for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, stride=2)
            if transposed
            else nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(a, b, 1))
            for a, b in pairs
        )
        self.decoders = nn.ModuleList(nn.Sequential(conv_norm(2 * b, b, 3), conv_norm(b, b, 3)) for _, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for k, encoder in enumerate(self.encoders):
            x = encoder(x if k == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def unet(
    levels: int = 4,
    width: int = 16,
    size: int = 128,
    batch: int = 4,
    classes: int = 2,
    transposed: bool = True,
    seed: int = 0,
) -> Workload:
    """U-Net for segmentation; `transposed` convolutions, or nearest-neighbour upsampling, on the way up."""
    with seeded(seed):
        model = UNet(levels, width, classes, transposed)
        images = torch.randn(batch, 3, size, size)
        masks = torch.randint(0, classes, (batch, size, size))
    return Workload(model.train(), (images,), {}, CrossEntropy(masks))


class InceptionBlock(nn.Module):
    """Four parallel branches of unequal cost and width, concatenated; (batch, c, h, w) to (batch, 4 * width, h, w)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.point = conv_norm(inputs, width, 1)
        self.mid = nn.Sequential(conv_norm(inputs, width // 2, 1), conv_norm(width // 2, width, 3))
        self.deep = nn.Sequential(
            conv_norm(inputs, width // 2, 1), conv_norm(width // 2, width, 3), conv_norm(width, width, 3)
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv_norm(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.mid(x), self.deep(x), self.pooled(x)], dim=1)


class Inception(nn.Module):
    """Blocks of parallel branches with pooling and dropout; (batch, 3, h, w) to logits (batch, classes)."""

    def __init__(self, blocks: int, width: int, classes: int) -> None:
        super().__init__()
        channels = [4 * width] * blocks
        self.stem = conv_norm(3, channels[0], 3, stride=2)
        self.blocks = nn.Sequential(*(InceptionBlock(c, width) for c in channels))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(self.stem(x)).mean(dim=(2, 3))))


def inception(
    blocks: int = 2, width: int = 8, batch: int = 2, size: int = 32, classes: int = 10, seed: int = 0
) -> Workload:
    """Branched network in the manner of Szegedy et al. 2014 (arXiv:1409.4842, fig. 2b), loss outside the module."""
    with seeded(seed):
        model = Inception(blocks, width, classes)
        images = torch.randn(batch, 3, size, size)
        labels = torch.randint(0, classes, (batch,))
    return Workload(model.train(), (images,), {}, CrossEntropy(labels))


# ----------------------------------------------------------------------------------------------------------- the rest


def mlp(
    layers: int = 4, width: int = 32, batch: int = 16, classes: int = 10, dropout: float = 0.0, seed: int = 0
) -> Workload:
    """A chain: `layers` times linear, tanh and dropout, then a linear classifier; loss outside the module."""
    with seeded(seed):
        hidden = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))]
        model = nn.Sequential(*hidden, nn.Linear(width, classes))
        inputs = torch.randn(batch, width)
        labels = torch.randint(0, classes, (batch,))
    return Workload(model.train(), (inputs,), {}, CrossEntropy(labels))
