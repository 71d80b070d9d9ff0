"""Exchange: trades of one kept value for another, and the seconds of a kept set that they are judged by."""

from __future__ import annotations

import numpy as np
import pytest

from placemat.exchange import exchanged
from placemat.greedy import KeptSets
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.replay import replay
from placemat.simulate import simulate
from tests.instances import random_problem


def twins(num_blocks: int) -> Problem:
    """Blocks of a dear op and a cheap one that reads it, results of the same size, both read in backward."""
    ops: list[ProblemOp] = []
    values: list[ProblemValue] = []
    for block in range(num_blocks):
        dear_and_cheap: list[tuple[str, float, tuple[int, ...]]] = [("dear", 8.0, ()), ("cheap", 1.0, (2 * block,))]
        for kind, seconds, reads in dear_and_cheap:
            values.append(ProblemValue(f"{kind}{block}", 10, len(ops)))
            ops.append(ProblemOp(f"{kind}{block}", reads, (len(ops),), seconds))
    border = len(ops)
    for v in reversed(range(border)):
        ops.append(ProblemOp(f"back{v}", (v,), (), 1.0, recomputable=False))
    return Problem(tuple(ops), tuple(values), border)


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_the_dear_one_of_two_is_kept_in_every_block(num_blocks: int) -> None:
    problem = twins(num_blocks)
    kept = frozenset(range(1, 2 * num_blocks, 2))
    budget_bytes = simulate(problem, replay(problem, kept, 2 * num_blocks)).peak_bytes
    schedule = exchanged(problem, kept, budget_bytes, below_s=np.inf)
    assert schedule is not None
    assert simulate(problem, schedule).recompute_seconds == num_blocks
    assert simulate(problem, schedule).peak_bytes <= budget_bytes


def test_nothing_that_does_not_save() -> None:
    problem = twins(2)
    assert exchanged(problem, frozenset((0, 2)), 10**6, below_s=2.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_trades_fit_and_save(seed: int) -> None:
    problem = random_problem(seed, 16, has_border=True)
    sets = KeptSets(problem)
    kept = frozenset(np.random.default_rng(seed).permutation(sorted(sets.everything))[::2].tolist())
    before = simulate(problem, replay(problem, kept, sets.cut))
    assert sets.recompute_s(kept) == pytest.approx(before.recompute_seconds)
    schedule = exchanged(problem, kept, before.peak_bytes, before.recompute_seconds)
    if schedule is not None:
        after = simulate(problem, schedule)
        assert after.peak_bytes <= before.peak_bytes
        assert after.recompute_seconds < before.recompute_seconds
