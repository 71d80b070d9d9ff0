"""What the examples share: arguments about the budget, the plan that they lead to, and what a run prints at its end."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import placemat
from placemat.units import format_bytes


def positive(text: str) -> int:
    """An int of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def make_parser(description: str | None, *, batch: int, steps: int) -> argparse.ArgumentParser:
    """A parser with the arguments that all examples have; `batch` and `steps` are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument(
        "--time-limit",
        type=float,
        default=15.0,  # the examples are to end soon; placemat's own default lets the solver search longer
        metavar="SECONDS",
        help="the solver stops at the latest after this time; default 15",
    )
    parser.add_argument("--batch", type=positive, default=batch, help="samples per step")
    parser.add_argument("--steps", type=positive, default=steps)
    parser.add_argument("--threads", type=positive, default=1, help="default 1, for comparable times")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; those about files are checked before a long run begins."""
    arguments = parser.parse_args(argv)
    if arguments.plan is not None and not arguments.plan.is_file():
        parser.error(f"--plan: there is no file {arguments.plan}")
    if arguments.save_plan is not None and not arguments.save_plan.parent.is_dir():
        parser.error(f"--save-plan: there is no folder {arguments.save_plan.parent}")
    return arguments


def exit_missing(error: ImportError) -> NoReturn:
    """End the script because of a package that only the examples need."""
    raise SystemExit(f'error: {error}; install the examples\' needs with: pip install -e ".[examples]"') from error


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The budget and the time limit as keyword arguments of `placemat.plan` and `placemat.optimize`."""
    fraction = arguments.budget_fraction if arguments.budget is None else None
    return {"budget_bytes": arguments.budget, "budget_fraction": fraction, "time_limit_s": arguments.time_limit}


def make_plan(
    arguments: argparse.Namespace,
    model: nn.Module,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], Tensor],
) -> placemat.Plan:
    """The saved plan, or a new one, which is saved if that was asked for.

    The optimizer's state is not part of the step; `reserved_bytes=` is the place for it.
    """
    if arguments.plan is not None:
        plan = placemat.Plan.load(arguments.plan)
    else:
        plan = placemat.plan(
            model,
            example_args=example_args,
            example_kwargs=example_kwargs,
            **options_of(arguments),
            loss_fn=loss_fn,
            progress=True,
        )
    print(plan.summary())
    save_plan(arguments, plan)
    return plan


def save_plan(arguments: argparse.Namespace, plan: placemat.Plan) -> None:
    if arguments.save_plan is not None:
        plan.save(arguments.save_plan)
        print(f"plan written to {arguments.save_plan}")


def print_result(plan: placemat.Plan, measured: placemat.Measurement, losses: Sequence[float]) -> None:
    """Print what was promised beside what was measured of one training step, and how the loss went.

    The allocator sees what a step allocates; parameters, buffers and inputs are on top, and gradients that exist.
    """
    peak_bytes = sum(plan.static_bytes.values()) + measured.peak_bytes
    few = max(1, len(losses) // 10)
    first, last = statistics.fmean(losses[:few]), statistics.fmean(losses[-few:])
    print(f"\nbudget          {format_bytes(plan.budget_bytes)}")
    print(f"predicted peak  {format_bytes(plan.predicted_peak_bytes)}")
    print(f"measured peak   {format_bytes(peak_bytes)}")
    print(f"loss            {first:.4f} -> {last:.4f}  (means of the first and last {few} of {len(losses)} steps)")


def run_example(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """Exit code of an example; refusals of placemat are told without a traceback."""
    torch.set_num_threads(arguments.threads)
    try:
        run(arguments)
    except placemat.PlacematError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
