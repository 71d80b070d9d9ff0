"""Functional BatchNorm: its replay must not touch the running statistics, and its backward must not read them.

Replay: the variant without statistics computes the same normalized output, batch mean and inverse deviation, bit for
bit (torch 2.13, CPU; tests/test_emit.py). Backward: in training the formula uses the batch's own statistics, so the
running ones that autograd passes along are dropped; they are inputs that the forward overwrites.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
NO_STATS = aten._native_batch_norm_legit.no_stats
_NEW_STATISTICS = (3, 4)  # results of FUNCTIONAL that NO_STATS does not have
BACKWARD = aten.native_batch_norm_backward.default


def drop_running_statistics(graph: fx.Graph) -> None:
    """Pass None for the running statistics to every BatchNorm backward that is in training mode."""
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        grad, x, weight, _, _, mean, invstd, train, *rest = node.args
        if train:
            node.args = (grad, x, weight, None, None, mean, invstd, train, *rest)


def replays_without_statistics(node: fx.Node) -> bool:
    """Whether a node is a BatchNorm in training mode whose new running statistics only go back to the module."""
    if node.target is not FUNCTIONAL or not node.args[5]:
        return False
    statistics = [user for user in node.users if user.args[1] in _NEW_STATISTICS]
    return all(reader.op == "output" for user in statistics for reader in user.users)


def replay_call(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Target and arguments of the replay; its results are the first three of the original's."""
    x, weight, bias, _, _, train, momentum, eps = node.args
    return NO_STATS, (x, weight, bias, train, momentum, eps)
