"""Calls of torch.utils.checkpoint in a forward: refused.

What is recomputed is what a plan decides, for single tensors; a captured step would leave the user's regions aside
without a word. Nor would it do the same: eager runs a region twice, so that BatchNorm in it moves its statistics twice.
"""

from __future__ import annotations

import torch
from torch import fx

from placemat.graph.errors import UnsupportedFeature
from placemat.graph.sources import user_line


def refuse_checkpoints(graph_module: fx.GraphModule) -> None:
    """Refuse a Dynamo graph with checkpointed regions.

    Raises:
        UnsupportedFeature: names the user's file and line.
    """
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            raise UnsupportedFeature(
                "the forward calls torch.utils.checkpoint, so it decides itself what is recomputed, which is what a "
                f"plan decides. At {user_line(node.meta.get('stack_trace')) or 'an unknown line'}. Remedy: switch it "
                "off (gradient_checkpointing=False in TrainingArguments, model.gradient_checkpointing_disable()) and "
                "let the budget decide, or go without placemat."
            )
