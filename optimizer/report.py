"""Report: two training steps compared, thing by thing and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from placemat.measure import Measurement
from placemat.training_state import same_bits
from placemat.units import format_bytes

Status = Literal["bitwise", "close", "different", "missing"]


@dataclass(frozen=True)
class Row:
    """Comparison of one thing: `missing` means that one of the two steps has none.

    `close` is within the tolerances of `torch.testing.assert_close` for the dtype.
    """

    name: str
    status: Status
    max_abs_difference: float | None = None
    detail: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """What `verify` found.

    Attributes:
        rows: one for the loss, each output, gradient, buffer, mutated input and generator.
        reference: peak and time of the model's own step.
        optimized: peak and time of the optimized step.
        nondeterministic: names of rows in which two runs of the *reference* differed from each other: there a
            difference says nothing about the plan.
        notes: what was compared if it is not a planned step with an unplanned one.
    """

    rows: tuple[Row, ...]
    reference: Measurement
    optimized: Measurement
    nondeterministic: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything is bitwise equal."""
        return all(row.status == "bitwise" for row in self.rows)

    def count(self, status: Status) -> int:
        return sum(row.status == status for row in self.rows)

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.count(s)} {s}" for s in ("bitwise", "close", "different", "missing"))
        return f"Report(ok={self.ok}: {counts})"

    def __str__(self) -> str:
        differing = [row for row in self.rows if row.status != "bitwise"]
        lines = [
            f"{self.count('bitwise')} of {len(self.rows)} compared are bitwise equal"
            + "".join(f", {self.count(s)} {s}" for s in ("close", "different", "missing") if self.count(s)),
            f"peak     {format_bytes(self.reference.peak_bytes)} -> {format_bytes(self.optimized.peak_bytes)}"
            "  allocated by the step, beside parameters, buffers and inputs",
            f"seconds  {self.reference.seconds:.4f} -> {self.optimized.seconds:.4f}  under the profiler on the CPU",
        ]
        width = max((len(row.name) for row in differing), default=0)
        for row in differing:
            size = "" if row.max_abs_difference is None else f"  max |difference| {row.max_abs_difference:.3g}"
            own = "  (differs between two runs of the reference)" if row.name in self.nondeterministic else ""
            lines.append(f"  {row.name:<{width}}  {row.status:<9}{size}  {row.detail}{own}".rstrip())
        return "\n".join([*lines, *(f"note     {note}" for note in self.notes)])


def compare_all(reference: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each name that either step has, in order; values are tensors on the host, plain data, or None."""
    for name in dict.fromkeys([*reference, *result]):
        yield _compare(name, reference.get(name), result.get(name))


def _compare(name: str, expected: Any, got: Any) -> Row:
    if expected is None or got is None:
        if expected is got:
            return Row(name, "bitwise")
        return Row(name, "missing", detail=f"None in the {'reference' if expected is None else 'optimized'} step")
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        same = type(expected) is type(got) and expected == got
        detail = "" if same or isinstance(expected, bytes) else f"{expected!r} became {got!r}"
        return Row(name, "bitwise" if same else "different", detail=detail)
    if same_bits(expected, got):
        return Row(name, "bitwise", 0.0)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        before, after = (f"{t.dtype}{list(t.shape)}" for t in (expected, got))
        return Row(name, "different", detail=f"{before} became {after}")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (expected.to(wide) - got.to(wide)).abs().max().item()
    return Row(name, "close" if _is_close(expected, got) else "different", difference)


def _is_close(expected: Tensor, got: Tensor) -> bool:
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError:
        return False
    return True
