"""Polish: what is left is needed, and what a search has in hand is there before it is polished."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.incumbent import Incumbent
from placemat.polish import drop_needless
from placemat.problem import Problem
from placemat.replay import replay
from placemat.schedule import Schedule, canonical
from placemat.simulate import simulate
from tests.instances import random_problem, training_chain

FOREVER = float("inf")


def schedules(problem: Problem) -> Iterator[Schedule]:
    """With one cut, and with two: what is recomputed after the first may be dropped and recomputed again."""
    steps = problem.num_steps
    yield recompute_all(problem)
    yield replay(problem, range(0, len(problem.values), 3), steps // 2)
    first = list(replay(problem, (), steps // 3).computes)
    yield canonical(
        problem, [*first[:-1], *(o for o in recompute_all(problem).recomputes if o < steps // 3), first[-1]]
    )


def budgets(problem: Problem, schedule: Schedule) -> Iterator[int]:
    low, high = simulate(problem, schedule).peak_bytes, simulate(problem, save_all(problem)).peak_bytes
    yield from sorted({low, low + 1, (low + high) // 2, max(low, high - 1)})


@pytest.mark.parametrize("seed", range(60))
def test_what_is_left_fits_and_is_needed(seed: int) -> None:
    problem = random_problem(seed, 12)
    for schedule in schedules(problem):
        for budget_bytes in budgets(problem, schedule):
            polished = drop_needless(problem, schedule, budget_bytes)
            assert simulate(problem, polished).peak_bytes <= budget_bytes
            computes, seen = polished.computes, set[int]()
            for position, op in enumerate(computes):
                if op in seen:
                    without = canonical(problem, [*computes[:position], *computes[position + 1 :]])
                    assert simulate(problem, without).peak_bytes > budget_bytes
                seen.add(op)


def test_enough_room_leaves_nothing_to_recompute() -> None:
    problem = training_chain(20)
    peak_bytes = simulate(problem, save_all(problem)).peak_bytes
    assert drop_needless(problem, recompute_all(problem), peak_bytes).recomputes == ()


def test_the_first_schedule_that_fits_is_taken_as_it_is() -> None:
    """Making better ones takes longer: on large steps a plan is to be there at once."""
    problem = training_chain(20)
    first = chen_sqrt_n(problem)
    budget_bytes = simulate(problem, first).peak_bytes
    incumbent = Incumbent(problem, budget_bytes, FOREVER)

    def made_one_by_one() -> Iterator[Schedule]:
        yield recompute_all(problem) if simulate(problem, recompute_all(problem)).peak_bytes > budget_bytes else first
        yield first
        assert incumbent.schedule == first
        yield first

    lowest_bytes = incumbent.offer_best(made_one_by_one())
    assert lowest_bytes <= budget_bytes
    assert incumbent.schedule == drop_needless(problem, first, budget_bytes)
    assert not incumbent.offer(first)
