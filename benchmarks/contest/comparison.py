"""Comparison: whether a step did what eager's did, from the same seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from placemat.training_state import same_bits
from tests.models import Workload

Verdict = Literal["bitwise", "close", "wrong"]
Tensors = Mapping[str, Tensor | None]
SEED = 3
# A part of the expected root mean square. Sums in another order stay below it (0.4 % seen, where BatchNorm of a U-Net
# is decomposed, most of whose gradients cancel), other random numbers are far above.
_CLOSE = 1e-2
# What is this much smaller than the whole is taken to be rounding: biases of attention's keys have zero gradients.
_NEGLIGIBLE = 1e-3
_ORDER: tuple[Verdict, ...] = ("bitwise", "close", "wrong")


@dataclass(frozen=True)
class Comparison:
    """Each part is `bitwise` equal, `close` (by rounding), or `wrong`.

    Attributes:
        worst_error: largest root mean square of a difference, as a part of the root mean square of what was expected.
        worst_name: the tensor that has it.
    """

    loss: Verdict
    gradients: Verdict
    buffers: Verdict
    random_state: Verdict
    worst_error: float
    worst_name: str

    @property
    def has_right_gradients(self) -> bool:
        """Whether loss and gradients are eager's, whatever became of buffers and the random state."""
        return "wrong" not in (self.loss, self.gradients)

    @property
    def verdict(self) -> Verdict:
        """The worst of all parts."""
        return max((self.loss, self.gradients, self.buffers, self.random_state), key=_ORDER.index)


def run_from_seed(workload: Workload, buffers: Tensors) -> dict[str, dict[str, Tensor | None]]:
    """What one step made, started from these buffers and `SEED`: part -> name -> tensor."""
    model = workload.model
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            before = buffers[name]
            assert before is not None
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    loss = workload.step()
    return {
        "loss": {"loss": loss.clone()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "random_state": {"generator": torch.get_rng_state()},
    }


def compare(expected: Mapping[str, Tensors], got: Mapping[str, Tensors]) -> Comparison:
    """Compare what `run_from_seed` returned for two contenders."""
    verdicts: dict[str, Verdict] = {}
    worst_error, worst_name = 0.0, ""
    for part, tensors in expected.items():
        errors = _errors(tensors, got[part])
        verdicts[part] = _verdict(max(errors.values(), default=0.0))
        for name, error in errors.items():
            if error > worst_error:
                worst_error, worst_name = error, name
    return Comparison(**verdicts, worst_error=min(worst_error, 1e9), worst_name=worst_name)


def _verdict(error: float) -> Verdict:
    if error == 0:
        return "bitwise"
    return "close" if error <= _CLOSE else "wrong"


def _errors(expected: Tensors, got: Tensors) -> dict[str, float]:
    whole = _root_mean_square([t for t in expected.values() if t is not None])
    return {name: _error(tensor, got.get(name), _NEGLIGIBLE * whole) for name, tensor in expected.items()}


def _error(expected: Tensor | None, got: Tensor | None, scale: float) -> float:
    """Relative root mean square error; inf where one is missing, or where whole numbers differ."""
    if expected is None or got is None:
        return 0.0 if expected is got else float("inf")
    if same_bits(expected, got):
        return 0.0
    if expected.shape != got.shape or not expected.is_floating_point():
        return float("inf")
    error = _root_mean_square([expected.double() - got.double()])
    # Different bits are no bitwise equality, however small the difference (0.0 and -0.0).
    return max(error / max(_root_mean_square([expected]), scale, 1e-30), 1e-30)


def _root_mean_square(tensors: list[Tensor]) -> float:
    count = sum(t.numel() for t in tensors)
    return (sum(float(t.double().square().sum()) for t in tensors) / max(count, 1)) ** 0.5
