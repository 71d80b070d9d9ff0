"""Train a byte-level GPT-2 with `transformers.Trainer` within a memory budget.

    python examples/train_trainer.py --budget-fraction 0.3 --save-plan plan.json
    python examples/train_trainer.py --plan plan.json
    python examples/train_trainer.py --accumulate 4 --bf16

The Trainer decides with what arguments, and under which autocast, it calls the model. So the model is planned when the
first training call comes, and the plan is saved afterwards. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import placemat
from byte_gpt2 import add_model_arguments, build_model, check_model_arguments, loss_of, read_text, sample_batch
from planning import (
    exit_missing,
    make_parser,
    options_of,
    parse,
    positive,
    print_result,
    run_example,
    save_plan,
)

try:
    from transformers import Trainer, TrainingArguments
except ImportError as missing:
    exit_missing(missing)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, batch=8, steps=30)
    add_model_arguments(parser, layers=4, width=128, sequence=64)
    parser.add_argument("--accumulate", type=positive, default=1, help="batches whose gradients make one step")
    parser.add_argument("--bf16", action="store_true", help="mixed precision, as the Trainer does it")
    arguments = parse(parser, argv)
    check_model_arguments(parser, arguments)
    return arguments


class MeasuredTrainer(Trainer):
    """A Trainer that measures its second forward and backward: the first one plans and compiles."""

    measured: placemat.Measurement
    num_batches = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.num_batches += 1
        losses: list[Tensor] = []

        def step() -> None:
            losses.append(super(MeasuredTrainer, self).training_step(*args, **kwargs))

        if self.num_batches == 2:
            self.measured = placemat.measure(step)
        else:
            step()
        return losses[0]


def make_trainer(arguments: argparse.Namespace, model: nn.Module, folder: str) -> MeasuredTrainer:
    """With as many samples as the steps need: a smaller last batch would be a call of another shape."""
    num_batches = max(2, arguments.steps * arguments.accumulate)
    text = read_text(min_bytes=arguments.sequence + 1)
    generator = torch.Generator().manual_seed(arguments.seed)
    samples = [sample_batch(text, 1, arguments.sequence, generator) for _ in range(num_batches * arguments.batch)]
    return MeasuredTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            gradient_accumulation_steps=arguments.accumulate,
            dataloader_drop_last=True,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            bf16=arguments.bf16,
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            seed=arguments.seed,
        ),
        train_dataset=[{name: rows[0] for name, rows in sample.items()} for sample in samples],
    )


def run(arguments: argparse.Namespace) -> None:
    model = build_model(arguments)
    if arguments.plan is not None:
        placemat.apply(model, placemat.Plan.load(arguments.plan))
    else:
        placemat.optimize(model, **options_of(arguments), loss_fn=loss_of, accumulate_grad=arguments.accumulate > 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arguments, model, folder)
        trainer.train()
    plan = model.plan
    assert isinstance(plan, placemat.Plan)
    print(plan.summary())
    save_plan(arguments, plan)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print_result(plan, trainer.measured, losses)


def main(argv: Sequence[str] | None = None) -> int:
    return run_example(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
