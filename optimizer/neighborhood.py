"""Neighborhoods: better plans near the incumbent, by a retention MILP in which most is fixed as the incumbent has it.

Large neighborhood search (Shaw, CP 1998). What is carried over the cuts is free for the values of a few stretches of
ops, or for all values over a few cuts, and fixed for all others; solved to the end such a model takes a second where
the whole one takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from placemat.milp import Retention

# A neighborhood frees about so many of the s[v,p], in so many stretches of the order of ops.
FREE_COLUMNS = 60
STRETCHES = (1, 3, 2)
# With more than two phases a value has several, most of which follow from the others: free this many times as many.
MORE_WITH_PHASES = 2
SEED = 0

Key = tuple[int, int]  # (value, phase)


def neighborhoods(model: Retention, carried: set[Key], scale: int) -> Iterator[dict[Key, float]]:
    """Endless: for each neighborhood the fixed s[v,p] and their values, 1 if (v,p) is in `carried`.

    Args:
        model: of which the s[v,p] are.
        carried: what the incumbent carries; looked at when a neighborhood is made.
        scale: how many times the usual size they have.
    """
    rng = np.random.default_rng(SEED)
    while True:
        for keys, length, stretches in _kinds(model, scale):
            for start in _starts(rng, len(keys), length, stretches):
                free = {keys[i % len(keys)] for s in start for i in range(s, s + length)}
                yield {key: float(key in carried) for key in keys if key not in free}


def _kinds(model: Retention, scale: int) -> Iterator[tuple[list[Key], int, int]]:
    """An order of the s[v,p], and how many stretches of what length are free."""
    producer = [value.producer for value in model.problem.values]
    by_op = sorted(model.s, key=lambda key: (producer[key[0]], key))
    is_manifold = model.phases.num_phases > 2
    count = min(scale * FREE_COLUMNS * (MORE_WITH_PHASES if is_manifold else 1), len(by_op))
    for stretches in STRETCHES:
        yield by_op, max(1, count // stretches), stretches
    if is_manifold:
        yield sorted(model.s, key=lambda key: (key[1], producer[key[0]], key)), max(1, count), 1


def _starts(rng: np.random.Generator, size: int, length: int, stretches: int) -> list[list[int]]:
    """Where the stretches of each neighborhood begin: every place once, half overlapping, in random company."""
    places = rng.permutation(np.arange(0, size, max(1, length // 2))).tolist()
    return [places[i : i + stretches] for i in range(0, len(places), stretches)]
