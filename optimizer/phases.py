"""Phases: where a step is cut, and what may be wanted until when. It fixes the family of schedules that is searched.

Phases 0 = k_0 < ... < k_P = T. In a phase after the one of its first run an op may be recomputed once, before any step
of the phase; recomputations before the same step run in index order. A value that is carried into a phase is held
there as long as anything wants it, not dropped and remade for a later reader. P = 2 cut at the border is "kept, or
recomputed once in backward"; P = T is the stage-wise family of Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from placemat.problem import Problem

# Without a border nothing says where recomputation pays; even phases of a twentieth of the step were found to.
DEFAULT_EVEN_PHASES = 20
# Longer steps have too many columns in wider families to gain anything in a minute.
WIDER_STEPS = 200
EVERY_STEPS = 100
WIDER = (8, 16)

PhasesArgument = int | Sequence[int] | Literal["every"] | None


@dataclass(frozen=True)
class Phases:
    """Cut positions k_0 .. k_P, the phase of every step, and the name of the family in words."""

    cuts: tuple[int, ...]
    phase_of: tuple[int, ...]
    family: str

    @property
    def num_phases(self) -> int:
        return len(self.cuts) - 1

    def steps(self, phase: int) -> range:
        return range(self.cuts[phase], self.cuts[phase + 1])

    def last_step(self, phase: int) -> int:
        return self.cuts[phase + 1] - 1


def make_phases(problem: Problem, phases: PhasesArgument = None) -> Phases:
    """Cut the step into phases.

    Args:
        problem: its `border` is a cut, if it has one.
        phases: None is P = 2 cut at the border, without a border 20 even phases; an int P is P phases: with a border
            a quarter of them before it and the others after it, without one even ones; "every" gives every step its
            own; a list gives the cut positions between 0 and T.

    Raises:
        ValueError: P is not in 1..T, or the cuts are not ascending inside the step.
    """
    num_steps = problem.num_steps
    has_border = problem.border is not None and 0 < problem.border < num_steps
    if phases is None:
        phases = 2 if has_border else min(DEFAULT_EVEN_PHASES, num_steps)
    if isinstance(phases, int):
        return _counted(problem, phases)
    if isinstance(phases, str):
        if phases != "every":
            raise ValueError(f'`phases` must be a number, a list of cuts or "every", got {phases!r}')
        return _at(range(1, num_steps), num_steps, f"P={num_steps}, every step its own phase")
    return _at(phases, num_steps, f"P={len(phases) + 1}, cut at {', '.join(map(str, phases))}")


def ladder(problem: Problem, phases: PhasesArgument = None) -> list[Phases]:
    """The families to search one after the other, each one within the next: the one that `phases` names, or several.

    None begins as `make_phases` does. Steps of at most WIDER_STEPS ops go on with cuts in forward, too, where values
    are then dropped and made again for forward itself, and with more in backward; those of at most EVERY_STEPS end with
    every step its own phase, beyond which there is next to nothing.
    """
    first = make_phases(problem, phases)
    if phases is not None or problem.num_steps > WIDER_STEPS:
        return [first]
    families = [first]
    border = problem.border
    if first.num_phases == 2 and border is not None:
        for count in WIDER[:1] if problem.num_steps <= EVERY_STEPS else WIDER:
            if 2 * count <= min(border, problem.num_steps - border):
                families.append(_counted(problem, count))
    if first.num_phases < problem.num_steps <= EVERY_STEPS:
        families.append(make_phases(problem, "every"))
    return families


def _counted(problem: Problem, count: int) -> Phases:
    num_steps, border = problem.num_steps, problem.border
    if not 1 <= count <= max(num_steps, 1):
        raise ValueError(f"`phases` must be between 1 and the number of steps, {num_steps}; got {count}")
    if count == num_steps:
        return _at(range(1, num_steps), num_steps, f"P={num_steps}, every step its own phase")
    if border is None or not 0 < border < num_steps or count == 1:
        return _at(_even(0, num_steps, count), num_steps, f"P={count}, even phases")
    forward = min(max(1, count // 4, count - (num_steps - border)), border)
    return _around(problem, forward, count - forward)


def _around(problem: Problem, forward: int, backward: int) -> Phases:
    """Even phases before and after the border."""
    border, num_steps = problem.border, problem.num_steps
    assert border is not None
    cuts = [*_even(0, border, forward), border, *_even(border, num_steps, backward)]
    if len(cuts) == 1:
        return _at(cuts, num_steps, "P=2 at the border")
    return _at(cuts, num_steps, f"P={forward + backward}, {forward} before the border")


def _even(start: int, stop: int, count: int) -> list[int]:
    """Inner cuts of `count` even parts."""
    return [start + (stop - start) * i // count for i in range(1, count)]


def _at(cuts: Sequence[int], num_steps: int, family: str) -> Phases:
    bounds = (0, *cuts, num_steps) if num_steps else (0,)
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"cuts must ascend between 0 and {num_steps}, got {list(cuts)}")
    phase_of = tuple(p for p, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b))
    return Phases(bounds, phase_of, family)


@dataclass(frozen=True)
class Wants:
    """Who may want what, and until when.

    Attributes:
        uses: per value, steps whose first run reads it, ascending.
        readers: per value, recomputable ops whose recomputation reads it, ascending.
        last_phase: per value, L(v): last phase in which anything may read it.
        rises: (op, phase) -> steps, ascending, by which a recomputation in that phase may have run.
        value_rises: (unpinned value, phase) -> steps, ascending, by which a copy of this value may be taken.
    """

    uses: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    last_phase: tuple[int, ...]
    rises: dict[tuple[int, int], tuple[int, ...]]
    value_rises: dict[tuple[int, int], tuple[int, ...]]


def find_wants(problem: Problem, phases: Phases, grid: Collection[int]) -> Wants:
    """The last wants of a family, in reverse order.

    Args:
        problem: ops and values.
        phases: where the step is cut.
        grid: steps at which Y and y may rise; a rise in between counts at the next grid step.
    """
    uses: list[list[int]] = [[] for _ in problem.values]
    readers: list[list[int]] = [[] for _ in problem.values]
    for step, op in enumerate(problem.ops):
        for v in op.inputs:
            uses[v].append(step)
        if op.recomputable:
            for v in op.recompute_inputs:
                readers[v].append(step)
    last_phase, op_last_phase = _last_phases(problem, phases, uses, readers)
    rises, value_rises = _rises(problem, phases, uses, op_last_phase, last_phase, grid)
    return Wants(tuple(map(tuple, uses)), tuple(map(tuple, readers)), last_phase, rises, value_rises)


def _last_phases(
    problem: Problem, phases: Phases, uses: list[list[int]], readers: list[list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """L(v) = max of p(u) over first-run readers u and L(w) over recomputable readers w; L(o) = max L of its outputs."""
    last = [0] * len(problem.values)
    op_last = list(phases.phase_of)
    for step in range(problem.num_steps - 1, -1, -1):
        op = problem.ops[step]
        for v in op.outputs:
            last[v] = max([phases.phase_of[step], *(phases.phase_of[u] for u in uses[v])])
            last[v] = max([last[v], *(op_last[w] for w in readers[v])])
            if op.recomputable and not problem.values[v].pinned:
                op_last[step] = max(op_last[step], last[v])
    return tuple(last), tuple(op_last)


Steps = dict[tuple[int, int], tuple[int, ...]]


def _rises(
    problem: Problem,
    phases: Phases,
    uses: list[list[int]],
    op_last: tuple[int, ...],
    last: tuple[int, ...],
    grid: Collection[int],
) -> tuple[Steps, Steps]:
    """Steps of the grid at which Y and y may rise, and the last step at which they may.

    A copy that comes after the first first-run use in its phase is one too many: for that use the value was carried
    in, or an earlier copy was there. So the last rise is that use; without one, the last rise of any reader, or the
    end of the phase if the copy may be carried on.
    """
    first_use: dict[tuple[int, int], int] = {}
    for v, steps in enumerate(uses):
        for u in reversed(steps):
            first_use[v, phases.phase_of[u]] = u
    latest: dict[tuple[int, int], int] = {}  # over the readers that recompute in that phase
    rises: Steps = {}
    value_rises: Steps = {}
    ordered = sorted(grid)
    for step in range(problem.num_steps - 1, -1, -1):
        op = problem.ops[step]
        for p in range(phases.phase_of[step] + 1, op_last[step] + 1):
            ends = {}
            for v in op.outputs:
                if not problem.values[v].pinned:
                    end = phases.last_step(p) if p < last[v] else latest.get((v, p), -1)
                    ends[v] = first_use.get((v, p), end)
            end = max(ends.values())
            if end < 0:
                continue
            rises[step, p] = _on_grid(ordered, phases.cuts[p], end)
            for v, value_end in ends.items():
                if value_end >= 0:
                    value_rises[v, p] = _on_grid(ordered, phases.cuts[p], value_end)
            for v in op.recompute_inputs:
                latest[v, p] = max(latest.get((v, p), -1), end)
    return rises, value_rises


def _on_grid(ordered: list[int], start: int, end: int) -> tuple[int, ...]:
    """Grid steps from `start` to before `end`, then `end`."""
    return (*ordered[bisect_left(ordered, start) : bisect_left(ordered, end)], end)
