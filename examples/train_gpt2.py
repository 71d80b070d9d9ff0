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
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import placemat
from placemat.units import format_bytes

LEARNING_RATE = 1e-3
TIMED_PAIRS = 5
SOLVER_SECONDS = 15.0  # this script is to end within two minutes; the default lets the solver search longer


def positive(text: str) -> int:
    """An int of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget", metavar="SIZE", help='peak bytes of one training step, such as "300 MiB"')
    budget.add_argument(
        "--budget-fraction",
        type=float,
        default=0.3,
        metavar="F",
        help="the same as a share of the way from the least possible peak (0) to keeping everything (1); default 0.3",
    )
    budget.add_argument("--plan", type=Path, metavar="FILE", help="run a saved plan instead of making one")
    parser.add_argument("--save-plan", type=Path, metavar="FILE", help="write the plan to this file")
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--width", type=positive, default=256, help="must be a multiple of --heads")
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--sequence", type=positive, default=128, help="bytes per sample")
    parser.add_argument("--batch", type=positive, default=8, help="samples per step")
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--threads", type=positive, default=1, help="default 1, for comparable times")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is not a multiple of --heads {arguments.heads}")
    if arguments.plan is not None and not arguments.plan.is_file():
        parser.error(f"--plan: there is no file {arguments.plan}")
    if arguments.save_plan is not None and not arguments.save_plan.parent.is_dir():
        parser.error(f"--save-plan: there is no folder {arguments.save_plan.parent}")
    return arguments


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


def build_model(arguments: argparse.Namespace) -> nn.Module:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise SystemExit(f'error: {error}; install the examples\' needs with: pip install -e ".[examples]"') from error
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


def make_plan(model: nn.Module, example: dict[str, Tensor], arguments: argparse.Namespace) -> placemat.Plan:
    """The saved plan, or a new one; the optimizer's state is not part of the step and would go to `reserved_bytes=`."""
    if arguments.plan is not None:
        return placemat.Plan.load(arguments.plan)
    fraction = arguments.budget_fraction if arguments.budget is None else None
    return placemat.plan(
        model,
        arguments.budget,
        (),
        example,
        budget_fraction=fraction,
        loss_fn=loss_of,
        time_limit_s=SOLVER_SECONDS,
        progress=True,
    )


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
    torch.set_num_threads(arguments.threads)
    text = read_text(min_bytes=arguments.sequence + 1)
    model = build_model(arguments)
    original = copy.deepcopy(model)
    example = sample_batch(text, arguments.batch, arguments.sequence, torch.Generator().manual_seed(arguments.seed))
    plan = make_plan(model, example, arguments)
    print(plan.summary())
    if arguments.save_plan is not None:
        plan.save(arguments.save_plan)
        print(f"plan written to {arguments.save_plan}")
    placemat.apply(model, plan)
    losses = train(model, text, arguments)
    compare(original, model, plan, example, losses)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        run(arguments)
    except placemat.PlacematError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
