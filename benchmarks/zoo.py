"""Training steps of the sizes that people train, to be planned and not to be run.

Every entry of `ZOO` builds a `tests.models.Workload`: the model, one training call and its loss. Sizes are those of the
papers, in float32 unless the builder says otherwise, with batches that an accelerator holds. `build` makes them on the
meta device, so that no parameter is allocated; the one small model of `ON_CPU` is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from tests import models
from tests.models import CrossEntropy, Workload, conv_norm

# ---------------------------------------------------------------------------------------------------- language models


def gpt2(layers: int = 12, width: int = 768, heads: int = 12, sequence: int = 1024, batch: int = 4) -> Workload:
    """GPT-2 of the `transformers` library, 50,257 tokens, dropout 0.1, loss inside. 12 layers: Radford et al. 2019."""
    from transformers import GPT2Config, GPT2LMHeadModel

    # Keys and values would become outputs of the graph, two more per layer that no plan may drop.
    config = GPT2Config(n_positions=sequence, n_embd=width, n_layer=layers, n_head=heads, use_cache=False)
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    return Workload(GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ids}, None)


def llama7b(layers: int = 32, sequence: int = 4096, batch: int = 1) -> Workload:
    """Llama-7B in bfloat16, loss inside (Touvron et al. 2023, arXiv:2302.13971, table 2); 4,096 tokens as Llama 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    model = LlamaForCausalLM(config).bfloat16()
    return Workload(model.train(), (), {"input_ids": ids, "labels": ids}, None)


def t5(layers: int = 12, sequence: int = 512, target: int = 128, batch: int = 8) -> Workload:
    """T5-base: encoder and decoder of 12 layers each, loss inside (Raffel et al. 2020, arXiv:1910.10683, sec. 3.1)."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=12,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    labels = torch.randint(0, config.vocab_size, (batch, target))
    return Workload(T5ForConditionalGeneration(config).train(), (), {"input_ids": ids, "labels": labels}, None)


# ------------------------------------------------------------------------------------------------------ vision models


def vit_b(batch: int = 64) -> Workload:
    """ViT-B/16 on 224 x 224 pixels, loss inside (Dosovitskiy et al. 2021, arXiv:2010.11929, table 1)."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        problem_type="single_label_classification", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0
    )
    config.num_labels = 1000
    images = torch.randn(batch, 3, 224, 224)
    labels = torch.randint(0, 1000, (batch,))
    return Workload(ViTForImageClassification(config).train(), (), {"pixel_values": images, "labels": labels}, None)


class DenseLayer(nn.Module):
    """BN-ReLU-Conv(1x1)-BN-ReLU-Conv(3x3), appended to what it read; (batch, c, h, w) to (batch, c + growth, h, w)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.squeeze = conv_norm(inputs, 4 * growth, 1)
        self.grow = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.grow(self.squeeze(torch.relu(self.norm(x))))], dim=1)


def transition(inputs: int) -> nn.Sequential:
    """Halve channels and resolution between dense blocks."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, inputs // 2, 1, bias=False), nn.AvgPool2d(2)
    )


class DenseNet(nn.Module):
    """Dense blocks with transitions between them; (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, blocks: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        stages: list[nn.Module] = [conv_norm(3, channels, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
        for level, layers in enumerate(blocks):
            if level > 0:
                stages.append(transition(channels))
                channels //= 2
            for _ in range(layers):
                stages.append(DenseLayer(channels, growth))
                channels += growth
        self.stages = nn.Sequential(*stages, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean(dim=(2, 3)))


def densenet121(batch: int = 32, size: int = 224) -> Workload:
    """DenseNet-121: 8.0 million parameters, loss outside (Huang et al. 2017, arXiv:1608.06993, table 1)."""
    model = DenseNet((6, 12, 24, 16), growth=32, classes=1000)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    return Workload(model.train(), (images,), {}, CrossEntropy(labels))


ZOO: Mapping[str, Callable[[], Workload]] = {
    "transformer6": partial(models.transformer, layers=6, width=128, heads=4, sequence=128, batch=8, dropout=0.0),
    "resnet50": partial(models.resnet50, batch=64, size=224),
    "unet": partial(models.unet, levels=5, width=64, size=256, batch=16),
    "densenet121": densenet121,
    "inception": partial(models.inception, blocks=9, width=64, batch=32, size=128, classes=1000),
    "vit_b": vit_b,
    "t5": t5,
    "gpt2_12": gpt2,
    "gpt2_48": partial(gpt2, layers=48),
    "gpt2_96": partial(gpt2, layers=96),
    "llama7b": llama7b,
}


# Its plans run on this machine too, beside those of other tools.
ON_CPU = frozenset({"transformer6"})


def build(name: str) -> Workload:
    """The workload of that name, on the meta device unless it is one of `ON_CPU`."""
    with torch.device("cpu" if name in ON_CPU else "meta"):
        return ZOO[name]()
