"""Identical ops: those of repeated blocks, found by structure, so that a model may count instead of tell them apart.

Two ops belong together if they cost the same, produce values of the same sizes, and so do the ops that they read from
and the ops that read them, up to a few edges away. Names play no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from placemat.problem import Problem, ProblemOp

EDGES = 3  # how far two neighbourhoods have to agree
LEAST_MEMBERS = 3
DIGITS = 9  # seconds that agree to so many decimal places, of the step's seconds, are equal


def identical_ops(problem: Problem) -> list[tuple[int, ...]]:
    """Groups of at least LEAST_MEMBERS recomputable ops, each ascending, in order of their first op."""
    labels = _labels(problem)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for op, label in enumerate(labels):
        if problem.ops[op].recomputable:
            groups[label].append(op)
    return [tuple(group) for group in groups.values() if len(group) >= LEAST_MEMBERS]


def _labels(problem: Problem) -> list[int]:
    """Weisfeiler and Leman's colour refinement over the edges from op to op, EDGES rounds."""
    readers: list[list[int]] = [[] for _ in problem.ops]
    sources: list[list[int]] = [[problem.values[v].producer for v in op.inputs] for op in problem.ops]
    for step, ops in enumerate(sources):
        for source in ops:
            readers[source].append(step)
    labels = _numbered([_own(problem, op) for op in problem.ops])
    for _ in range(EDGES):
        labels = _numbered(
            [
                (labels[o], *sorted(labels[s] for s in sources[o]), -1, *sorted(labels[r] for r in readers[o]))
                for o in range(problem.num_steps)
            ]
        )
    return labels


def _own(problem: Problem, op: ProblemOp) -> Hashable:
    outputs = tuple((problem.values[v].bytes, problem.values[v].pinned) for v in op.outputs)
    share = round(op.recompute_s / (problem.runtime_s or 1.0), DIGITS)
    return share, op.workspace_bytes, op.recompute_workspace_bytes, op.recomputable, outputs


def _numbered(signatures: list[Hashable]) -> list[int]:
    """Equal signatures get equal numbers, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(signature, len(numbers)) for signature in signatures]
