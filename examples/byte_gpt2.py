"""A byte-level GPT-2 of the `transformers` library with random weights, and text that every machine has."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planning import exit_missing, positive


def add_model_arguments(parser: argparse.ArgumentParser, *, layers: int, width: int, sequence: int) -> None:
    parser.add_argument("--layers", type=positive, default=layers)
    parser.add_argument("--width", type=positive, default=width, help="must be a multiple of --heads")
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--sequence", type=positive, default=sequence, help="bytes per sample")


def check_model_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is not a multiple of --heads {arguments.heads}")


def build_model(arguments: argparse.Namespace) -> nn.Module:
    """In training mode, with dropout, its loss inside the module."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        exit_missing(error)
    torch.manual_seed(arguments.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=arguments.sequence,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,  # training needs no key-value cache, and its tensors would be outputs that no plan may drop
    )
    model = GPT2LMHeadModel(config)
    # The library would otherwise look the loss up by class name with a warning, which a graph capture cannot trace.
    model.loss_type = "ForCausalLM"
    return model.train()


def loss_of(output: Any) -> Tensor:
    """What is differentiated: the loss that the model returns, not its logits, which get no gradient."""
    return output.loss


def read_text(min_bytes: int) -> Tensor:
    """The standard library's top-level modules as one uint8 tensor of bytes, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < min_bytes:
        raise SystemExit(f"error: {folder} holds {len(text)} bytes of Python source; at least {min_bytes} are needed")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batch(text: Tensor, batch: int, sequence: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random pieces of the text as keyword arguments of the model, each (batch, sequence) int64.

    The labels are the inputs: GPT-2 shifts them by one itself.
    """
    starts = torch.randint(0, len(text) - sequence, (batch, 1), generator=generator)
    ids = text[starts + torch.arange(sequence)].long()
    return {"input_ids": ids, "labels": ids}
