"""Models of well-known libraries under a budget: peaks, overhead, and what a user has to know. docs/models.md has it.

    python -m benchmarks.models                      # all of tests/library_models.py, from the root of the repository
    python -m benchmarks.models --only Llama BERT --fraction 0.5 --json models.json

Budgets are a part of the way from the floor to keeping everything. Peaks are of a whole step: parameters, buffers and
inputs are in them, an optimizer's state is not. Seconds to plan are those of capture, measuring operators that no
earlier model of the run had, and solving, with one torch thread.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import placemat
from placemat.cost_models.cache import CACHE_DIR_VARIABLE
from placemat.graph.static import static_bytes
from placemat.units import format_bytes
from tests.library_models import LIBRARY_MODELS, LibraryModel
from tests.models import Workload


@dataclass(frozen=True)
class Row:
    """One model; bytes are of a whole step. `gap` and `overhead` are parts of the step's seconds."""

    model: str
    library: str
    ops: int
    eager_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    overhead: float
    gap: float
    planning_seconds: float
    bitwise: bool
    to_know: str

    def cells(self) -> list[str]:
        sizes = (self.eager_peak_bytes, self.predicted_peak_bytes, self.measured_peak_bytes)
        return [
            self.model,
            str(self.ops),
            *(format_bytes(size) for size in sizes),
            f"{self.overhead:.1%}",
            f"{self.gap:.1%}",
            f"{self.planning_seconds:.1f}",
            "yes" if self.bitwise else "NO",
            self.to_know or "nothing",
        ]


HEADER = "model|ops|eager peak|predicted|measured|overhead|gap|seconds to plan|eager's bits|to know".split("|")


def peak_bytes(work: Workload) -> int:
    """Measured peak of a step from gradients that are None, with what lives before it."""
    work.model.zero_grad(set_to_none=True)
    allocated = placemat.measure(work.step).peak_bytes
    work.model.zero_grad(set_to_none=True)
    return sum(static_bytes(work.model, work.args, work.kwargs).values()) + allocated


def run(name: str, entry: LibraryModel, fraction: float, time_limit_s: float) -> Row:
    work = entry.build()
    eager_peak_bytes = peak_bytes(entry.build())
    start = time.perf_counter()
    plan = placemat.plan(
        work.model,
        None,
        work.args,
        work.kwargs,
        budget_fraction=fraction,
        loss_fn=work.loss,
        time_limit_s=time_limit_s,
        **entry.options,
    )
    planning_seconds = time.perf_counter() - start
    placemat.apply(work.model, plan)
    report = placemat.verify(work.model, work.model, work.args, work.kwargs, loss_fn=work.loss)
    return Row(
        name,
        entry.library,
        len(plan.problem.ops),
        eager_peak_bytes,
        plan.predicted_peak_bytes,
        peak_bytes(work),
        plan.overhead,
        plan.gap,
        planning_seconds,
        all(row.status == "bitwise" for row in report.rows),
        entry.to_know,
    )


def markdown(rows: Sequence[Row]) -> str:
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 2), "---"], *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="well-known models under a budget")
    parser.add_argument("--only", nargs="+", choices=LIBRARY_MODELS, default=list(LIBRARY_MODELS), metavar="NAME")
    parser.add_argument("--fraction", type=float, default=0.25, help="of the way from the floor to keeping everything")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds to solve, for each model")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # nothing is measured yet
        os.environ[CACHE_DIR_VARIABLE] = folder
        for name in options.only:
            absent_because = LIBRARY_MODELS[name].absent_because
            if absent_because is not None:
                print(f"{name}: left out, {absent_because}", flush=True)
                continue
            rows.append(run(name, LIBRARY_MODELS[name], options.fraction, options.time_limit))
            print(*rows[-1].cells()[:-1], sep="  ", flush=True)
    print("\n" + markdown(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.bitwise and row.measured_peak_bytes <= row.predicted_peak_bytes for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
