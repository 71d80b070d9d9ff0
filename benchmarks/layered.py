"""Random layered DAGs of MOCCASIN's kind (Bartan et al., ICML 2023, arXiv 2304.14463, appendix), made here from seeds.

Written from a description of the published graphs and not from their generator: equal widths, edge counts, shares of
skip edges and size mixture, but other graphs. Every op may run again at any time; there is no border.
"""

from __future__ import annotations

import math
from itertools import pairwise

import networkx as nx
import numpy as np

from placemat.problem import Problem

LEVEL_VARIATION = 0.75  # a layer's width is within this share of the mean width
EDGE_DENSITY = 0.2  # of all pairs of adjacent layers
SKIP_SHARE = 0.14  # of all edges
# Bytes: a mixture of normals.
SIZE_WEIGHTS, SIZE_MEANS, SIZE_DEVIATIONS = (0.3, 0.3, 0.3, 0.1), (500, 1000, 3000, 4000), (500, 1000, 1500, 1500)
MAX_DURATION_S = 1000

Layers = list[list[int]]


def layered(num_nodes: int, seed: int, width: float = 0.35) -> Problem:
    """A DAG of `num_nodes` ops of one output each, executed layer by layer.

    Args:
        num_nodes: source and sink included, which take neither bytes nor time.
        seed: equal arguments give equal problems.
        width: between 0.25 (deep) and 0.5 (wide).
    """
    rng = np.random.default_rng([seed, num_nodes])
    layers = _layers(rng, num_nodes, width)
    graph: nx.DiGraph[int] = nx.DiGraph()
    for node in range(num_nodes):
        is_end = node in (0, num_nodes - 1)
        seconds = float(rng.integers(0, MAX_DURATION_S + 1))
        num_bytes = _bytes(rng)
        graph.add_node(node, bytes=0 if is_end else num_bytes, seconds=0.0 if is_end else seconds)
    for above, below in pairwise(layers):
        graph.add_edges_from(_adjacent_edges(rng, above, below))
    graph.add_edges_from(_skip_edges(rng, layers, graph.number_of_edges()))
    graph.add_edges_from((0, node) for node in layers[0])
    graph.add_edges_from((node, num_nodes - 1) for node in layers[-1])
    return Problem.from_networkx(graph, order=range(num_nodes))


def _layers(rng: np.random.Generator, num_nodes: int, width: float) -> Layers:
    """Nodes 1 to num_nodes - 2, cut into about sqrt(N (1/W - 1)) layers."""
    mean = num_nodes / math.ceil(math.sqrt(num_nodes * (1 / width - 1)))
    low, high = math.ceil(mean * (1 - LEVEL_VARIATION)), math.floor(mean * (1 + LEVEL_VARIATION))
    layers: Layers = []
    first = 1
    while first < num_nodes - 1:
        stop = min(first + int(rng.integers(low, high + 1)), num_nodes - 1)
        layers.append(list(range(first, stop)))
        first = stop
    return layers


def _bytes(rng: np.random.Generator) -> int:
    """Positive, and a multiple of 10."""
    while True:
        kind = rng.choice(len(SIZE_WEIGHTS), p=SIZE_WEIGHTS)
        size = 10 * round(rng.normal(SIZE_MEANS[kind], SIZE_DEVIATIONS[kind]) / 10)
        if size > 0:
            return int(size)


def _adjacent_edges(rng: np.random.Generator, above: list[int], below: list[int]) -> set[tuple[int, int]]:
    """floor(0.2 a b + 0.8 max(a, b)) edges, evenly over the wider layer, each to a node of the narrower one within a
    window around the same relative position; then one for every node of the narrower layer that got none."""
    a, b = len(above), len(below)
    wide, narrow = (above, below) if a >= b else (below, above)
    count = min(math.floor(EDGE_DENSITY * a * b + (1 - EDGE_DENSITY) * max(a, b)), a * b)
    half_window = max(1, math.ceil(count / len(wide)))
    pairs: set[tuple[int, int]] = set()
    for e in range(count):
        i = e % len(wide)
        centre = (i + 0.5) * len(narrow) / len(wide)
        low, high = max(0, math.floor(centre - half_window)), min(len(narrow), math.ceil(centre + half_window))
        free = [j for j in range(low, high) if (i, j) not in pairs]
        if free:
            pairs.add((i, int(rng.choice(free))))
    for j in sorted(set(range(len(narrow))) - {j for _, j in pairs}):
        pairs.add((min(len(wide) - 1, int((j + 0.5) * len(wide) / len(narrow))), j))
    return {(wide[i], narrow[j]) if wide is above else (narrow[j], wide[i]) for i, j in pairs}


def _skip_edges(rng: np.random.Generator, layers: Layers, num_adjacent: int) -> set[tuple[int, int]]:
    """From any layer to one at least two later, near the same relative position; duplicates are dropped."""
    edges: set[tuple[int, int]] = set()
    if len(layers) < 3:
        return edges
    for _ in range(math.ceil(num_adjacent * SKIP_SHARE / (1 - SKIP_SHARE))):
        source = int(rng.integers(0, len(layers) - 2))
        target = int(rng.integers(source + 2, len(layers)))
        i = int(rng.integers(0, len(layers[source])))
        j = round((i + 0.5) * len(layers[target]) / len(layers[source]) - 0.5 + rng.integers(-1, 2))
        edges.add((layers[source][i], layers[target][min(max(j, 0), len(layers[target]) - 1)]))
    return edges
