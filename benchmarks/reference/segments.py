"""Forward as a chain: what is live between any two of its ops, and where it is cut into segments.

"Forward" is what comes before `replay.default_cut`. Any order of a graph is a chain of states, the sets of values that
later forward ops still read. A graph that is no chain is cut where that state is small: at its articulation points the
state is one value, as behind a residual block; under skip connections it is several.
"""

from __future__ import annotations

from placemat.problem import Problem
from placemat.replay import default_cut


def crossing_values(problem: Problem) -> list[tuple[int, ...]]:
    """Per position p from 0 to the cut: values made before step p that a forward op from p on reads, ascending."""
    cut = default_cut(problem)
    last_read: dict[int, int] = {}
    for step, op in enumerate(problem.ops[:cut]):
        last_read.update(dict.fromkeys(op.inputs, step))
    crossing: list[list[int]] = [[] for _ in range(cut + 1)]
    for v in sorted(last_read):
        for p in range(problem.values[v].producer + 1, last_read[v] + 1):
            crossing[p].append(v)
    return [tuple(values) for values in crossing]


def articulation_points(problem: Problem) -> list[int]:
    """Positions inside forward, ascending, that one value alone crosses which a recomputation could bring back.

    Values that are there in any case (pinned ones, those of ops that may not run again) do not join two parts.
    """
    return [p for p, values in enumerate(crossing_values(problem)) if len(_recomputable(problem, values)) == 1]


def borders_of_blocks(problem: Problem, max_segments: int) -> list[int]:
    """Positions inside forward, ascending: the articulation points, and where fewer bytes cross than around it (the
    first position where several in a row have equally few). Thinned out evenly to at most `max_segments` segments."""
    sizes = [sum(problem.values[v].bytes for v in values) for values in crossing_values(problem)]
    borders = set(articulation_points(problem))
    falling_from = None  # first position of the plateau at the foot of a descent
    for p in range(1, len(sizes) - 1):
        if sizes[p] < sizes[p - 1]:
            falling_from = p
        if falling_from is not None and sizes[p + 1] > sizes[p]:
            borders.add(falling_from)
            falling_from = None
    stride = -(-(len(borders) + 1) // max_segments)
    return sorted(borders)[stride - 1 :: stride]


def _recomputable(problem: Problem, values: tuple[int, ...]) -> list[int]:
    return [v for v in values if problem.ops[problem.values[v].producer].recomputable and not problem.values[v].pinned]
