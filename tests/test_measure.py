"""Peaks are the allocator's own, to the byte, whatever lived before the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from placemat.graph.errors import PlacematError
from placemat.measure import Measurement, measure, suggest_reserved_bytes

FLOATS = 10_000
BLOCK_BYTES = 4 * FLOATS


def test_peak_is_the_highest_running_sum() -> None:
    def step() -> None:
        a = torch.ones(FLOATS)
        b = a + a  # two blocks live
        del a
        c = b * b  # two again
        d = c + b  # three
        del b, c, d

    measured = measure(step, device="cpu")
    assert measured.peak_bytes == 3 * BLOCK_BYTES
    assert measured.end_bytes == 0
    assert measured.start_bytes is None
    assert measured.seconds > 0
    assert measured.device == "cpu"


def test_what_the_step_leaves_behind_is_counted() -> None:
    layer = nn.Linear(100, 50)
    x = torch.ones(8, 100)
    measured = measure(lambda: layer(x).square().sum().backward())
    assert measured.end_bytes == 4 * (100 * 50 + 50)
    assert measured.peak_bytes >= 4 * (100 * 50 + 8 * 50)  # the weight's gradient beside the output's


@pytest.mark.parametrize("profiled", [False, True], ids=["plain", "profiled"])
def test_earlier_blocks_never_lower_the_peak(profiled: bool) -> None:
    """The profiler reports the release of a block only if it was made under a profiler: both must count the same."""
    held: list[torch.Tensor] = []

    def allocate() -> None:
        held.append(torch.ones(5 * FLOATS))

    if profiled:
        assert measure(allocate, device="cpu").end_bytes == 5 * BLOCK_BYTES
    else:
        allocate()

    def step() -> None:
        held.clear()
        held.append(torch.ones(FLOATS))

    measured = measure(step, device="cpu")
    assert (measured.peak_bytes, measured.end_bytes) == (BLOCK_BYTES, BLOCK_BYTES)


def test_step_runs_once_and_its_result_is_dropped() -> None:
    calls: list[int] = []

    def step() -> torch.Tensor:
        calls.append(1)
        return torch.ones(FLOATS)

    assert measure(step, device="cpu").end_bytes == 0
    assert len(calls) == 1


def test_an_error_of_the_step_surfaces_and_leaves_the_profiler_usable() -> None:
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 // 0, device="cpu")
    assert measure(lambda: torch.ones(FLOATS), device="cpu").peak_bytes == BLOCK_BYTES


def test_refusals() -> None:
    with pytest.raises(PlacematError, match="CPU and CUDA devices; got meta"):
        measure(lambda: None, device="meta")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(PlacematError, match="already running"):
            measure(lambda: None, device="cpu")


def test_allocator_slack_is_a_question_for_cuda() -> None:
    with pytest.raises(PlacematError, match=r"cpu has no such allocator\. Remedy"):
        suggest_reserved_bytes(lambda: None, device="cpu")


def test_text() -> None:
    assert str(Measurement(3 * 2**20, 0.25, 0, None, "cpu")) == "peak 3.0 MiB, 250.0 ms on cpu"
    assert str(Measurement(512, 0.001, 0, 2**30, "cuda:0")) == "peak 512 B above 1.0 GiB, 1.0 ms on cuda:0"


@pytest.mark.gpu
def test_cuda_peak() -> None:
    torch.ones(1, device="cuda")
    mib = 2**20  # a multiple of the allocator's 512-byte granularity

    def step() -> None:
        a = torch.ones(mib // 4, device="cuda")
        b = a + a
        del a, b

    measured = measure(step)
    assert (measured.peak_bytes, measured.end_bytes) == (2 * mib, 0)
    assert measured.start_bytes is not None
    assert measured.start_bytes >= 512


@pytest.mark.gpu
def test_cuda_slack_of_small_and_large_segments() -> None:
    """Tensors of 512 bytes and of 11 MiB: a segment of 2 MiB, and one of the tensor's size rounded up to 2 MiB."""
    held: list[torch.Tensor] = []

    def step() -> None:
        held[:] = [torch.empty(128, device="cuda"), torch.empty(11 * 2**18, device="cuda")]
        held.clear()

    torch.ones(1, device="cuda")
    assert suggest_reserved_bytes(step) == pytest.approx((2 + 12 - 11) * 2**20, abs=2**20)
