"""Optima by enumeration, for problems of a few ops. Independent of the MILP; the referee prices whole schedules."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from placemat.phases import Phases
from placemat.problem import Problem
from placemat.schedule import canonical
from placemat.simulate import simulate

Optima = dict[int, float]  # peak bytes -> fewest recompute seconds of the schedules with exactly this peak


def cheapest(optima: Optima, budget_bytes: int) -> float:
    """Fewest recompute seconds within the budget, inf if nothing fits."""
    return min((cost for peak, cost in optima.items() if peak <= budget_bytes), default=math.inf)


def num_plans(problem: Problem, phases: Phases) -> int:
    return math.prod(len(choices) for choices in _choices(problem, phases))


def family_optima(problem: Problem, phases: Phases, *, holds_carried: bool = False) -> Optima:
    """All schedules in which each op runs again at most once per later phase, in index order before a step.

    With `holds_carried`, a value that is carried into a phase and read there is not remade in that phase for a later
    reader: the family of the phased retention MILP where ops have one output.
    """
    optima: Optima = {}
    for computes, phase_at in _plans(problem, phases):
        if holds_carried and _remakes_carried(problem, computes, phase_at):
            continue
        result = simulate(problem, canonical(problem, computes))
        optima[result.peak_bytes] = min(result.recompute_seconds, optima.get(result.peak_bytes, math.inf))
    return optima


def _choices(problem: Problem, phases: Phases) -> list[list[tuple[int, int | None]]]:
    """Per op and later phase: not again, or again before one of its steps."""
    return [
        [(o, None), *((o, t) for t in phases.steps(p))]
        for o, op in enumerate(problem.ops)
        if op.recomputable
        for p in range(phases.phase_of[o] + 1, phases.num_phases)
    ]


def _plans(problem: Problem, phases: Phases) -> Iterator[tuple[list[int], list[int]]]:
    """Runs in order, and the phase of each."""
    for chosen in itertools.product(*_choices(problem, phases)):
        computes: list[int] = []
        phase_at: list[int] = []
        for t in range(problem.num_steps):
            computes += [*sorted(o for o, step in chosen if step == t), t]
            phase_at += [phases.phase_of[t]] * (len(computes) - len(phase_at))
        yield computes, phase_at


def _remakes_carried(problem: Problem, computes: list[int], phase_at: list[int]) -> bool:
    reads = []
    for i, o in enumerate(computes):
        reads.append(problem.ops[o].recompute_inputs if o in computes[:i] else problem.ops[o].inputs)
    for i, o in enumerate(computes):
        if o not in computes[:i]:
            continue
        for v in problem.ops[o].outputs:
            previous = max(j for j in range(i) if computes[j] == o)
            following = next((j for j in range(i + 1, len(computes)) if computes[j] == o), len(computes))
            before = any(v in reads[j] and phase_at[j] == phase_at[i] for j in range(previous + 1, i))
            after = any(v in reads[j] for j in range(i + 1, following))
            if before and after and not problem.values[v].pinned:
                return True
    return False


def free_optimum(problem: Problem, budget_bytes: int) -> float:
    """Fewest recompute seconds of any schedule at all within the budget: shortest path over sets of resident values."""
    start = (0, frozenset[int]())
    best = {start: 0.0}
    queue: list[tuple[float, int, tuple[int, frozenset[int]]]] = [(0.0, 0, start)]
    pushed = itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if state[0] == problem.num_steps:
            return cost
        for following, seconds in _moves(problem, state, budget_bytes):
            if cost + seconds < best.get(following, math.inf):
                best[following] = cost + seconds
                heapq.heappush(queue, (cost + seconds, next(pushed), following))
    return math.inf


def _moves(
    problem: Problem, state: tuple[int, frozenset[int]], budget_bytes: int
) -> Iterator[tuple[tuple[int, frozenset[int]], float]]:
    step, resident = state
    held_bytes = problem.static_bytes + sum(problem.values[v].bytes for v in resident)
    for v in resident:
        if not problem.values[v].pinned:
            yield (step, resident - {v}), 0.0
    for o, op in enumerate(problem.ops[: step + 1]):
        is_first = o == step
        if is_first and o == problem.border and not resident.isdisjoint(problem.dropped):
            continue
        reads = op.inputs if is_first else op.recompute_inputs
        workspace = op.workspace_bytes if is_first else op.recompute_workspace_bytes
        own_bytes = workspace + sum(problem.values[v].bytes for v in op.outputs)
        if (is_first or op.recomputable) and resident.issuperset(reads) and held_bytes + own_bytes <= budget_bytes:
            yield (step + is_first, resident.union(op.outputs)), 0.0 if is_first else op.recompute_s
