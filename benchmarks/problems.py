"""Rematerialization problems of the workloads in `zoo.py`: captured, lowered and costed, not yet solved.

    python -m benchmarks.problems gpt2_12 resnet50 --pickle DIRECTORY    # from the root of the repository

Prints one line for each, with the seconds that each stage took, and writes `DIRECTORY/NAME.pkl` if asked to.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.zoo import ZOO, build
from placemat.calls import the_device
from placemat.cost_models import Roofline, default_cost_model, device_spec
from placemat.pipeline import Planner
from placemat.problem import Problem
from placemat.stages import Stages
from tests.models import Workload

DEVICE = "A100 80GB SXM"  # that models on the meta device are planned for


def stages(workload: Workload) -> Stages:
    """What placemat knows of a workload before a budget is looked at: captured, lowered and costed."""
    model, args, kwargs, loss_fn = workload
    device = the_device(model, args, kwargs).type
    cost_model = Roofline(device_spec(DEVICE)) if device == "meta" else default_cost_model(device)
    return Planner(cost_model=cost_model, loss_fn=loss_fn).stages(model, model.forward, args, kwargs)


def problem(name: str) -> Problem:
    """The rematerialization problem of a workload of the zoo."""
    return stages(build(name)).problem


def report(name: str, directory: Path | None) -> str:
    """One line on a workload's problem: its size, and what making it took; pickles the problem into a directory."""
    started = time.perf_counter()
    workload = build(name)
    built = time.perf_counter()
    made = stages(workload)
    staged = time.perf_counter()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.pkl").write_bytes(pickle.dumps(made.problem))
    nodes = len(made.lowering.joint.graph_module.graph.nodes)
    recomputable = sum(op.recomputable for op in made.problem.ops)
    resident_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux
    return (
        f"{name}: {nodes} nodes, {len(made.problem.ops)} ops, {recomputable} recomputable, "
        f"{len(made.problem.values)} values, keep-everything peak {made.keep_everything_bytes} bytes, "
        f"step {made.problem.runtime_s:.4g} s; build {built - started:.1f} s, capture {made.capture_seconds:.1f} s, "
        f"lower and cost {staged - built - made.capture_seconds:.1f} s, process peak {resident_bytes / 1e6:.0f} MB"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ZOO)}; default: all")
    parser.add_argument("--pickle", type=Path, metavar="DIRECTORY", help="write the problems there")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name in arguments.names or list(ZOO):
        print(report(name, arguments.pickle), flush=True)


if __name__ == "__main__":
    main()
