"""Train a residual network on scikit-learn's digits within a memory budget, in a plain PyTorch loop.

    python examples/train_digits.py --budget-fraction 0.3 --save-plan plan.json
    python examples/train_digits.py --plan plan.json

The images (1797 of 8 x 8 pixels) come with the scikit-learn package. The loss is outside the module, the network has
BatchNorm and dropout, and the test images are classified without gradients, by the original forward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import placemat
from planning import exit_missing, make_parser, make_plan, parse, positive, print_result, run_example

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as missing:
    exit_missing(missing)

NUM_CLASSES = 10


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, batch=64, steps=60)
    parser.add_argument("--blocks", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=32, help="channels")
    return parse(parser, argv)


class Block(nn.Module):
    """Two convolutions beside a shortcut; (batch, width, 8, 8) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(y)))


def build_model(arguments: argparse.Namespace) -> nn.Module:
    """(batch, 1, 8, 8) images to (batch, 10) logits."""
    torch.manual_seed(arguments.seed)
    width = arguments.width
    blocks = [Block(width) for _ in range(arguments.blocks)]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, NUM_CLASSES)]
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *blocks, *head)


def read_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Images with values from 0 to 1 and their digits, to train and to test with."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    targets = torch.as_tensor(digits.target, dtype=torch.long)
    parts = train_test_split(images, targets, test_size=297, random_state=seed)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def loss_for_planning(logits: Tensor) -> Tensor:
    """The loss with targets of the right shape: it is traced, never run."""
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def train(
    model: nn.Module, images: TensorDataset, arguments: argparse.Namespace
) -> tuple[list[float], placemat.Measurement]:
    """Losses of all steps, and the measurement of the second one (the first one compiles)."""
    # An applied plan is for one shape, so the smaller batch at the end of an epoch is left out.
    loader = DataLoader(images, arguments.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    measured: list[placemat.Measurement] = []
    while len(losses) < max(2, arguments.steps):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)

            def step(x: Tensor = x, y: Tensor = y) -> None:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.item())

            if len(losses) == 1:
                measured.append(placemat.measure(step))
            else:
                step()
            optimizer.step()
            if len(losses) == max(2, arguments.steps):
                break
    return losses, measured[0]


@torch.no_grad()
def accuracy(model: nn.Module, images: TensorDataset) -> float:
    """Share of the images that are classified rightly."""
    model.eval()
    x, y = images.tensors
    return (model(x).argmax(1) == y).float().mean().item()


def run(arguments: argparse.Namespace) -> None:
    to_train, to_test = read_digits(arguments.seed)
    model = build_model(arguments)
    example = to_train.tensors[0][: arguments.batch]
    plan = make_plan(arguments, model, (example,), {}, loss_for_planning)
    placemat.apply(model, plan)
    losses, measured = train(model, to_train, arguments)
    print_result(plan, measured, losses)
    print(f"test accuracy   {accuracy(model, to_test):.1%}")


def main(argv: Sequence[str] | None = None) -> int:
    return run_example(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
