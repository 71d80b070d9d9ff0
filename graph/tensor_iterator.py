"""TensorIterator: the order of memory that an elementwise kernel of PyTorch gives its result.

The rules are those of `TensorIteratorBase::reorder_dimensions` and `allocate_or_resize_outputs` in ATen (torch 2.13).
`torch._prims_common` has them too, but expands all operands to one shape first, and a dimension that an operand lacks
then counts like one of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placemat.graph.gradients import is_dense

Strides = tuple[int, ...]
_Operand = tuple[Sequence[int], Strides]  # shape, strides


def elementwise_strides(operands: Sequence[torch.Tensor]) -> Strides:
    """Strides of the result of a kernel that gets these operands, in its own order of them."""
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    if all(t.shape == shape for t in operands):
        if all(t.is_contiguous() for t in operands):
            return _packed(shape, range(len(shape) - 1, -1, -1))
        if len(shape) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in operands):
            return _packed(shape, (1, 3, 2, 0))
        if len({t.stride() for t in operands}) == 1 and is_dense(operands[0]):
            return operands[0].stride()
    expanded = [_expanded(t.shape, t.stride(), shape) for t in operands]
    return _packed(shape, _fastest_first(shape, expanded))


def _expanded(shape: Sequence[int], strides: Strides, common: Sequence[int]) -> Strides:
    """Strides of an operand in the common shape: 0 where it lacks a dimension or is repeated along it."""
    missing = len(common) - len(shape)
    repeated = [n == 1 and m != 1 for n, m in zip(shape, common[missing:], strict=True)]
    return (0,) * missing + tuple(0 if r else s for r, s in zip(repeated, strides, strict=True))


def _fastest_first(shape: Sequence[int], operands: Sequence[Strides]) -> list[int]:
    """The dimensions, the one that varies fastest in memory first.

    An insertion sort of an order that is partial only, so its steps matter.
    """
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        moved = i
        for j in range(i - 1, -1, -1):
            compared = _compare(order[j], order[moved], shape, operands)
            if compared > 0:
                order[j], order[moved] = order[moved], order[j]
                moved = j
            elif compared < 0:
                break
    return order


def _compare(a: int, b: int, shape: Sequence[int], operands: Sequence[Strides]) -> int:
    """-1 if a varies faster than b, 1 if b does, 0 if no operand tells."""
    for strides in operands:
        if strides[a] == 0 or strides[b] == 0:
            continue
        if strides[a] != strides[b]:
            return -1 if strides[a] < strides[b] else 1
        if shape[a] > shape[b]:
            return 1
    return 0


def _packed(shape: Sequence[int], order: Sequence[int]) -> Strides:
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
