"""Graphs and budgets of the solver race: random layered DAGs, and training steps of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.layered import layered
from benchmarks.problems import stages
from benchmarks.zoo import build
from placemat.baselines import save_all
from placemat.floor import minimum_budget
from placemat.graph.capture import capture
from placemat.problem import Problem
from placemat.simulate import simulate
from tests.min_cut import saved_names, saved_values

LAYERED_NODES, LAYERED_SEED = (100, 250, 500, 1000), 0
NETWORKS = ("transformer6", "unet", "resnet50", "vit_b", "gpt2_12", "densenet121")
SHARES_OF_PEAK = (0.9, 0.8)  # layered DAGs, as published for them
SHARES_OF_ROOM = (0.5, 0.25)  # networks: of the way from the lowest peak that is found at once to keep-everything
MIN_CUT_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


@dataclass(frozen=True)
class Graph:
    """A problem, and for a network the values that PyTorch's min-cut partitioner saves at `MIN_CUT_BUDGETS`."""

    name: str
    problem: Problem
    saved: tuple[frozenset[int], ...] = ()

    def budgets(self) -> Iterator[tuple[str, int]]:
        """The share in words, and bytes."""
        high = simulate(self.problem, save_all(self.problem)).peak_bytes
        if self.problem.border is None:
            yield from ((f"{share:g} of the peak", int(share * high)) for share in SHARES_OF_PEAK)
            return
        low = minimum_budget(self.problem, phases=2, time_limit_s=0.0).minimum_bytes
        yield from ((f"{share:g} of the way", low + int(share * (high - low))) for share in SHARES_OF_ROOM)


def network(name: str) -> Graph:
    """A workload of the zoo."""
    workload = build(name)
    joint = capture(workload.model.forward, workload.args, workload.kwargs)  # planning edits the one that it captures
    made = stages(workload)
    saved = tuple(frozenset(saved_values(made.lowering, saved_names(joint, budget))) for budget in MIN_CUT_BUDGETS)
    return Graph(name, made.problem, saved)


def random_dag(num_nodes: int) -> Graph:
    """A layered DAG, always the same one."""
    return Graph(f"layered_{num_nodes}", layered(num_nodes, LAYERED_SEED))


GRAPHS: Mapping[str, Callable[[], Graph]] = {
    **{f"layered_{n}": partial(random_dag, n) for n in LAYERED_NODES},
    **{name: partial(network, name) for name in NETWORKS},
}


def make(name: str) -> Graph:
    """The graph of that name."""
    torch.set_num_threads(1)
    return GRAPHS[name]()
