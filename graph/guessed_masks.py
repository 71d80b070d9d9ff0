"""Attention of which the kernel depends on whether a forward believes that it is compiled: refused.

The `transformers` library looks whether an attention mask hides anything, or positions are of several packed sequences,
and leaves the mask out if not; while it is traced it cannot look, and keeps the mask. That has the same bits, unless
query heads share keys and values (Llama 3, Mistral, Qwen): without a mask PyTorch's kernel does the sharing, with one
the library repeats keys and values itself, and gradients are summed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from placemat.graph.errors import UnsupportedFeature
from placemat.graph.sources import user_line

_ASKS = "masking_utils.py"
_VIEWS = ("reshape", "view", "contiguous", "transpose")


def refuse_guessed_masks(graph_module: fx.GraphModule, files_that_asked: Iterable[str]) -> None:
    """Refuse a Dynamo graph with a mask that eager may do without, over keys that were repeated for it.

    Args:
        files_that_asked: source files in which the forward asked `torch.compiler.is_compiling()`, and their callers.

    Raises:
        UnsupportedFeature: names the user's file and line.
    """
    if not any(file.endswith(_ASKS) for file in files_that_asked):
        return
    for node in graph_module.graph.nodes:
        if node.target is not torch.nn.functional.scaled_dot_product_attention:
            continue
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        if mask is not None and _is_repeated(node.args[1] if len(node.args) > 1 else node.kwargs["key"]):
            where = user_line(node.meta.get("stack_trace")) or "an unknown line"
            raise UnsupportedFeature(
                "the model's attention cannot be captured as eager runs it: its library asks whether it is compiled, "
                "and then makes a mask that it does without in eager if nothing is hidden; with keys and values that "
                f"query heads share, gradients would round otherwise. At {where}. Remedy: set the "
                "environment variable TRANSFORMERS_SDPA_FORCE_GQA=1, with which the mask changes no bit; or "
                'attn_implementation="eager"; or pass a mask of four dimensions.'
            )


def _is_repeated(key: object) -> bool:
    """Whether a tensor of the graph is an expanded one, put into shape."""
    while isinstance(key, fx.Node) and key.op == "call_method" and key.target in _VIEWS:
        key = key.args[0]
    return isinstance(key, fx.Node) and key.op == "call_method" and key.target == "expand"
