"""Plans in Inductor's code beside plain torch.compile: step time, saved bytes, predicted and measured peak.

    python -m benchmarks.inductor                               # a small transformer, from the root of the repository
    python -m benchmarks.inductor --layers 4 --width 128 --rounds 15

Contenders: `eager`; `torch.compile` as it is, with its own choice of what to save; and for each fraction of the way
from the floor to the keep-everything peak a plan that is run op by op, the same one compiled, and one that was made for
fused kernels under the same budget, compiled. Peaks include parameters, buffers and inputs.
All run in one process with one torch thread, interleaved; ratios to torch.compile are medians over rounds (see
`timing.py`).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch

import placemat
from benchmarks.timing import interleave
from placemat.graph.static import static_bytes
from placemat.units import format_bytes
from tests import models
from tests.models import Workload

FRACTIONS = (1.0, 0.5, 0.0)
REFERENCE = "torch.compile"


def make_contenders(workload: Workload) -> tuple[dict[str, Workload], dict[str, placemat.Plan]]:
    """Workloads by name, each on a copy of the model, and the plans of those that have one."""
    compiled = copy.deepcopy(workload.model)
    compiled.compile()
    contenders, plans = {"eager": workload, REFERENCE: workload._replace(model=compiled)}, {}
    for fraction in FRACTIONS:
        model, args, kwargs, _ = workload
        plan = placemat.plan(model, None, args, kwargs, budget_fraction=fraction, loss_fn=workload.loss_fn)
        fused = placemat.plan(model, plan.budget_bytes, args, kwargs, loss_fn=workload.loss_fn, compiler="inductor")
        for name, made, compiler in (("eager", plan, "eager"), ("compiled", plan, "inductor"), ("fused", fused, None)):
            applied = placemat.apply(copy.deepcopy(model), made, compiler=compiler)
            contenders[f"{fraction:g} {name}"] = workload._replace(model=applied)
            plans[f"{fraction:g} {name}"] = made
    return contenders, plans


def run_step(workload: Workload) -> None:
    workload.model.zero_grad(set_to_none=True)
    workload.step()


def peak_bytes(workload: Workload) -> int:
    workload.model.zero_grad(set_to_none=True)
    static = sum(static_bytes(workload.model, workload.args, workload.kwargs).values())
    return static + placemat.measure(workload.step).peak_bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 2, "width": 64, "sequence": 64, "batch": 8, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    options = vars(parser.parse_args(argv))
    rounds = options.pop("rounds")
    torch.set_num_threads(1)
    contenders, plans = make_contenders(models.transformer(**options))
    steps = {name: lambda workload=workload: run_step(workload) for name, workload in contenders.items()}
    timings = interleave(steps, reference=REFERENCE, rounds=rounds)
    print(f"{'contender':>14} {'predicted':>12} {'measured':>12} {'ms':>8} {'ratio':>7}")
    for name, workload in contenders.items():
        predicted = format_bytes(plans[name].predicted_peak_bytes) if name in plans else ""
        timing = timings[name]
        measured = format_bytes(peak_bytes(workload))
        print(f"{name:>14} {predicted:>12} {measured:>12} {timing.seconds * 1e3:8.1f} {timing.ratio:7.3f}")


if __name__ == "__main__":
    main()
