"""How far back a recomputation may reach before its first use, so that a model of a deep net stays solvable."""

from __future__ import annotations

from placemat.phases import Phases, Wants, find_wants
from placemat.problem import Problem

# Columns Y and y of a model that HiGHS solves in seconds on one core; beyond it one root node takes minutes.
MAX_RISE_COLUMNS = 12_000
# Columns Y and y of the whole family up to which its linear relaxation is solved for a bound.
MAX_BOUND_COLUMNS = 150_000
WINDOWS = (240, 120, 60, 30, 15)  # candidates, see `find_wants`


def num_rise_columns(wants: Wants) -> int:
    """Columns Y and y that a model of these wants has; an upper bound where outputs are single."""
    return sum(map(len, wants.rises.values())) + sum(map(len, wants.value_rises.values()))


def choose_wants(problem: Problem, phases: Phases) -> tuple[Wants, int | None]:
    """The widest wants whose model is small enough, and their window: None for the whole family."""
    for window in (None, *WINDOWS):
        wants = find_wants(problem, phases, window=window)
        if num_rise_columns(wants) <= MAX_RISE_COLUMNS:
            break
    return wants, window
