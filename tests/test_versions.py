"""The script that runs tests against another torch: what it reads from pytest, and what it pins."""

from __future__ import annotations

import pytest

from tests import versions


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("===== 3 failed, 310 passed, 2 skipped, 40 deselected in 61.20s (0:01:01) =====", (310, 3, 2)),
        ("12 passed, 1 warning in 3.1s", (12, 0, 0)),
        ("1 failed, 5 passed, 2 errors in 1.0s", (5, 3, 0)),
        ("no tests ran in 0.01s", (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_counts_are_those_of_the_last_line(last_line, expected):
    assert tuple(versions.counts(f"9 passed\n{last_line}\n").values()) == (expected if last_line else (9, 0, 0))


def test_torch_alone_is_left_open():
    lines = versions.constraints_without_torch().splitlines()
    assert not any(line.startswith("torch==") for line in lines)
    assert any(line.startswith("torchmetrics==") for line in lines)
    assert all((versions.ROOT / path).exists() for path in versions.CORE)
