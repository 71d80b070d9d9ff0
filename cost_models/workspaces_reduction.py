"""CPU workspaces of reductions and of losses that reduce an elementwise result.

Source of the rules: aten/src/ATen/native/ReduceOps.cpp, Loss.cpp and TensorIteratorReduce.cpp. Formulas reproduce, to
the byte unless their docstring says "upper bound", the events that torch.profiler reports for torch 2.13 on CPU.
"""

from __future__ import annotations

from placemat.cost_models.operands import GRAIN_SIZE, REDUCED, argument, output_tensors, tensor
from placemat.cost_models.workspaces_pointwise import NUMBER_BYTES, Formula, cast_bytes, dtype_itemsize
from placemat.graph.ir import OpSignature, TensorSpec


def two_pass_bytes(numel_in: int, out_bytes: int, numel_out: int, num_threads: int) -> int:
    """Per-thread partial results of a full reduction (`two_pass_reduction`, TensorIteratorReduce.cpp)."""
    if numel_out != 1 or numel_in < GRAIN_SIZE or num_threads == 1:
        return 0
    return num_threads * out_bytes


def _sum(signature: OpSignature, num_threads: int) -> int:
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    return cast_bytes([x], out.dtype) + two_pass_bytes(x.numel, out.nbytes, out.numel, num_threads)


def mean_bytes(x: TensorSpec, numel_out: int, out_dtype: str, num_threads: int) -> int:
    """`sum(x).div_(n)`, where n is wrapped; 16-bit dtypes are summed in a float32 copy.

    Source: mean_cpu_out in aten/src/ATen/native/ReduceOps.cpp.
    """
    reduced = out_dtype in REDUCED
    dtype = "float32" if reduced else out_dtype
    size = dtype_itemsize(dtype)
    partial = two_pass_bytes(x.numel, numel_out * size, numel_out, num_threads)
    sum_bytes = cast_bytes([x], dtype) + partial
    return (numel_out * size if reduced else 0) + max(sum_bytes, NUMBER_BYTES + size)


def _mean(signature: OpSignature, num_threads: int) -> int:
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    return mean_bytes(x, out.numel, out.dtype, num_threads)


def _full_reduction(signature: OpSignature, num_threads: int) -> int:
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    return two_pass_bytes(x.numel, out.nbytes, out.numel, num_threads)


def _variance(signature: OpSignature, num_threads: int) -> int:
    """A full variance in float32 or float64 takes the mean first."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    if out.numel != 1 or x.dtype in REDUCED:
        return 0
    return out.nbytes + mean_bytes(x, 1, out.dtype, num_threads)


def _any(signature: OpSignature, num_threads: int) -> int:
    x = tensor(signature, 0)
    return x.numel if x.dtype != "bool" else 0


def _logsumexp(signature: OpSignature, num_threads: int) -> int:
    """Maxima, then exp(x - maxima) beside them. An upper bound."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    return x.numel * out.itemsize + 2 * out.nbytes + 2 * NUMBER_BYTES


def _resized_loss(signature: OpSignature, num_threads: int) -> int:
    """The elementwise loss twice, once as the storage that the 0-dimensional result keeps, and its mean."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    if argument(signature, 2, "reduction", 1) == 0:
        return 0
    return 2 * x.numel * out.itemsize - out.nbytes + mean_bytes(x, 1, out.dtype, num_threads)


def _huber_loss(signature: OpSignature, num_threads: int) -> int:
    """The elementwise loss and its mean."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    if argument(signature, 2, "reduction", 1) == 0:
        return 0
    return x.numel * out.itemsize + mean_bytes(x, 1, out.dtype, num_threads)


def _scalar_mean_after(signature: OpSignature, num_threads: int) -> int:
    """Backward of a mean loss that divides a 0-dimensional gradient or the result by a number."""
    return NUMBER_BYTES + output_tensors(signature)[0].itemsize


def _bce(signature: OpSignature, num_threads: int) -> int:
    """The elementwise loss, whose storage the 0-dimensional result keeps, its mean and the mean of weights."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    if argument(signature, 3, "reduction", 1) == 0:
        return 0
    return x.nbytes + mean_bytes(x, 1, out.dtype, num_threads)


def _bce_backward(signature: OpSignature, num_threads: int) -> int:
    return _scalar_mean_after(signature, num_threads) if argument(signature, 4, "reduction", 1) == 1 else 0


def _bce_with_logits(signature: OpSignature, num_threads: int) -> int:
    """Composite: two elementwise temporaries at once, and their mean. An upper bound."""
    x, out = tensor(signature, 0), output_tensors(signature)[0]
    return 2 * x.nbytes + mean_bytes(x, 1, out.dtype, num_threads)


def _zero(signature: OpSignature, num_threads: int) -> int:
    return 0


def _named(formula: Formula, names: str) -> dict[str, Formula]:
    return {f"aten.{name}": formula for name in names.split()}


_ZERO = """argmax argmin max min var_mean prod all linalg_vector_norm mse_loss_backward smooth_l1_loss_backward
huber_loss_backward"""

FORMULAS: dict[str, Formula] = {
    **_named(_full_reduction, "amax amin"),
    **_named(_variance, "var std"),
    **_named(_resized_loss, "mse_loss smooth_l1_loss"),
    **_named(_zero, _ZERO),
    "aten.sum": _sum,
    "aten.mean": _mean,
    "aten.any": _any,
    "aten.logsumexp": _logsumexp,
    "aten.huber_loss": _huber_loss,
    "aten.binary_cross_entropy": _bce,
    "aten.binary_cross_entropy_backward": _bce_backward,
    "aten.binary_cross_entropy_with_logits": _bce_with_logits,
}
