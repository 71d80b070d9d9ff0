"""How near to optimal plans are, and how soon: instances with known optima, real networks at five budgets, depth.

    python -m benchmarks.solver instances DIRECTORY      # node-link JSON of published instances, see `Known`
    python -m benchmarks.solver networks [NAME ...]      # the zoo, from the floor to keep-everything
    python -m benchmarks.solver depth                    # GPT-2 of 12, 48, 96 layers; Llama-7B, capture included

TDI is recompute seconds over the step's seconds, in percent. The bound holds for the family that is named beside it.
Seconds are wall clock, on as many cores as there are: the solver uses two. Plans are simulated, never taken on trust.
`--problems DIRECTORY` reads problems that `python -m benchmarks.problems NAME --pickle DIRECTORY` wrote.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import torch

from benchmarks import problems
from placemat.baselines import save_all
from placemat.floor import minimum_budget
from placemat.graph.errors import PlacematError
from placemat.phases import PhasesArgument
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import simulate
from placemat.solve import SolveResult, solve

NETWORKS = ("gpt2_12", "resnet50", "unet", "densenet121", "inception", "t5", "vit_b")
FRACTIONS = (
    0.25,
    0.5,
    0.75,
    1.0,
)  # of the way from the floor to the keep-everything peak; the floor itself comes first
FLOOR_TIME_LIMIT_S, PLAN_TIME_LIMIT_S = 60.0, 15.0


@dataclass(frozen=True)
class Known:
    """A published instance at a share of its peak, and the TDI that is known for it.

    `phases` is the family to search: 2 where the optimum is known to be among those plans or only that is listed; None
    is what `solve` does by itself.
    """

    instance: str
    share: float
    tdi_percent: float
    phases: PhasesArgument
    time_limit_s: float = 5.0


# VGG, U-Net and MobileNet are training graphs of Checkmate (Jain et al., MLSys 2020); layered_n100 is a random DAG of
# MOCCASIN (Bartan et al., ICML 2023).
KNOWN = (
    Known("vgg16_b256", 0.9, 1.968, 2),
    Known("vgg19_b256", 0.8, 4.851, 2),
    Known("unet_b32", 0.8, 1.984, 2),
    Known("unet_b32", 0.5, 6.967, 2),
    Known("unet_b32", 0.45, 9.321, 2),
    Known("unet_b32", 0.42, 11.256, 8, 60.0),
    Known("mobilenet_b512", 0.8, 0.370, 2),
    Known("mobilenet_b512", 0.5, 1.635, 2),
    Known("mobilenet_b512", 0.35, 3.029, 2),
    Known("mobilenet_b512", 0.28, 4.46, 12, 60.0),
    Known("layered_n100", 0.9, 0.789, None, 60.0),
    Known("layered_n100", 0.8, 2.296, None, 60.0),
)
CONFIRMED_STEPS = 100  # instances of at most so many ops are solved with every step its own phase, too
CONFIRM_TIME_LIMIT_S = 60.0


def read_instance(path: Path) -> Problem:
    """A node-link graph: Checkmate's (`cost_ram`, `cost_cpu`, `backward`) or MOCCASIN's (`out_cost`, `duration`)."""
    data = json.loads(path.read_text())
    g: nx.DiGraph = nx.DiGraph()
    if "order" in data["graph"]:
        for node in data["nodes"]:
            g.add_node(node["name"], bytes=node["out_cost"], seconds=node["duration"])
        g.add_edges_from((link["0"], link["1"]) for link in data["links"])
        return Problem.from_networkx(g, order=data["graph"]["order"])
    for node in data["nodes"]:
        attributes = {"bytes": node["cost_ram"], "seconds": node["cost_cpu"], "recomputable": not node["backward"]}
        g.add_node(node["id"], **attributes)
    g.add_edges_from((link["source"], link["target"]) for link in data["links"])
    order = list(nx.lexicographical_topological_sort(g, key=lambda i: (not g.nodes[i]["recomputable"], i)))
    return Problem.from_networkx(g, order=order, border=sum(g.nodes[i]["recomputable"] for i in order))


def instances(directory: Path) -> Iterator[str]:
    """One line per known optimum: what is found, how far it is proven, and what every-step-its-own-phase says."""
    yield f"{'instance':<15}{'budget':>7}{'known':>9}{'TDI':>9}{'bound':>9}{'seconds':>9}  family; P = T"
    for known in KNOWN:
        problem = read_instance(directory / f"{known.instance}.json")
        budget_bytes = int(known.share * simulate(problem, save_all(problem)).peak_bytes)
        result = solve(problem, budget_bytes, phases=known.phases, gap=1e-4, time_limit_s=known.time_limit_s)
        confirmed = ""
        if problem.num_steps <= CONFIRMED_STEPS:
            limit_s = CONFIRM_TIME_LIMIT_S
            every = solve(
                problem, budget_bytes, phases="every", gap=1e-4, time_limit_s=limit_s, warm_start=result.schedule
            )
            confirmed = f"; {_tdi(problem, every)} (bound {_bound(problem, every)}) in {every.solve_seconds:.1f} s"
        yield (
            f"{known.instance:<15}{known.share:>7}{known.tdi_percent:>9.3f}{_tdi(problem, result):>9}"
            f"{_bound(problem, result):>9}{result.solve_seconds:>9.1f}  {result.family}{confirmed}"
        )


def networks(names: list[str], directory: Path | None) -> Iterator[str]:
    """Five budgets for each network."""
    yield _HEAD
    for name in names:
        problem = _problem(name, directory)
        floor = minimum_budget(problem, phases=2, time_limit_s=0.2 * FLOOR_TIME_LIMIT_S)
        high = simulate(problem, save_all(problem)).peak_bytes
        room = high - floor.minimum_bytes
        yield _line(name, problem, floor.minimum_bytes, "floor", FLOOR_TIME_LIMIT_S, floor.schedule)
        for fraction in FRACTIONS:
            budget_bytes = floor.minimum_bytes + int(fraction * room)
            yield _line(name, problem, budget_bytes, str(fraction), PLAN_TIME_LIMIT_S, floor.schedule)


def depth(directory: Path | None) -> Iterator[str]:
    """GPT-2 by depth, at half of the way, and Llama-7B from capture to plan."""
    yield _HEAD
    for name, time_limit_s in (("gpt2_12", 15.0), ("gpt2_48", 60.0), ("gpt2_96", 180.0)):
        yield _half_way(name, _problem(name, directory), time_limit_s)
    started = time.monotonic()
    problem = problems.problem("llama7b")
    capture_s = time.monotonic() - started
    yield _half_way("llama7b", problem, 180.0 - capture_s - 5.0)
    resident_gb = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # kilobytes on Linux
    total_s = time.monotonic() - started
    yield f"llama7b: capture to problem {capture_s:.0f} s, to plan {total_s:.0f} s; process {resident_gb:.1f} GB"


def _half_way(name: str, problem: Problem, time_limit_s: float) -> str:
    """At half of the way from the lowest peak that is found without a solver."""
    floor = minimum_budget(problem, phases=2, time_limit_s=0.0)
    high = simulate(problem, save_all(problem)).peak_bytes
    budget_bytes = (floor.minimum_bytes + high) // 2
    return _line(name, problem, budget_bytes, "0.5", time_limit_s, floor.schedule)


_HEAD = (
    f"{'network':<12}{'ops':>6}{'budget':>7}{'GB':>9}{'TDI':>9}{'bound':>9}{'gap':>8}{'first':>7}{'seconds':>9}  family"
)


def _line(name: str, problem: Problem, budget_bytes: int, budget: str, time_limit_s: float, start: Schedule) -> str:
    """Solve and tell; `first` is when the first plan was there."""
    started = time.monotonic()
    first: list[float] = []

    def progress(line: str) -> None:
        if line.startswith("a plan of") and not first:
            first.append(time.monotonic() - started)

    head = f"{name:<12}{problem.num_steps:>6}{budget:>7}{budget_bytes / 1e9:>9.3f}"
    try:
        # What the user gets: the floor's schedule is known by the time that a budget is solved.
        result = solve(problem, budget_bytes, phases=2, time_limit_s=time_limit_s, warm_start=start, progress=progress)
    except PlacematError as error:
        return f"{head}  {type(error).__name__}: {error}"
    return (
        f"{head}{_tdi(problem, result):>9}{_bound(problem, result):>9}{100 * result.gap:>7.2f}%"
        f"{first[0]:>7.1f}{result.solve_seconds:>9.1f}  {result.family}"
    )


def _problem(name: str, directory: Path | None) -> Problem:
    if directory is None:
        return problems.problem(name)
    problem = pickle.loads((directory / f"{name}.pkl").read_bytes())
    assert isinstance(problem, Problem)
    return problem


def _tdi(problem: Problem, result: SolveResult) -> str:
    return f"{100 * result.objective_seconds / problem.runtime_s:.3f}"


def _bound(problem: Problem, result: SolveResult) -> str:
    return f"{100 * result.lower_bound_seconds / problem.runtime_s:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("instances", "networks", "depth"))
    parser.add_argument("names", nargs="*", help="a directory of instances, or names of the zoo")
    parser.add_argument("--problems", type=Path, default=None, help="directory of pickled problems")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "instances":
        lines = instances(Path(arguments.names[0]))
    elif arguments.what == "networks":
        lines = networks(arguments.names or list(NETWORKS), arguments.problems)
    else:
        lines = depth(arguments.problems)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
