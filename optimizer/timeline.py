"""Timeline: what is in memory while each op of a schedule runs, by category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from placemat.labels import Labels
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule

CATEGORIES = ("gradients", "outputs", "mutations", "activations", "temporaries")  # that rise and fall in a step


@dataclass(frozen=True)
class Timeline:
    """One entry per run of an op.

    Attributes:
        ops: which op runs.
        are_first: whether it runs for the first time; otherwise it is a recomputation.
        starts_s: predicted seconds from the beginning of the step, and one entry more for its end.
        bytes_by_category: category -> bytes while the op runs; they add up to what `simulate` says of the run.
    """

    ops: tuple[int, ...]
    are_first: tuple[bool, ...]
    starts_s: tuple[float, ...]
    bytes_by_category: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.bytes_by_category.values(), strict=True)))


def timeline(problem: Problem, labels: Labels, schedule: Schedule, static_bytes: Mapping[str, int]) -> Timeline:
    """Replay a legal schedule; `static_bytes` are by category and add up to `problem.static_bytes`.

    As in `Plan.breakdown`, `temporaries` are the outputs and the workspace of the op that runs, and what backward
    passes from op to op.
    """
    assert sum(static_bytes.values()) == problem.static_bytes
    held = dict.fromkeys(CATEGORIES, 0)
    rows: list[dict[str, int]] = []
    ops, are_first = [], []
    resident: set[int] = set()
    started = 0
    for step in schedule.steps:
        if not isinstance(step, Compute):
            resident.discard(step.value)
            held[labels.values[step.value].category] -= problem.values[step.value].bytes
            continue
        op = problem.ops[step.op]
        are_first.append(step.op == started)
        started += are_first[-1]
        ops.append(step.op)
        workspace_bytes = op.workspace_bytes if are_first[-1] else op.recompute_workspace_bytes
        output_bytes = sum(problem.values[v].bytes for v in op.outputs)
        rows.append({**held, "temporaries": held["temporaries"] + workspace_bytes + output_bytes})
        for v in op.outputs:
            if v not in resident:
                resident.add(v)
                held[labels.values[v].category] += problem.values[v].bytes
    moving = {name: tuple(row[name] for row in rows) for name in CATEGORIES}
    fixed = {name: (num_bytes,) * len(rows) for name, num_bytes in static_bytes.items()}
    runs = zip((problem.ops[index] for index in ops), are_first, strict=True)
    seconds = accumulate((op.first_s if first else op.recompute_s for op, first in runs), initial=0.0)
    return Timeline(tuple(ops), tuple(are_first), tuple(seconds), {**fixed, **moving})
