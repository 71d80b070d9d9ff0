"""What planning costs as work grows: seconds of every stage and memory of the process, by layers, sequence and batch.

    python -m benchmarks.growth --json growth.json --plot growth.png      # from the root of the repository
    python -m benchmarks.growth layers --profile PROFILES                 # and where the time goes, by cProfile

Every point is one GPT-2 (`benchmarks.zoo.gpt2`) on the meta device in a process of its own, planned for half of the way
from the lowest peak that is found at once to keep-everything.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth_page import plot, table
from benchmarks.isolated import run_isolated
from benchmarks.problems import DEVICE
from benchmarks.zoo import gpt2
from placemat.cost_models import Roofline, device_spec
from placemat.floor import minimum_budget
from placemat.pipeline import Planner
from placemat.solve import solve

AXES: Mapping[str, Sequence[int]] = {
    "layers": (6, 12, 24, 48, 96),
    "sequence": (256, 512, 1024, 2048, 4096),
    "batch": (1, 4, 16, 64),
}
POINT_LIMIT_S = 600.0
PROFILE_LINES = 25


@dataclass(frozen=True)
class Point:
    """One plan.

    Attributes:
        build_s: of the module, on the meta device.
        lowering_s: values, storages, what may run again.
        costing_s: op costs, and the problem in integers.
        floor_s: the lowest peak that is found at once, for the budget.
        solving_s: the search for a plan, to its gap of 1 %.
        total_s: from the built module to the plan; `cpu_s` are the seconds of all threads in that time.
        memory_bytes: highest resident memory of the process until then, torch included.
    """

    axis: str
    value: int
    num_nodes: int
    num_ops: int
    num_values: int
    build_s: float
    capture_s: float
    lowering_s: float
    costing_s: float
    floor_s: float
    solving_s: float
    total_s: float
    cpu_s: float
    memory_bytes: int
    gap: float
    recompute_share: float


class Stopwatch:
    """Seconds between the lines that a planner says: the time of each line is kept."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float]] = []

    def __call__(self, line: str) -> None:
        self.lines.append((line, time.perf_counter()))

    def at(self, start: str) -> float:
        """When the first line came that starts so."""
        return next(moment for line, moment in self.lines if line.startswith(start))


def measure(axis: str, value: int, profile: Path | None = None) -> Point:
    """Plan one GPT-2, in this process."""
    torch.set_num_threads(1)
    with cProfile.Profile() as profiler:
        if profile is None:
            profiler.disable()
        point = _measure(axis, value)
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)
        with (profile / f"{axis}_{value}.txt").open("w") as stream:
            stats = pstats.Stats(profiler, stream=stream)
            stats.sort_stats("tottime").print_stats(PROFILE_LINES)
            stats.sort_stats("cumulative").print_stats(3 * PROFILE_LINES)
    return point


def _measure(axis: str, value: int) -> Point:
    started = time.perf_counter()
    with torch.device("meta"):
        workload = gpt2(**{axis: value})
    built, cpu_built = time.perf_counter(), time.process_time()
    watch = Stopwatch()
    planner = Planner(cost_model=Roofline(device_spec(DEVICE)), loss_fn=workload.loss_fn, progress=watch)
    stages = planner.stages(workload.model, workload.model.forward, workload.args, workload.kwargs)
    staged = time.perf_counter()
    problem = stages.problem
    floor = minimum_budget(problem, phases=2, time_limit_s=0.0)
    floored = time.perf_counter()
    budget_bytes = (floor.minimum_bytes + stages.keep_everything_bytes) // 2
    result = solve(problem, budget_bytes, warm_start=floor.schedule)
    solved = time.perf_counter()
    costing = watch.at("costing")
    return Point(
        axis=axis,
        value=value,
        num_nodes=len(stages.lowering.joint.graph_module.graph.nodes),
        num_ops=problem.num_steps,
        num_values=len(problem.values),
        build_s=built - started,
        capture_s=stages.capture_seconds,
        lowering_s=costing - watch.at("capturing the model") - stages.capture_seconds,
        costing_s=staged - costing,
        floor_s=floored - staged,
        solving_s=solved - floored,
        total_s=solved - built,
        cpu_s=time.process_time() - cpu_built,
        memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,  # kilobytes on Linux
        gap=result.gap,
        recompute_share=result.objective_seconds / problem.runtime_s,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=f"of {', '.join(AXES)}; default: all")
    parser.add_argument("--values", type=int, nargs="+", help="instead of the usual ones, for one axis")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points there, after each one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument("--profile", type=Path, metavar="DIRECTORY", help="profile; times are longer then")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"torch": torch.__version__, "points": [], "failures": []}
    for axis in arguments.axes or list(AXES):
        for value in arguments.values or AXES[axis]:
            outcome = run_isolated(measure, axis, value, arguments.profile, time_limit_s=POINT_LIMIT_S)
            if outcome.value is None:
                result["failures"].append(f"{axis} {value}: {outcome.failure}")
                print(result["failures"][-1], flush=True)
            else:
                result["points"].append(asdict(outcome.value))
                print(table(result["points"][-1:]).splitlines()[-1], flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot is not None:
        plot(result).savefig(arguments.plot, dpi=120)


if __name__ == "__main__":
    main()
