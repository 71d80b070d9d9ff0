"""Models of the libraries that people train with, in tiny configurations with random weights.

`LIBRARY_MODELS` says of each what a user has to know to plan it; docs/models.md is made of that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests import models
from tests.models import CrossEntropy, Workload, seeded

VOCABULARY = 128


@dataclass(frozen=True)
class LibraryModel:
    """How a model is made, and what a user has to know.

    Attributes:
        library: distribution that has it.
        build: a workload in training mode.
        to_know: what to do for it beyond calling `placemat.optimize`; empty if there is nothing.
        options: of `placemat.optimize`.
    """

    library: str
    build: Callable[[], Workload]
    to_know: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def absent_because(self) -> str | None:
        """Why the model cannot be made here; None if it can.

        The test extra has every library but timm: timm needs torchvision, of which the package index has no build that
        goes with a CPU build of torch. One that is there nevertheless raises a RuntimeError when it is imported.
        """
        if self.library != "timm":
            return None
        try:
            importlib.import_module(self.library)
        except (ImportError, RuntimeError) as error:
            return f"{self.library} does not import: {error}"
        return None


def _with_labels(model: nn.Module, ids: Tensor) -> Workload:
    return Workload(model.train(), (), {"input_ids": ids, "labels": ids}, None)


def _ids(batch: int, sequence: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, sequence))


def gpt2() -> Workload:
    return models.gpt2(layers=2, width=64, sequence=64, batch=4)


def llama(key_heads: int = 4, use_cache: bool = False) -> Workload:
    """(batch, sequence) tokens to the loss, which is inside; four query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
        use_cache=use_cache,
    )
    with seeded(0):
        return _with_labels(LlamaForCausalLM(config), _ids(4, 64))


def bert(layers: int = 2, width: int = 64, sequence: int = 64, batch: int = 4) -> Workload:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=sequence,
    )
    with seeded(0):
        return _with_labels(BertForMaskedLM(config), _ids(batch, sequence))


def t5(layers: int = 2, width: int = 64, sequence: int = 64, batch: int = 4) -> Workload:
    """As many layers in the encoder as in the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    with seeded(0):
        return _with_labels(T5ForConditionalGeneration(config), _ids(batch, sequence))


def vit(layers: int = 2, width: int = 64, batch: int = 8) -> Workload:
    """(batch, 3, 32, 32) images in 8 x 8 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=32,
        patch_size=4,
        hidden_dropout_prob=0.1,
        problem_type="single_label_classification",
    )
    config.num_labels = 10
    with seeded(0):
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
        return Workload(ViTForImageClassification(config).train(), (), {"pixel_values": images, "labels": labels}, None)


def convnext() -> Workload:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_stages=2,
        image_size=32,
        drop_path_rate=0.1,
        problem_type="single_label_classification",
    )
    config.num_labels = 10
    with seeded(0):
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
        model = ConvNextForImageClassification(config)
        return Workload(model.train(), (), {"pixel_values": images, "labels": labels}, None)


def mixtral(experts: str, layers: int = 2, width: int = 32, sequence: int = 32, batch: int = 4) -> Workload:
    """Layers with four experts, of which each token takes two.

    Args:
        experts: how the library computes them: "eager", "batched_mm" or "grouped_mm", which it does unless told.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    with seeded(0):
        model = MixtralForCausalLM(config)
        model.set_experts_implementation(experts)
        return _with_labels(model, _ids(batch, sequence))


def lora(base: Callable[[], Workload], target_modules: list[str]) -> Workload:
    """A model of which only low-rank adapters are trained (Hu et al. 2021, arXiv:2106.09685)."""
    from peft import LoraConfig, get_peft_model

    workload = base()
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=target_modules, task_type="CAUSAL_LM")
    with seeded(0):
        model = get_peft_model(workload.model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, of which the gradients of the other factor would be zeros
                nn.init.normal_(parameter, std=0.02)
    return workload._replace(model=model.train())


def diffusion_unet() -> Workload:
    """A denoising U-Net with attention at its lowest resolution; mean squared error to the noise, outside."""
    from diffusers import UNet2DModel

    with seeded(0):
        model = UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            dropout=0.1,
        )
        noisy, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        steps = torch.randint(0, 1000, (2,))
    return Workload(model.train(), (noisy, steps), {}, NoiseLoss(noise))


def timm_model(architecture: str, **sizes: Any) -> Workload:
    """An architecture of timm in other sizes: (batch, 3, 32, 32) images to ten classes; the loss is outside."""
    import timm

    with seeded(0):
        model = timm.create_model(architecture, pretrained=False, num_classes=10, **sizes)
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
        return Workload(model.train(), (images,), {}, CrossEntropy(labels))


class NoiseLoss:
    """Mean squared error of a denoiser's `.sample` to the noise; both (batch, channels, height, width)."""

    def __init__(self, noise: Tensor) -> None:
        self.noise = noise

    def __call__(self, output: Any) -> Tensor:
        return nn.functional.mse_loss(output.sample, self.noise)


_SHARED_KEYS = "environment variable `TRANSFORMERS_SDPA_FORCE_GQA=1`"
_CACHE = "`use_cache=False` in the configuration"

LIBRARY_MODELS: dict[str, LibraryModel] = {
    "GPT-2": LibraryModel("transformers", gpt2, _CACHE),
    "Llama": LibraryModel("transformers", llama, f"{_CACHE}; if query heads share keys (Llama 3): {_SHARED_KEYS}"),
    "BERT": LibraryModel("transformers", bert),
    "T5": LibraryModel("transformers", t5, _CACHE),
    "ViT": LibraryModel("transformers", vit),
    "ConvNeXt": LibraryModel("transformers", convnext),
    "Mixtral": LibraryModel(
        "transformers",
        lambda: mixtral("grouped_mm"),
        f"{_CACHE}; the experts' products are a custom operator in float32, whose seconds are an estimate",
    ),
    "Mixtral, batched experts": LibraryModel(
        "transformers",
        lambda: mixtral("batched_mm"),
        f'{_CACHE}; `model.set_experts_implementation("batched_mm")` copies weights for each token',
    ),
    "Mixtral, eager experts": LibraryModel(
        "transformers",
        lambda: mixtral("eager"),
        f'{_CACHE}; `model.set_experts_implementation("eager")` loops over what the data select: '
        '`keep_eager=["*.mlp.experts"]`',
        {"keep_eager": ["*.mlp.experts"]},
    ),
    "GPT-2 with LoRA": LibraryModel("peft", lambda: lora(gpt2, ["c_attn", "c_proj"]), _CACHE),
    "Llama with LoRA": LibraryModel("peft", lambda: lora(llama, ["q_proj", "v_proj"]), _CACHE),
    "U-Net of a diffusion model": LibraryModel("diffusers", diffusion_unet),
    "timm: ResNet": LibraryModel(
        "timm", lambda: timm_model("resnet18d", channels=(8, 16, 32, 64), stem_width=8, drop_path_rate=0.1)
    ),
    "timm: ConvNeXt": LibraryModel(
        "timm", lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), drop_path_rate=0.1)
    ),
    "timm: ViT": LibraryModel(
        "timm",
        lambda: timm_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=64, depth=2, num_heads=4, proj_drop_rate=0.1
        ),
    ),
    "timm: MobileNetV3": LibraryModel("timm", lambda: timm_model("mobilenetv3_small_050", drop_rate=0.2)),
}
