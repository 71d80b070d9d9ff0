"""Plans that remake values while the forward still runs, and remake them more than once: emitted, run and measured."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from placemat.baselines import save_all
from placemat.emit import emit
from placemat.floor import minimum_budget
from placemat.graph.capture import capture
from placemat.graph.lower import Lowering, lower
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule, canonical
from placemat.simulate import simulate
from placemat.solve import solve
from tests import models
from tests.steps import STEPS, make_step, run_step
from tests.test_emit import Walk, problem_of, run_with


class WideMiddle(nn.Module):
    """Skips over a stretch whose wide tensors backward does not need, so that the forward itself is short of memory.

    The skips are cheap to remake; one is random, one comes out of a BatchNorm that moves its statistics.
    """

    def __init__(self, width: int = 32, copies: int = 6) -> None:
        super().__init__()
        self.copies = copies
        self.stem = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(3 * width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        dropped = self.dropout(torch.tanh(x))
        normed = torch.relu(self.norm(x))
        wide = self.middle(x).repeat(1, self.copies) + 1.0
        narrow = wide.view(x.shape[0], self.copies, -1).mean(1)
        return self.head(torch.cat([dropped, normed, narrow * x], 1)).pow(2).sum()


class Returning(nn.Module):
    """Returns one of the results of a LayerNorm, of a dropout and of a pooling; backward reads the others, too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width // 2, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = self.norm(self.stem(x))
        dropped = nn.functional.dropout(normed, 0.2)
        pooled = nn.functional.max_pool1d(dropped.tanh(), 2)
        return normed, dropped, pooled, self.head(pooled).exp()


def total(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A loss of whatever a model returns."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


@dataclass(frozen=True)
class Step:
    """A model, its arguments, and its captured step as a problem without workspaces."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    lowering: Lowering
    problem: Problem


def make(name: str) -> Step:
    torch.manual_seed(0)
    model: nn.Module
    args: tuple[torch.Tensor, ...]
    if name == "wide middle":
        model, args = WideMiddle(), (torch.randn(24, 32),)
    elif name == "returning":
        model, args = Returning(), (torch.randn(6, 5, 16),)
    elif name == "unet":
        model, args, *_ = models.unet(levels=2, width=4, size=8, batch=2, transposed=False)
    else:
        model, args = make_step(name)
    lowering = lower(capture(model.forward, args, {}), device="cpu", static_bytes={})
    return Step(model, args, lowering, problem_of(lowering))


def even_cuts(problem: Problem, parts: int) -> list[int]:
    """Cuts that make `parts` even phases of the forward and as many of the backward."""
    border, backward = problem.border, problem.num_steps - problem.border
    return [border * i // parts for i in range(1, parts)] + [border + backward * i // parts for i in range(parts)]


def recompute_anywhere(problem: Problem, seed: int, chance: float = 0.2) -> Schedule:
    """Recompute random ops at random places of the forward and the backward, many of them several times."""
    generator = random.Random(seed)
    computes: list[int] = []
    assert problem.border is not None
    for step in range(problem.num_steps):
        for op in range(min(step, problem.border)):
            if problem.ops[op].recomputable and generator.random() < chance:
                computes.append(op)
        computes.append(step)
    return canonical(problem, computes)


def num_recomputed_in_forward(problem: Problem, schedule: Schedule) -> int:
    return schedule.computes.index(problem.border) - problem.border


class Scheduled(nn.Module):
    """The same parameters and buffers, run as a schedule says."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        super().__init__()
        self.model, self.run = model, run_with(model, lambda _: schedule)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.run(*args)


def walked_peak_bytes(lowering: Lowering, schedule: Schedule) -> int:
    """Peak of the emitted graphs by the independent walk of `tests.test_emit`."""
    step = emit(lowering, schedule)
    outputs = list(step.forward.graph.output_node().args[0])
    returned, saved = outputs[: -step.num_saved], outputs[-step.num_saved :]
    held = [n for i, n in enumerate(returned) if i not in lowering.joint.mutated_inputs]
    walk = Walk(lowering)
    walk.forward(step.forward.graph)
    walk.backward(step.backward.graph, saved, held)
    return walk.peak_bytes


def expected_peak_bytes(step: Step, schedule: Schedule) -> int:
    """The referee's peak, less the new BatchNorm statistics that it counts where a replay in backward makes none."""
    ops, values = step.lowering.graph.ops, step.lowering.graph.values
    computed: set[int] = set()
    peak_bytes = 0
    for i, num_bytes in enumerate(simulate(step.problem, schedule).timeline):
        run = schedule.steps[i]
        if isinstance(run, Compute):
            if run.op in computed and step.problem.border in computed:
                num_bytes -= sum(values[v].bytes for v in ops[run.op].outputs if values[v].role == "mutation")
            computed.add(run.op)
        peak_bytes = max(peak_bytes, num_bytes)
    return peak_bytes


def check_bits_and_bytes(step: Step, schedule: Schedule) -> None:
    """Eager's loss, gradients, buffers and random state; the referee's peak."""
    expected = run_step(step.model, step.args, loss_fn=total)
    assert run_step(Scheduled(step.model, schedule), step.args, loss_fn=total).same_as(expected)
    assert walked_peak_bytes(step.lowering, schedule) == expected_peak_bytes(step, schedule)


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_solved_plans_with_cuts_in_the_forward_run_as_planned(parts: int, share: float) -> None:
    step = make("wide middle")
    problem, cuts = step.problem, even_cuts(step.problem, parts)
    floor_bytes = minimum_budget(problem, phases=cuts).minimum_bytes
    assert floor_bytes < minimum_budget(problem, phases=2).minimum_bytes
    budget_bytes = floor_bytes + int(share * (simulate(problem, save_all(problem)).peak_bytes - floor_bytes))
    schedule = solve(problem, budget_bytes, phases=cuts).schedule
    assert num_recomputed_in_forward(problem, schedule) > 0
    assert max(Counter(schedule.recomputes).values()) > 1
    check_bits_and_bytes(step, schedule)


@pytest.mark.parametrize(("name", "parts"), [("unet", 2), ("convolutions", 3), ("branches", 6)])
def test_plans_of_the_least_peak_run_as_planned(name: str, parts: int) -> None:
    step = make(name)
    floor = minimum_budget(step.problem, phases=even_cuts(step.problem, parts))
    assert max(Counter(floor.schedule.recomputes).values()) > 1
    check_bits_and_bytes(step, floor.schedule)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", [*STEPS, "wide middle", "returning", "unet"])
def test_recomputing_anywhere_runs_as_scheduled(name: str, seed: int) -> None:
    step = make(name)
    schedule = recompute_anywhere(step.problem, seed)
    assert num_recomputed_in_forward(step.problem, schedule) > 0
    check_bits_and_bytes(step, schedule)
