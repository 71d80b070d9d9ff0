"""Local search: trades, transfers and ejections from a kept set, and the seconds that they are judged by."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from placemat.descent import Descent
from placemat.ejection import Ejection
from placemat.exchange import Exchange
from placemat.greedy import KeptSets
from placemat.local_search import searched_locally
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.replay import replay
from placemat.simulate import simulate
from placemat.transfer import Transfer
from tests.instances import random_problem

SIZES = {"dear": 10, "cheap": 10, "large": 40, "small": 10}
SECONDS = {"dear": 8.0, "cheap": 1.0, "large": 9.0, "small": 1.0}


def step(*forward: str) -> Problem:
    """Ops by kind; a "cheap" one reads the op before it. Backward reads every result, the last one first."""
    ops: list[ProblemOp] = []
    values: list[ProblemValue] = []
    for i, kind in enumerate(forward):
        values.append(ProblemValue(f"{kind}{i}", SIZES[kind], i))
        ops.append(ProblemOp(f"{kind}{i}", (i - 1,) if kind == "cheap" else (), (i,), SECONDS[kind]))
    border = len(ops)
    ops += [ProblemOp(f"back{v}", (v,), (), 1.0, recomputable=False) for v in reversed(range(border))]
    return Problem(tuple(ops), tuple(values), border)


def descent(problem: Problem, kept: set[int]) -> Descent:
    """From `kept`, within the bytes that it takes."""
    before = simulate(problem, replay(problem, kept, problem.border))
    sets = KeptSets(problem, max_evaluations=1000)
    return Descent(sets, frozenset(kept), before.peak_bytes, before.recompute_seconds, math.inf)


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_an_exchange_keeps_the_dear_one_of_two_in_every_block(num_blocks: int) -> None:
    search = descent(step(*("dear", "cheap") * num_blocks), set(range(1, 2 * num_blocks, 2)))
    Exchange(search).run()
    assert search.kept == set(range(0, 2 * num_blocks, 2))
    assert search.seconds == num_blocks


def test_a_transfer_brings_what_one_block_keeps_to_its_equals() -> None:
    search = descent(step(*("dear", "cheap") * 6), {0, 3, 5, 7, 9, 11})
    Transfer(search).run()
    assert search.kept == {0, 2, 4, 6, 8, 10}
    assert search.seconds == 6


def test_an_ejection_makes_room_for_a_large_value_with_several_small_ones() -> None:
    search = descent(step("large", *["small"] * 6), set(range(1, 7)))
    assert search.seconds == SECONDS["large"]
    Ejection(search).run()
    assert 0 in search.kept
    assert search.seconds < SECONDS["large"]


def test_nothing_that_does_not_save_or_comes_too_late() -> None:
    problem = step(*("dear", "cheap") * 2)
    assert searched_locally(problem, frozenset((0, 2)), 10**6, below_s=0.0, deadline=math.inf) is None
    assert searched_locally(problem, frozenset((1, 3)), 10**6, below_s=16.0, deadline=time.monotonic()) is None


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_fits_and_saves(seed: int) -> None:
    problem = random_problem(seed, 16, has_border=True)
    sets = KeptSets(problem)
    kept = frozenset(np.random.default_rng(seed).permutation(sorted(sets.everything))[::2].tolist())
    before = simulate(problem, replay(problem, kept, sets.cut))
    assert sets.recompute_s(kept) == pytest.approx(before.recompute_seconds)
    schedule = searched_locally(problem, kept, before.peak_bytes, before.recompute_seconds, math.inf)
    assert schedule == searched_locally(problem, kept, before.peak_bytes, before.recompute_seconds, math.inf)
    if schedule is not None:
        after = simulate(problem, schedule)
        assert after.peak_bytes <= before.peak_bytes
        assert after.recompute_seconds < before.recompute_seconds
