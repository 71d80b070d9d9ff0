"""Composite operators, made of other operators so that a trace has eager's bits.

Dropout: on the CPU eager multiplies by a noise tensor, 0 or 1 / (1 - p) rounded to the dtype. A trace would call
`aten.native_dropout`, which multiplies by a mask and then by 1 / (1 - p) in double precision: other bits where the two
scales differ, as they do in float32 for p = 0.15 and a fifth of all p, and in 16 bits for most. The mask has a quarter
of the noise's bytes, so it is drawn either way, and eager's noise is made of it where that matters.

GRU cells: eager adds in place into slices of a product and takes the sigmoid of these slices. A trace has no writes,
so a sum is contiguous: the kernel then runs through rows at one go, and its vectors end elsewhere. Vectors and what is
left over at their end round differently.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what kernels compute in


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """What `aten.dropout` is made of, to be traced (aten/src/ATen/native/Dropout.cpp, torch 2.13).

    Args:
        input: any shape, floating point.
        p: probability of a zero.
        train: otherwise the input is returned.
    """
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    if input.device.type != "cpu" or _scales_alike(input.dtype, p):
        result: Tensor = aten.native_dropout(input, p, True)[0]
        return result
    mask = aten.native_dropout(input.detach(), p, True)[1]
    return input * (mask.to(input.dtype) / (1.0 - p))


@functools.cache
def _scales_alike(dtype: torch.dtype, p: float) -> bool:
    """Whether the noise's scale, rounded to the dtype, is the one by which `native_dropout` multiplies."""
    from placemat.graph.torch_private import outside_tracing  # it lists this module's kernel

    wide = _WIDE.get(dtype, dtype)
    with outside_tracing():
        noise = torch.ones((), dtype=dtype) / (1.0 - p)
        return bool(noise.to(wide) == torch.tensor(1.0 / (1.0 - p), dtype=wide))


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """What `aten.gru_cell` is made of, to be traced (GRUCell in aten/src/ATen/native/RNN.cpp, torch 2.13).

    Args:
        input: (batch, features).
        hx: (batch, H).
        w_ih, w_hh: (3 H, features) and (3 H, H): reset, update and new gate.
        b_ih, b_hh: (3 H).
    """
    size = hx.shape[-1]
    from_input, new_of_input = F.linear(input, w_ih, b_ih).unsafe_split_with_sizes([2 * size, size], 1)
    from_state, new_of_state = F.linear(hx, w_hh, b_hh).unsafe_split_with_sizes([2 * size, size], 1)
    reset, update = (gate.sigmoid() for gate in (from_state + from_input).unsafe_chunk(2, 1))
    new = (new_of_input + new_of_state * reset).tanh()
    return (hx - new) * update + new
