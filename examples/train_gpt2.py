"""Train a byte-level GPT-2 within a memory budget, and compare it with the same model without placemat.

    python examples/train_gpt2.py                              # 0.3 of the way from the floor to keeping everything
    python examples/train_gpt2.py --budget "300 MiB" --steps 100
    python examples/train_gpt2.py --save-plan plan.json        # and later: --plan plan.json

The model is GPT-2 as the `transformers` library has it, with random weights and dropout, its loss inside the module.
The text is the source of the Python standard library that runs this script. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

import placemat
from byte_gpt2 import add_model_arguments, build_model, check_model_arguments, loss_of, read_text, sample_batch
from placemat.units import format_bytes
from planning import make_parser, make_plan, parse, run_example

LEARNING_RATE = 1e-3
TIMED_PAIRS = 5


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, batch=8, steps=40)
    add_model_arguments(parser, layers=12, width=256, sequence=128)
    arguments = parse(parser, argv)
    check_model_arguments(parser, arguments)
    return arguments


def train(model: nn.Module, text: Tensor, arguments: argparse.Namespace) -> list[float]:
    """Losses of all steps."""
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    every = max(1, arguments.steps // 10)
    with tqdm(total=arguments.steps, desc="training", unit="step", disable=None) as bar:
        for step in range(arguments.steps):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(**sample_batch(text, arguments.batch, arguments.sequence, generator)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            bar.update()
            if step % every == 0 or step == arguments.steps - 1:
                tqdm.write(f"step {step + 1:4d}  loss {losses[-1]:.4f}")
    return losses


def step_seconds(model: nn.Module, example: dict[str, Tensor]) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss_of(model(**example)).backward()
    return time.perf_counter() - start


def compare_times(original: nn.Module, model: nn.Module, example: dict[str, Tensor]) -> tuple[float, float, float]:
    """Median step seconds of both, and the median ratio, over pairs run right after each other.

    A machine's speed drifts by more than the difference looked for; within a pair it hardly does.
    """
    step_seconds(original, example)
    pairs = [(step_seconds(original, example), step_seconds(model, example)) for _ in range(TIMED_PAIRS)]
    before, after = zip(*pairs, strict=True)
    return statistics.median(before), statistics.median(after), statistics.median(b / a for a, b in pairs)


def print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, left, right in rows:
        print(f"{name:<{widths[0]}}  {left:>{widths[1]}}  {right:>{widths[2]}}".rstrip())


def compare(
    original: nn.Module, model: nn.Module, plan: placemat.Plan, example: dict[str, Tensor], losses: list[float]
) -> None:
    """Print what was promised beside what was measured."""
    report = placemat.verify(model, model, (), example, loss_fn=loss_of)
    static_bytes = sum(plan.static_bytes.values())
    before_s, after_s, ratio = compare_times(original, model, example)
    gradients = [row for row in report.rows if row.name.startswith("gradient: ")]
    num_bitwise = sum(row.status == "bitwise" for row in gradients)
    largest = max((row.max_abs_difference or 0.0 for row in gradients), default=0.0)
    print()
    print_table(
        [
            ("", "original", "placemat"),
            ("predicted peak", "", format_bytes(plan.predicted_peak_bytes)),
            (
                "measured peak",
                format_bytes(static_bytes + report.reference.peak_bytes),
                format_bytes(static_bytes + report.optimized.peak_bytes),
            ),
            ("budget", "", format_bytes(plan.budget_bytes)),
            ("median step time", f"{before_s * 1e3:.0f} ms", f"{after_s * 1e3:.0f} ms"),
            ("step time ratio", "", f"{ratio:.3f} (expected {1 + plan.overhead:.3f})"),
            ("gradients bitwise equal", "", f"{num_bitwise} of {len(gradients)}"),
            ("largest gradient difference", "", f"{largest:.3g}"),
            ("loss, first and last step", "", f"{losses[0]:.4f} -> {losses[-1]:.4f}"),
        ]
    )
    print(
        "\nPeaks are of one step: parameters, inputs, activations, gradients and temporaries. AdamW's state lies\n"
        "outside the step; plan for it with `reserved_bytes=`. Step times are of forward and backward."
    )


def run(arguments: argparse.Namespace) -> None:
    text = read_text(min_bytes=arguments.sequence + 1)
    model = build_model(arguments)
    original = copy.deepcopy(model)
    example = sample_batch(text, arguments.batch, arguments.sequence, torch.Generator().manual_seed(arguments.seed))
    plan = make_plan(arguments, model, (), example, loss_of)
    placemat.apply(model, plan)
    losses = train(model, text, arguments)
    compare(original, model, plan, example, losses)


def main(argv: Sequence[str] | None = None) -> int:
    return run_example(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
