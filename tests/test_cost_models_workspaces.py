"""Workspace formulas against what the CPU allocator does: one table of (op, arguments), run for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from placemat.cost_models.trial import peak_allocated_bytes
from placemat.cost_models.workspaces import is_bound, is_known, workspace_bytes
from placemat.graph.ir import OpSignature, TensorSpec

aten = torch.ops.aten
Case = tuple[Any, tuple[Any, ...]]  # op, arguments


def spec_of(value: Any) -> Any:
    """An argument or result as a cost model sees it."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorSpec(tuple(value.shape), value.stride(), dtype, value.device.type, value.element_size())
    if isinstance(value, (list, tuple)):
        return tuple(spec_of(v) for v in value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value).removeprefix("torch.")


def signature_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpSignature:
    results = result if isinstance(result, (list, tuple)) else (result,)
    named = tuple(sorted((name, spec_of(value)) for name, value in kwargs.items()))
    return OpSignature(str(op), tuple(spec_of(a) for a in args), named, tuple(spec_of(r) for r in results))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def half(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.bfloat16)


def zeros64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def elementwise() -> Iterator[Case]:
    x, row, wide, mask = ones(64, 32), ones(32), ones(64, 32, dtype=torch.float64), ones(64, 32) > 0
    integers, scalar = zeros64(64, 32), torch.tensor(2.0)
    for left, right in (
        *((x, x), (x, row), (x, ones(32, 64).t()), (x, scalar), (x, half(64, 32)), (x, half(32))),
        (half(64, 32), scalar),
        *((x, integers), (integers, x), (x, torch.tensor(2)), (x, wide), (mask, x), (x, 0.5), (half(64, 32), 0.5)),
        *((integers, 2), (x, half(64, 1).expand(64, 32))),
    ):
        yield aten.add.Tensor, (left, right)
        yield aten.mul.Tensor, (left, right)
        yield aten.div.Tensor, (left, right)
    for number in (2, 0.5):
        for operand in (x, half(64, 32), integers, mask):
            yield aten.mul.Scalar, (operand, number)
            yield aten.gt.Scalar, (operand, number)
            yield aten.pow.Tensor_Scalar, (operand, number)
    yield aten.pow.Scalar, (2.0, x)
    yield aten.eq.Tensor, (x, half(64, 32))
    yield aten.exp.default, (integers,)
    yield aten.where.self, (mask, x, half(64, 32))
    yield aten.where.self, (mask, x, scalar)
    yield aten.where.ScalarOther, (mask, x, 2.0)
    yield aten.clamp.default, (integers, 0.0, 1.0)
    yield aten.addcmul.default, (x, half(64, 32), x)
    yield aten.masked_fill.Scalar, (x, mask, 0.0)
    yield aten.gelu.default, (x,)
    yield aten.gelu_backward.default, (x, x)
    yield aten.threshold_backward.default, (x, ones(32, 64).t(), 0)


def dropouts() -> Iterator[Case]:
    for x in (ones(64, 32), half(64, 32), ones(1), ones(2), ones(32, 64).t(), ones(64, 64)[:, ::2]):
        yield aten.native_dropout.default, (x, 0.1, True)
        yield aten.native_dropout.default, (x, 0.1, False)
        yield aten.native_dropout_backward.default, (x, x > 0, 1.1)


def copies() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        for size in (59, 60, 128):
            yield aten.clone.default, (ones(size, size, dtype=dtype).t(),)
            yield aten.copy.default, (ones(size, size, dtype=dtype), ones(size, size, dtype=dtype).t())
    yield aten.cat.default, ([ones(64, 32), half(64, 32)], 1)
    yield aten.cat.default, ([ones(64, 32), zeros64(64, 32), half(64, 32)], 0)
    yield aten.cat.default, ([ones(128, 64).t(), ones(64, 128)], 0)
    yield aten.constant_pad_nd.default, (ones(64, 32), [1, 1], 0.0)
    yield aten.slice_backward.default, (ones(16, 32), [64, 32], 0, 0, 16, 1)
    yield aten.select_backward.default, (ones(32), [64, 32], 0, 1)


