"""CPU workspaces of convolutions: upper bounds.

oneDNN picks an implementation per shape, instruction set and thread count, so no formula is exact. What it allocates
through c10 are packed copies of input, weight and output (channels padded to blocks of 16), a scratchpad per thread,
and for shapes without a blocked implementation the columns of an im2col. The bounds below add these up; they were
checked against 3900 random convolutions, forward and backward (float32 and bfloat16, NCHW and channels_last, groups,
strides, dilations, transposed, 1 to 4 threads; torch 2.13 with oneDNN 3.12 on a CPU with AMX), and none exceeded them.
`MeasuredWorkspaces` (measured.py) replaces them by what one run of the op allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from placemat.cost_models.operands import (
    REDUCED,
    argument,
    is_channels_last,
    is_contiguous,
    output_tensors,
    tensor,
)
from placemat.graph.ir import OpSignature, TensorSpec

Formula = Callable[[OpSignature, int], int]

_BLOCK = 16  # channels of oneDNN's blocked layouts with AVX-512
_SCRATCH_BYTES = 320 * 2**10  # per thread; largest seen beside the terms below: 257 KiB
_REDUCED_SCRATCH_BYTES = 512 * 2**10  # per thread, 16-bit dtypes (AMX); largest seen: 470 KiB


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block


@dataclass(frozen=True)
class _Convolution:
    """Sizes of one convolution. Spatial sizes are products over the spatial dimensions."""

    x: TensorSpec
    weight: TensorSpec
    y: TensorSpec
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    @property
    def channels(self) -> tuple[int, int]:
        return self.x.shape[1], self.y.shape[1]

    @property
    def kernel(self) -> int:
        return prod(self.weight.shape[2:])

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels[0] == self.channels[1]

    @property
    def channels_last(self) -> bool:
        return any(is_channels_last(t) and not is_contiguous(t) for t in (self.x, self.weight))

    @property
    def reduced(self) -> bool:
        return self.x.dtype in REDUCED

    @property
    def blocked(self) -> bool:
        """Whether oneDNN has a blocked implementation: dense or depthwise, neither dilated nor transposed."""
        plain = not self.transposed and all(d == 1 for d in self.dilation)
        return plain and (self.groups == 1 or self.depthwise)

    def packed(self, spec: TensorSpec) -> int:
        """Bytes of an image tensor with its channels padded to blocks."""
        batch, channels = spec.shape[:2]
        return batch * _round_up(channels, _BLOCK) * prod(spec.shape[2:]) * spec.itemsize

    @property
    def packed_weight(self) -> int:
        if self.depthwise and self.blocked and not self.channels_last:
            elements = _round_up(self.groups, _BLOCK)
        else:
            per_group = [_round_up(c // self.groups, _BLOCK) for c in self.channels]
            elements = self.groups * per_group[0] * per_group[1]
        return elements * self.kernel * self.weight.itemsize

    @property
    def columns(self) -> int:
        """float32 bytes of one image's im2col, all groups."""
        channels = self.channels[1 if self.transposed else 0]
        positions = prod((self.x if self.transposed else self.y).shape[2:])
        return channels * self.kernel * positions * 4

    @property
    def scratch(self) -> int:
        """Scratchpad bytes per thread, beside im2col."""
        if self.reduced:
            # Rows of the image lowered along the kernel's width, for few channels.
            channels = self.channels[1 if self.transposed else 0]
            width = max(self.x.shape[-1], self.y.shape[-1])
            height = prod(n + 2 * p for n, p in zip(self.x.shape[2:-1], self.padding, strict=False))
            lowered = _round_up(channels * self.weight.shape[-1], 32) * height * width * self.x.itemsize
            return _REDUCED_SCRATCH_BYTES + 3 * lowered
        # A strided 1x1 convolution gathers its input first.
        gathered = self.columns if self.kernel == 1 and any(s > 1 for s in self.stride) else 0
        return _SCRATCH_BYTES + gathered


def _convolution(signature: OpSignature, num_threads: int) -> int:
    """aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    y = output_tensors(signature)[0]
    conv = _Convolution(
        x=tensor(signature, 0),
        weight=tensor(signature, 1),
        y=y,
        stride=argument(signature, 3, "stride"),
        padding=argument(signature, 4, "padding"),
        dilation=argument(signature, 5, "dilation"),
        transposed=argument(signature, 6, "transposed"),
        groups=argument(signature, 8, "groups"),
    )
    x_bytes, y_bytes, weight_bytes = conv.packed(conv.x), conv.packed(y), conv.packed_weight
    scratch, columns = num_threads * conv.scratch, conv.columns // conv.groups
    if conv.blocked:
        results = y_bytes + (2 if conv.reduced else 1) * y.nbytes  # packed, unpacked, and a copy of 16-bit ones
        peak = max(x_bytes + y_bytes + weight_bytes + scratch, results)
        if conv.x.shape[0] == 1 and conv.groups == 1:  # a single image does without oneDNN
            peak = max(peak, y.nbytes + columns + weight_bytes)
    else:
        peak = x_bytes + weight_bytes + 3 * y_bytes + scratch + num_threads * columns
    return peak - y.nbytes


def _convolution_backward(signature: OpSignature, num_threads: int) -> int:
    """aten.convolution_backward(grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
    groups, output_mask): the gradient of x, then those of weight and bias."""
    conv = _Convolution(
        x=tensor(signature, 1),
        weight=tensor(signature, 2),
        y=tensor(signature, 0),
        stride=argument(signature, 4, "stride"),
        padding=argument(signature, 5, "padding"),
        dilation=argument(signature, 6, "dilation"),
        transposed=argument(signature, 7, "transposed"),
        groups=argument(signature, 9, "groups"),
    )
    x_bytes, y_bytes, weight_bytes = conv.packed(conv.x), conv.packed(conv.y), conv.packed_weight
    peak = 3 * x_bytes + 2 * y_bytes + (3 + num_threads) * weight_bytes + num_threads * conv.scratch
    if conv.reduced:
        peak += num_threads * weight_bytes + 2 * (x_bytes + y_bytes)
    if not conv.blocked:
        peak += 4 * num_threads * weight_bytes
    if not conv.blocked or conv.x.shape[0] == 1:
        peak += num_threads * conv.columns // conv.groups
    if conv.depthwise and conv.channels_last:
        peak += num_threads * conv.columns * (2 if conv.reduced else 1)
    return peak - sum(t.nbytes for t in output_tensors(signature))


FORMULAS: dict[str, Formula] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
