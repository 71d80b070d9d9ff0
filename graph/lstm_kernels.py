"""One layer of nn.LSTM on the CPU by the kernels that its autograd graph calls, without that graph.

`torch.lstm` runs oneDNN's there (aten/src/ATen/native/mkldnn/RNN.cpp: the batch goes second, states are zeros, results
are stacked by layer). A graph of its own for each run, as `eager_run` has it, took a millisecond of Python a layer and
step, a twentieth of what the kernels took; calling them directly, a quarter of that. `eager_facts.learn` uses this for
a layer only after both have made the same bits of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placemat.graph.eager_run import Call, unshared

aten = torch.ops.aten

_LSTM = 2  # ideep's number for it, of which the kernels are told
_NAMES = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]  # in the kernels' order
_PARAMETERS = len(_NAMES)


def is_for_kernels(layer: nn.Module, call: Call, tensors: Sequence[Tensor]) -> bool:
    """Whether a call is of the plain kind that is known here; `run` is for no other."""
    if type(layer) is not nn.LSTM or not layer.training or len(tensors) != 1 + _PARAMETERS:
        return False
    if [name for name, _ in layer.named_parameters()] != _NAMES:  # someone has registered one anew
        return False
    is_one_layer = layer.num_layers == 1 and not layer.bidirectional and not layer.proj_size and bool(layer.bias)
    is_plain = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() > 0 for t in tensors)
    is_alone = call.is_tensor == (True,) and call.is_grad_enabled and tensors[0].dim() == 3
    return is_one_layer and is_plain and is_alone and are_enabled()


def are_enabled() -> bool:
    """Whether torch.lstm runs these kernels now."""
    return bool(torch.backends.mkldnn.enabled)


def run(layer: Any, call: Call, tensors: Sequence[Tensor], owners: frozenset[int]) -> tuple[list[Tensor], KernelRun]:
    """Run a layer's forward.

    Args:
        layer: an nn.LSTM.
        call: how it is called.
        tensors: the argument, and the parameters.
        owners: numbers, among these and then the results, of the tensors that the backward will be given.

    Returns:
        What the layer returns, and what has the backward.
    """
    x, *parameters = (t.detach() for t in tensors)
    sequence = _swapped(x, layer.batch_first).contiguous()
    state, cell = (torch.zeros(1, sequence.shape[1], layer.hidden_size)[0] for _ in range(2))
    flags: tuple[Any, ...] = (False, [], _LSTM, layer.hidden_size, 1, True, False, layer.batch_first, True)
    with torch.enable_grad():  # otherwise the kernel keeps nothing for the backward
        output, last, last_cell, workspace = aten.mkldnn_rnn_layer(sequence, *parameters, state, cell, *flags)
    results = [_swapped(output, layer.batch_first), torch.stack([last], 0), torch.stack([last_cell], 0)]
    held = (None if 0 in owners else sequence, state, cell, last, last_cell, workspace)
    return results, KernelRun(layer.hidden_size, layer.batch_first, call.requires_grad, held)


class KernelRun:
    """What one run left for its backward; takes the place of an `eager_run.InnerGraph`.

    Attributes:
        saved_bytes: bytes of the storages that it holds.
    """

    def __init__(
        self, hidden_size: int, batch_first: bool, requires_grad: Sequence[bool], held: tuple[Tensor | None, ...]
    ) -> None:
        self._hidden_size = hidden_size
        self._batch_first = batch_first
        self._requires_grad = requires_grad
        self._held = held

    @property
    def saved_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._held if t is not None)

    def backward(self, grads: Sequence[Tensor | None], passed: Mapping[int, Tensor]) -> list[Tensor | None]:
        """As `InnerGraph.backward`: gradients of the inputs, None for those that have none."""
        sequence, state, cell, last, last_cell, workspace = self._held
        if sequence is None:
            sequence = _swapped(passed[0], self._batch_first).contiguous()
        parameters = [passed[1 + i] for i in range(_PARAMETERS)]
        output = _swapped(passed[1 + _PARAMETERS], self._batch_first)
        of_output, of_last, of_last_cell = grads
        arriving = (
            None if of_output is None else _swapped(of_output, self._batch_first),
            None if of_last is None else of_last[0],
            None if of_last_cell is None else of_last_cell[0],
        )
        flags: tuple[Any, ...] = (False, _LSTM, self._hidden_size, 1, True, True, False, [], self._batch_first)
        with torch.no_grad():
            of_sequence, *of_parameters = aten.mkldnn_rnn_layer_backward(
                sequence, *parameters, state, cell, output, last, last_cell, *arriving, *flags, workspace
            )[: 1 + _PARAMETERS]
        results = [_swapped(of_sequence, self._batch_first), *of_parameters]
        wanted = [g if needed else None for g, needed in zip(results, self._requires_grad, strict=True)]
        return unshared(wanted, [g for g in grads if g is not None])


def _swapped(tensor: Tensor, batch_first: bool) -> Tensor:
    """From (batch, sequence, ...) to the kernels' (sequence, batch, ...) and back."""
    return tensor.transpose(0, 1) if batch_first else tensor