def reductions() -> Iterator[Case]:
    large = ones(512, 256)
    for x in (ones(64, 32), half(64, 32), large, large.t(), half(512, 256), ones(32, 64).t()):
        for dims in ([0], [1], [0, 1]):
            yield aten.sum.dim_IntList, (x, dims, True)
            yield aten.mean.dim, (x, dims, True)
        yield aten.sum.default, (x,)
        yield aten.mean.default, (x,)
        yield aten.amax.default, (x,)
        yield aten.var.correction, (x,)
    yield aten.sum.default, (ones(64, 32) > 0,)
    yield aten.mean.dim, (channels_last(ones(4, 16, 8, 8)), [-1, -2], True)
    for reduction in (0, 1):
        yield aten.mse_loss.default, (ones(64, 32), ones(64, 32), reduction)
        yield aten.mse_loss.default, (half(64, 32), half(64, 32), reduction)
        yield aten.huber_loss.default, (ones(64, 32), ones(64, 32), reduction)
        yield aten.smooth_l1_loss.default, (ones(64, 32), ones(64, 32), reduction)
        yield aten.binary_cross_entropy.default, (ones(64, 32), ones(64, 32), None, reduction)
    yield aten.binary_cross_entropy_backward.default, (torch.tensor(1.0), ones(64, 32), ones(64, 32))
    yield aten.binary_cross_entropy_with_logits.default, (ones(64, 32), ones(64, 32))


def layer_norms() -> Iterator[Case]:
    masks = ([True, True, True], [True, False, False], [False, True, True], [True, True, False])
    for make, statistics in ((ones, ones), (half, half)):
        for rows in (1, 37):
            x, weight, mean = make(rows, 32), make(32), statistics(rows, 1)
            yield aten.native_layer_norm.default, (x, [32], weight, weight, 1e-5)
            for mask in masks:
                yield aten.native_layer_norm_backward.default, (x, x, [32], mean, mean, weight, weight, mask)
    x, weight, mean = ones(8, 32), ones(32), ones(8, 1)
    strided = ones(32, 8).t()
    yield aten.native_layer_norm.default, (strided, [32], weight, weight, 1e-5)
    yield aten.native_layer_norm_backward.default, (strided, x, [32], mean, mean, weight, weight, [True] * 3)
    yield aten.native_layer_norm_backward.default, (x, strided, [32], mean, mean, None, None, [True, False, False])
    mixed = (half(8, 32), half(8, 32), [32], mean, mean, weight, weight, [True] * 3)
    yield aten.native_layer_norm.default, (half(8, 32), [32], weight, weight, 1e-5)
    yield aten.native_layer_norm_backward.default, mixed


def batch_and_group_norms() -> Iterator[Case]:
    for shape in ((4, 8, 6, 6), (8, 24), (3, 7, 9)):
        for x in (ones(*shape), half(*shape)):
            for image in (x, channels_last(x)) if x.dim() == 4 else (x,):
                for row in (ones(shape[1]), half(shape[1])) if x.dtype == torch.bfloat16 else (ones(shape[1]),):
                    yield from _batch_norm(image, row)
    yield (
        aten.native_batch_norm_backward.default,
        (
            *(ones(4, 8, 6, 6), channels_last(ones(4, 8, 6, 6)), ones(8), None, None, ones(8), ones(8), True, 1e-5),
            [True, True, True],
        ),
    )
    for x in (ones(4, 8, 6, 6), half(4, 8, 6, 6)):
        for image in (x, channels_last(x)):
            weight, mean = ones(8).to(x.dtype), ones(4, 2).to(x.dtype)
            yield aten.native_group_norm.default, (image, weight, weight, 4, 8, 36, 2, 1e-5)
            backward = (image, image, mean, mean, weight, 4, 8, 36, 2, [True, True, True])
            yield aten.native_group_norm_backward.default, backward


