"""Functional BatchNorm: its replay must not touch the running statistics, and its backward must not read them.

Replay: the variant without statistics computes the same normalized output, batch mean and inverse deviation, bit for
bit (torch 2.13, CPU; tests/test_emit.py). Backward: in training the formula uses the batch's own statistics, so the
running ones that autograd passes along are dropped; they are inputs that the forward overwrites.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placemat.graph.cumulative_batch_norm import CUMULATIVE

aten = torch.ops.aten

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
NO_STATS = aten._native_batch_norm_legit.no_stats
_IN_TRAINING = (FUNCTIONAL, CUMULATIVE)  # equal in all positions but that of the momentum
_NEW_STATISTICS = (3, 4)  # results of these that NO_STATS does not have
BACKWARD = aten.native_batch_norm_backward.default


def drop_running_statistics(graph: fx.Graph) -> None:
    """Pass None for the running statistics to every BatchNorm backward that is in training mode."""
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        grad, x, weight, _, _, mean, invstd, train, *rest = node.args
        if train:
            node.args = (grad, x, weight, None, None, mean, invstd, train, *rest)


def drop_statistics_copies(graph: fx.Graph) -> None:
    """Let new running statistics that a graph copies over the old ones take their place, as FUNCTIONAL's do."""
    for node in graph.find_nodes(op="call_function", target=CUMULATIVE):
        for result in list(node.users):
            if result.args[1] in _NEW_STATISTICS:
                for copy in [u for u in result.users if u.target is aten.copy.default and u.args[1] is result]:
                    copy.replace_all_uses_with(result)
                    graph.erase_node(copy)


def replays_without_statistics(node: fx.Node) -> bool:
    """Whether a node is a BatchNorm in training mode whose new running statistics only go back to the module."""
    if node.target not in _IN_TRAINING or not node.args[5]:
        return False
    statistics = [user for user in node.users if user.args[1] in _NEW_STATISTICS]
    return all(reader.op == "output" for user in statistics for reader in user.users)


def replay_call(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Target and arguments of the replay; its results are the first three of the original's."""
    x, weight, bias, _, _, train, _, eps = node.args
    return NO_STATS, (x, weight, bias, train, 0.0, eps)  # a momentum has no part in these results
