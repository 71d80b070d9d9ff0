"""Baselines: what people do by hand, as schedules that the referee can price like any other.

Without a border "forward" is the first half of the step.
"""

from __future__ import annotations

import math

from placemat.problem import Problem
from placemat.replay import default_cut, may_be_dropped, replay
from placemat.schedule import Schedule


def save_all(problem: Problem) -> Schedule:
    """Recompute nothing but what `Problem.dropped` asks for: every other value lives from its op to its last reader.

    No schedule of the problem has fewer recompute seconds: each dropped value that is read after the border, by a first
    run or to bring such a value back, has to be made again, and here it is made once.
    """
    return replay(problem, range(len(problem.values)), default_cut(problem))


def recompute_all(problem: Problem) -> Schedule:
    """Keep nothing that can be recomputed; in backward each op runs again at most once, just before its first use."""
    return replay(problem, (), default_cut(problem))


def chen_sqrt_n(problem: Problem) -> Schedule:
    """Keep the outputs of every sqrt(n)-th of the n forward ops that may be recomputed.

    Chen et al. 2016 (arXiv 1604.06174, section 4.2): a chain in about sqrt(n) segments of about sqrt(n) ops needs
    O(sqrt(n)) memory for one more forward pass. On a graph that is no chain the ops are taken in execution order
    (the "linearized" variant of Checkmate, Jain et al., MLSys 2020, arXiv 1910.02653, section 5).
    """
    cut = default_cut(problem)
    candidates = [
        step for step, op in enumerate(problem.ops[:cut]) if any(may_be_dropped(problem, v) for v in op.outputs)
    ]
    stride = max(1, round(math.sqrt(len(candidates))))
    kept = {v for step in candidates[stride - 1 :: stride] for v in problem.ops[step].outputs}
    return replay(problem, kept, cut)
