"""Calls of torch.lstm and its kin outside of a layer, and packed sequences: refused in a traced forward.

PyTorch traces those functions into Python decompositions that sum in another order than the kernels behind them: losses
and gradients differ by rounding (torch 2.13 on the CPU: LSTM and GRU, and RNN with dropout). Layers (nn.LSTM, GRU, RNN)
are kept eager (`eager_modules`); cells (LSTMCell, GRUCell, RNNCell) in a loop are captured as eager runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placemat.graph.errors import CaptureError
from placemat.graph.sources import user_line

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LAYERS = frozenset(getattr(namespace, name) for namespace in (torch, torch.ops.aten) for name in _NAMES)
_WHAT = "an LSTM, GRU or RNN function"
_PACKED = ("pack_padded_sequence", "pad_packed_sequence", "PackedSequence")


def refuse_layers(graph_module: fx.GraphModule) -> None:
    """Refuse a Dynamo graph that calls the function behind a recurrent layer.

    Raises:
        CaptureError: names the user's file and line.
    """
    for node in graph_module.graph.nodes:
        if getattr(node.target, "overloadpacket", node.target) in _LAYERS:
            raise CaptureError(refusal(_WHAT, user_line(node.meta.get("stack_trace")) or "an unknown line"))


def what_is_packed(error: Any) -> str | None:
    """What an error of Dynamo's is about if that is packed sequences, or None."""
    if any(name in str(error).partition("from user code")[0] for name in _PACKED):
        return "packed sequences, whose shapes depend on data"
    return None


def refusal(what: str, where: str) -> str:
    """The message; `where` is the user's file and line."""
    return (
        f"the model's forward cannot be captured as one graph: it uses {what}. At {where}. Remedy: put it into a "
        "module of its own with results whose shapes do not depend on data (pad_packed_sequence(..., total_length=)), "
        "and name that module in keep_eager=; or a loop over torch.nn.LSTMCell, GRUCell or RNNCell with masks."
    )