def _batch_norm(x: Tensor, row: Tensor) -> Iterator[Case]:
    yield aten._native_batch_norm_legit_functional.default, (x, row, row, row, row, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_functional.default, (x, row, row, row, row, False, 0.1, 1e-5)
    yield aten._native_batch_norm_legit.no_stats, (x, row, row, True, 0.1, 1e-5)
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        yield aten.native_batch_norm_backward.default, (x, x, row, None, None, row, row, True, 1e-5, mask)
    yield aten.native_batch_norm_backward.default, (x, x, row, row, row, None, None, False, 1e-5, [True] * 3)


def losses_and_lookups() -> Iterator[Case]:
    for x in (ones(64, 32), half(64, 32), ones(32, 64).t(), ones(256, 512).t(), ones(4, 4, 16, 4).transpose(1, 2)):
        for dim in (-1, 0):
            yield aten._softmax.default, (x, dim, False)
            yield aten._log_softmax.default, (x, dim, False)
            yield aten._safe_softmax.default, (x, dim)
            dense = x.contiguous()
            yield aten._softmax_backward_data.default, (x, dense, dim, x.dtype)
            yield aten._log_softmax_backward_data.default, (x, dense, dim, x.dtype)
    for scores in (ones(64, 32), half(64, 32)):
        target = zeros64(64)
        for reduction in (0, 1, 2):
            grad = scores[:, 0].contiguous() if reduction == 0 else scores.new_ones(())
            yield aten.nll_loss_forward.default, (scores, target, None, reduction, -100)
            weighed = (grad, scores, target, None, reduction, -100, scores.new_ones(()))
            yield aten.nll_loss_backward.default, weighed
    yield aten.nll_loss_forward.default, (ones(32, 64).t(), zeros64(64), None, 1, -100)
    yield aten.nll_loss_forward.default, (ones(64, 32), zeros64(128)[::2], None, 1, -100)
    yield aten.nll_loss2d_forward.default, (ones(2, 5, 16, 16), zeros64(2, 16, 16), None, 1, -100)
    for weight in (ones(97, 32), half(97, 32)):
        grad = weight.new_ones(2, 16, 32)
        yield aten.embedding.default, (weight, zeros64(2, 16))
        yield aten.embedding.default, (weight, zeros64(16, 2).t())
        yield aten.embedding_dense_backward.default, (grad, zeros64(2, 16), 97, -1, False)
        yield aten.embedding_dense_backward.default, (grad[:1].expand(2, 16, 32), zeros64(2, 16), 97, -1, False)
        yield aten.embedding_dense_backward.default, (grad, zeros64(16, 2).t(), 97, -1, False)
    index = zeros64(16)
    yield aten.index.Tensor, (ones(64, 32), [index])
    yield aten.index.Tensor, (ones(64, 32), [ones(64, 32) > 0])
    yield aten.index_put.default, (ones(64, 32), [index], ones(16, 32), True)
    yield aten.index_put.default, (ones(64, 32), [index.int()], ones(16, 32), True)
    yield aten.gather.default, (ones(64, 32), 1, zeros64(64, 4))
    for make in (ones, half):
        yield aten.gather.default, (make(64, 32), 1, zeros64(32, 16))
        for shape in ((64, 4), (10, 20)):
            yield aten.scatter_add.default, (make(64, 32), 1, zeros64(*shape), make(*shape))
            yield aten.scatter.src, (make(64, 32), 0, zeros64(*shape), make(*shape))
            yield aten.scatter_reduce.two, (make(64, 32), 1, zeros64(*shape), make(*shape), "amax")


def images() -> Iterator[Case]:
    x = ones(4, 16, 8, 8)
    pooled, indices = ones(4, 16, 4, 4), zeros64(4, 16, 4, 4)
    for image in (x, channels_last(x), x.transpose(2, 3)):
        yield aten.max_pool2d_with_indices.default, (image, [2, 2], [2, 2])
        yield aten.avg_pool2d.default, (image, [2, 2], [2, 2])
        yield aten._adaptive_avg_pool2d.default, (image, [4, 4])
    small = (pooled, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    yield aten.max_pool2d_with_indices_backward.default, small
    yield aten.avg_pool2d_backward.default, (pooled.transpose(2, 3), x, [2, 2], [2, 2], [0, 0], False, True, None)
    for size in (8, 64):
        for image in (ones(2, 8, size, size), channels_last(ones(2, 8, size, size))):
            yield aten.upsample_nearest2d.default, (image, [2 * size, 2 * size])
            yield aten.upsample_bilinear2d.default, (image, [2 * size, 2 * size], False)
    yield aten.upsample_bilinear2d_backward.default, (ones(4, 16, 16, 16), [16, 16], [4, 16, 8, 8], False)
    yield aten.upsample_nearest2d_backward.default, (ones(4, 16, 16, 16).transpose(2, 3), [16, 16], [4, 16, 8, 8])


def products() -> Iterator[Case]:
    layouts: list[Callable[[int, int], Tensor]] = [
        lambda rows, columns: ones(rows, columns),
        lambda rows, columns: ones(columns, rows).t(),
        lambda rows, columns: ones(rows, columns + 3)[:, :columns],
        lambda rows, columns: ones(1, columns).expand(rows, columns),
        lambda rows, columns: ones(rows, 2 * columns)[:, ::2],
    ]
    for m, k, n in ((17, 33, 9), (1, 33, 9), (17, 1, 9), (17, 33, 1)):
        for left in layouts:
            for right in layouts:
                yield aten.mm.default, (left(m, k), right(k, n))
                yield aten.addmm.default, (ones(n), left(m, k), right(k, n))
    yield aten.addmm.default, (ones(64, 64).t(), ones(64, 64), ones(64, 64))
    for batch, m, k, n in ((3, 17, 33, 9), (1, 5, 6, 7), (4, 64, 64, 64)):
        lefts = (ones(batch, m, k), ones(batch, k, m).transpose(1, 2), ones(batch, 1, k).expand(batch, m, k))
        rights = (ones(batch, k, n), ones(batch, n, k).transpose(1, 2), ones(batch, k, 2 * n)[..., ::2])
        for a in lefts:
            for b in rights:
                yield aten.bmm.default, (a, b)


def attention() -> Iterator[Case]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for batch, heads, length, size in ((2, 4, 16, 8), (1, 2, 191, 32), (1, 2, 300, 64), (1, 1, 800, 16)):
        q = ones(batch, length, heads, size).transpose(1, 2)
        for causal in (False, True):
            out, log_sum = flash(q, q, q, 0.0, causal)
            yield flash, (q, q, q, 0.0, causal)
            yield flash_backward, (torch.ones_like(out), q, q, q, out, log_sum, 0.0, causal)
            yield flash_backward, (ones(*out.shape), q, q, q, out, log_sum, 0.0, causal)


def bounds() -> Iterator[Case]:
    """Ops through oneDNN: the formula may say more than the kernel takes, never less."""
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q = half(2, 64, 4, 16).transpose(1, 2)
    out, log_sum = flash(q, q, q)
    yield flash, (q, q, q)
    yield flash_backward, (torch.ones_like(out), q, q, q, out, log_sum, 0.0, False)
    for m, k, n in ((32, 32, 96), (128, 256, 64), (3, 700, 5), (8, 8, 8)):
        yield aten.mm.default, (half(m, k), half(k, n))
        yield aten.addmm.default, (half(n), half(k, m).t(), half(n, k).t())
        yield aten.bmm.default, (half(3, m, k), half(3, k, n))
    for make in (ones, half):
        for c_in, c_out, kernel, stride, groups in (
            *((3, 16, 7, 2, 1), (16, 32, 3, 1, 1), (32, 16, 1, 1, 1), (32, 16, 1, 2, 1)),
            *((16, 16, 3, 1, 16), (16, 32, 3, 1, 2)),
        ):
            for images_ in (1, 3):
                x, weight = make(images_, c_in, 20, 20), make(c_out, c_in // groups, kernel, kernel)
                yield from _convolution(x, weight, stride, groups)
                if make is ones:
                    yield from _convolution(channels_last(x), channels_last(weight), stride, groups)


def _convolution(x: Tensor, weight: Tensor, stride: int, groups: int) -> Iterator[Case]:
    pad = weight.shape[-1] // 2
    tail = ([stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups)
    bias = weight.new_ones(weight.shape[0])
    out = aten.convolution.default(x, weight, bias, *tail)
    yield aten.convolution.default, (x, weight, bias, *tail)
    backward = (torch.ones_like(out), x, weight, [weight.shape[0]], *tail, [True, True, True])
    yield aten.convolution_backward.default, backward


EXACT = (
    *(elementwise, dropouts, copies, reductions, layer_norms, batch_and_group_norms, losses_and_lookups, images),
    *(products, attention),
)


@pytest.fixture
def two_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def _mismatches(cases: Iterator[Case], num_threads: int, agree: Callable[[int, int], bool]) -> tuple[list[str], int]:
    """Cases whose formula and measurement do not agree, as text, and the number of cases."""
    wrong, count = [], 0
    for op, args in cases:
        peak, result = peak_allocated_bytes(partial(op, *args))
        signature = signature_of(op, args, {}, result)
        measured = max(0, peak - sum(o.nbytes for o in signature.outputs if o is not None))
        predicted = workspace_bytes(signature, num_threads)
        count += 1
        if not (is_known(signature.target) and agree(predicted, measured)):
            wrong.append(f"{signature.target}: formula {predicted}, measured {measured}, {signature.args}")
    return wrong, count


@pytest.mark.parametrize("cases", EXACT, ids=lambda cases: cases.__name__)
def test_formula_is_exact(cases: Callable[[], Iterator[Case]]) -> None:
    wrong, count = _mismatches(cases(), 1, lambda predicted, measured: predicted == measured)
    assert count > 0
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cases", [reductions, layer_norms, batch_and_group_norms, attention])
def test_per_thread_buffers_follow_the_thread_count(cases: Callable[[], Iterator[Case]], two_threads: int) -> None:
    wrong, _ = _mismatches(cases(), two_threads, lambda predicted, measured: predicted == measured)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bound_is_never_exceeded(num_threads: int, two_threads: int) -> None:
    torch.set_num_threads(num_threads)
    wrong, _ = _mismatches(bounds(), num_threads, lambda predicted, measured: predicted >= measured)
    assert not wrong, "\n".join(wrong)


def test_scattered_means_take_no_more_than_the_formula() -> None:
    def cases() -> Iterator[Case]:
        for make in (ones, half):
            for shape in ((64, 4), (10, 20), (64, 32)):
                yield aten.scatter_reduce.two, (make(64, 32), 1, zeros64(*shape), make(*shape), "mean")

    wrong, _ = _mismatches(cases(), 1, lambda predicted, measured: measured <= predicted)
    assert not wrong, "\n".join(wrong)


def test_scattered_rows_and_normal_draws_take_no_more_than_the_formula() -> None:
    def cases() -> Iterator[Case]:
        for make in (ones, half, lambda *shape: ones(*shape, dtype=torch.float64)):
            for x in (make(8, 16), make(16, 8).t(), make(4, 8, 16)):
                for dim in range(x.ndim):
                    rows = [3 if d == dim else size for d, size in enumerate(x.shape)]
                    yield aten.index_add.default, (x, dim, zeros64(3), make(*rows))
            yield aten.normal.Tensor_float, (make(8, 16), 0.5)
            yield aten.normal.float_Tensor, (0.5, make(8, 16))
            yield aten.normal.Tensor_Tensor, (make(8, 16), make(8, 16))

    wrong, _ = _mismatches(cases(), 1, lambda predicted, measured: measured <= predicted)
    assert not wrong, "\n".join(wrong)


def test_the_bounded_ops_are_those_that_a_vendor_library_decides() -> None:
    for cases, bounded in ((bounds, True), (products, False), (attention, False)):
        for op, args in cases():
            assert is_bound(signature_of(op, args, {}, op(*args))) is bounded


def test_unknown_ops_are_told_apart_from_those_that_need_nothing() -> None:
    x = ones(4)
    assert is_known("aten.relu.default")
    assert is_known("aten.view.default")
    assert is_known("placemat.border")
    assert not is_known("aten.linalg_eigh.default")
    assert workspace_bytes(signature_of("mylib.op.default", (x,), {}, x), 1) == 0
    assert not is_known("mylib.op.default")


def test_cuda_workspaces_are_not_predicted() -> None:
    on_cpu = spec_of(ones(64, 32))
    on_cuda = TensorSpec(on_cpu.shape, on_cpu.strides, on_cpu.dtype, "cuda", on_cpu.itemsize)
    mask = TensorSpec(on_cpu.shape, on_cpu.strides, "bool", "cuda", 1)
    signature = OpSignature("aten.native_dropout.default", (on_cuda, 0.1, True), (), (on_cuda, mask))
    assert workspace_bytes(signature, 1) == 0
