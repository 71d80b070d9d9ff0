"""Every path of an optimized module beside eager: step time, predicted and measured peak, bits.

    python -m benchmarks.paths                                  # all models, from the root of the repository
    python -m benchmarks.paths --model gpt2 --rounds 15 --json paths.json

Contenders, for each model:

    eager             the module as it is
    ample budget      more than eager can need: the original forward runs (target: ratio at most 1.02)
    keep everything   our generated code without any recomputation
    0.75 ... 0        plans at these fractions of the way from the floor to the keep-everything peak

A step is forward, loss and backward with gradients cleared before. Peaks include parameters, buffers and inputs. All
contenders run in one process with one torch thread, interleaved; ratios are medians over rounds (see `timing.py`).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import placemat
from benchmarks.timing import Timing, interleave
from placemat.cost_models import default_cost_model
from placemat.cost_models.base import CostModel
from placemat.graph.static import static_bytes
from placemat.units import format_bytes
from tests import models
from tests.models import Workload

MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": models.gpt2,
    "resnet50": models.resnet50,
    "unet": models.unet,
}
FRACTIONS = (0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Row:
    """One contender; bytes are of a whole step, and None where there is no such figure."""

    model: str
    contender: str
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    seconds: float
    ratio: float
    expected_ratio: float | None
    gap: float | None
    solve_seconds: float | None
    planning_seconds: float | None
    bitwise: bool | None


@dataclass(frozen=True)
class Contender:
    """A workload on its own copy of the model, and what it was planned for (None: eager)."""

    name: str
    workload: Workload
    plan: placemat.Plan | None
    planning_seconds: float | None

    def step(self) -> None:
        self.workload.model.zero_grad(set_to_none=True)
        self.workload.step()


def make_plans(workload: Workload, cost_model: CostModel) -> dict[str, tuple[placemat.Plan, float]]:
    """Plans by contender, each with the seconds that planning took (capture, costs and solving)."""

    def timed(budget_bytes: int | None, budget_fraction: float | None) -> tuple[placemat.Plan, float]:
        start = time.perf_counter()
        plan = placemat.plan(
            workload.model,
            budget_bytes,
            workload.args,
            workload.kwargs,
            budget_fraction=budget_fraction,
            loss_fn=workload.loss,
            cost_model=cost_model,
        )
        return plan, time.perf_counter() - start

    whole, whole_s = timed(None, 1.0)
    assert whole.eager_bound_bytes is not None
    ample, ample_s = timed(whole.eager_bound_bytes, None)
    assert ample.runs_original
    # Keeping everything may be ample for the original forward as well; here our code is to run.
    plans = {"ample budget": (ample, ample_s), "keep everything": (replace(whole, runs_original=False), whole_s)}
    return plans | {f"{fraction:g}": timed(None, fraction) for fraction in FRACTIONS}


def make_contenders(workload: Workload, cost_model: CostModel) -> list[Contender]:
    contenders = [Contender("eager", workload, None, None)]
    for name, (plan, planning_seconds) in make_plans(workload, cost_model).items():
        model = placemat.apply(copy.deepcopy(workload.model), plan)
        contenders.append(Contender(name, workload._replace(model=model), plan, planning_seconds))
    return contenders


def measured_peak(contender: Contender) -> tuple[int, bool | None]:
    """Bytes of the peak of a step, static ones included, and whether the step is bitwise that of eager."""
    model, args, kwargs, _ = contender.workload
    always = sum(static_bytes(model, args, kwargs).values())
    report = placemat.verify(model, model, args, kwargs, contender.workload.loss)
    if contender.plan is None:
        return always + report.reference.peak_bytes, None
    return always + report.optimized.peak_bytes, report.ok


def make_row(model: str, contender: Contender, timing: Timing) -> Row:
    plan = contender.plan
    peak_bytes, bitwise = measured_peak(contender)
    return Row(
        model=model,
        contender=contender.name,
        budget_bytes=None if plan is None else plan.budget_bytes,
        predicted_peak_bytes=None if plan is None or plan.runs_original else plan.predicted_peak_bytes,
        measured_peak_bytes=peak_bytes,
        seconds=timing.seconds,
        ratio=timing.ratio,
        expected_ratio=None if plan is None else 1 + plan.overhead,
        gap=None if plan is None else plan.gap,
        solve_seconds=None if plan is None else plan.solve_seconds,
        planning_seconds=contender.planning_seconds,
        bitwise=bitwise,
    )


def run(model: str, rounds: int, cost_model: CostModel) -> list[Row]:
    contenders = make_contenders(MODELS[model](), cost_model)
    timings = interleave({c.name: c.step for c in contenders}, reference="eager", rounds=rounds)
    return [make_row(model, c, timings[c.name]) for c in contenders]


def format_table(rows: Sequence[Row]) -> str:
    """Text with one line for each row; bytes in MiB."""

    def cell(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    titles = "model contender budget predicted measured ms ratio expected gap planning bitwise"
    lines = [tuple(titles.split())]
    for row in rows:
        sizes = (row.budget_bytes, row.predicted_peak_bytes, row.measured_peak_bytes)
        lines.append(
            (
                row.model,
                row.contender,
                *("" if size is None else format_bytes(size) for size in sizes),
                f"{row.seconds * 1e3:.1f}",
                f"{row.ratio:.3f}",
                cell(row.expected_ratio, "{:.3f}"),
                cell(row.gap, "{:.1%}"),
                cell(row.planning_seconds, "{:.1f} s"),
                "" if row.bitwise is None else "yes" if row.bitwise else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    cost_model = default_cost_model("cpu")
    rows: list[Row] = []
    for model in arguments.model or list(MODELS):
        rows += run(model, arguments.rounds, cost_model)
        print(format_table([row for row in rows if row.model == model]), end="\n\n", flush=True)
    if arguments.json is not None:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
