"""Train a small U-Net that takes noise off photographs with Lightning, within a memory budget.

    python examples/train_lightning.py --budget-fraction 0.3 --save-plan plan.json
    python examples/train_lightning.py --plan plan.json

What is planned is the network inside the LightningModule, not the LightningModule. The two photographs come with the
scikit-learn package. Validation runs without gradients, by the original forward.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import placemat
from planning import exit_missing, make_parser, make_plan, parse, positive, print_result, run_example

try:
    import lightning
    from sklearn.datasets import load_sample_images
except ImportError as missing:
    exit_missing(missing)

PATCH = 32  # pixels


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, batch=16, steps=40)
    parser.add_argument("--width", type=positive, default=16, help="channels at full resolution")
    return parse(parser, argv)


class UNet(nn.Module):
    """(batch, 3, 32, 32) noisy images to images; each resolution is joined with what came down to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = convolutions(3, width), convolutions(width, 2 * width)
        self.bottom = convolutions(2 * width, 4 * width)
        self.up2, self.up1 = convolutions(6 * width, 2 * width), convolutions(3 * width, width)
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2)], 1))
        a = self.up1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return x + self.last(a)


def convolutions(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.SiLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.SiLU(),
    )


class Denoiser(lightning.LightningModule):
    """Trains a network; `losses` are those of all steps, `measured` is the second one (the first one compiles)."""

    measured: placemat.Measurement

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        noisy, clean = batch
        loss = F.mse_loss(self.network(noisy), clean)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        noisy, clean = batch
        self.log("val_loss", F.mse_loss(self.network(noisy), clean))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Lightning clears gradients between forward and backward: the forward would run beside those of the last step.
        self.zero_grad(set_to_none=True)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """As without it, but the second forward and backward, which are the closure, are measured."""
        assert optimizer_closure is not None

        def measured_closure() -> Any:
            results: list[Any] = []
            self.measured = placemat.measure(lambda: results.append(optimizer_closure()))
            return results[0]

        closure = measured_closure if len(self.losses) == 1 else optimizer_closure
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


def read_patches(num_patches: int, seed: int) -> TensorDataset:
    """Noisy and clean pieces of the photographs, (3, 32, 32) each with values about 0 to 1."""
    photographs = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for index in range(num_patches):
        photograph = photographs[index % len(photographs)]
        top, left = (int(torch.randint(0, size - PATCH, (), generator=generator)) for size in photograph.shape[1:])
        pieces.append(photograph[:, top : top + PATCH, left : left + PATCH])
    clean = torch.stack(pieces)
    return TensorDataset(clean + 0.2 * torch.randn(clean.shape, generator=generator), clean)


def make_trainer(steps: int) -> lightning.Trainer:
    # It tells of the accelerators that it found, and advertises.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def run(arguments: argparse.Namespace) -> None:
    steps = max(2, arguments.steps)
    torch.manual_seed(arguments.seed)
    network = UNet(arguments.width)
    to_train = read_patches(steps * arguments.batch, arguments.seed)
    to_validate = read_patches(arguments.batch, arguments.seed + 1)
    example = to_train.tensors[0][: arguments.batch]
    plan = make_plan(arguments, network, (example,), {}, lambda out: F.mse_loss(out, torch.zeros_like(out)))
    placemat.apply(network, plan)
    denoiser = Denoiser(network)
    trainer = make_trainer(steps)
    trainer.fit(denoiser, DataLoader(to_train, arguments.batch, shuffle=True), DataLoader(to_validate, arguments.batch))
    print_result(plan, denoiser.measured, denoiser.losses)
    print(f"validation loss {trainer.callback_metrics['val_loss'].item():.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    return run_example(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
