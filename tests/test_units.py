"""Sizes as text and as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from placemat.graph.errors import PlacematError
from placemat.units import format_bytes, parse_bytes, parse_fraction


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (1, 1),
        (8 * 2**30, 8589934592),
        (np.int64(300), 300),
        (np.uint8(7), 7),
        ("8 GiB", 8589934592),
        ("8GB", 8000000000),
        ("300 MiB", 314572800),
        ("1.5e9", 1500000000),
        ("1.5E9 b", 1500000000),
        ("512 kB", 512000),
        (" 512KIB ", 524288),
        ("0.1 MB", 100000),
        ("2tb", 2 * 10**12),
        ("1.25TiB", 1374389534720),
        ("0.7 KiB", 716),
        ("17", 17),
    ],
)
def test_parse_bytes(size: int | str, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes
    assert type(parse_bytes(size)) is int


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (True, "bool True"),
        (np.True_, "bool True"),
        (0.5, "budget_fraction="),
        (8.0, "float 8.0"),
        (float("nan"), "float nan"),
        (np.float32(2.0), "float 2.0"),
        (-5, "got -5"),
        (0, "got 0"),
        ("", "got ''"),
        ("0 GB", "got '0 GB'"),
        ("0.2", "0 bytes"),
        ("-8 GB", "got '-8 GB'"),
        ("nan", "got 'nan'"),
        ("inf GB", "no size"),
        ("8 gigs", "got '8 gigs'"),
        ("8 G", "no size"),
        ("80%", "no size"),
        ("1e999999999", "no size"),
        ("GiB", "no size"),
        (None, "NoneType"),
        ([8], "list"),
    ],
)
def test_parse_bytes_refuses(size: object, said: str) -> None:
    with pytest.raises(PlacematError, match="`budget_bytes`") as raised:
        parse_bytes(size)  # type: ignore[arg-type]
    assert said in str(raised.value)
    assert '"8 GiB"' in str(raised.value)


def test_parse_bytes_names_its_argument_and_minimum() -> None:
    assert parse_bytes(0, "reserved_bytes", minimum=0) == 0
    with pytest.raises(PlacematError, match=r"`reserved_bytes` must be at least 0; got -1"):
        parse_bytes(-1, "reserved_bytes", minimum=0)


@pytest.mark.parametrize("fraction", [0, 1, 0.25, np.float32(0.5), np.int64(1)])
def test_parse_fraction(fraction: float) -> None:
    assert parse_fraction(fraction) == fraction
    assert type(parse_fraction(fraction)) is float


@pytest.mark.parametrize("fraction", [True, "0.5", None, float("nan"), -0.01, 1.5, 80, 1j])
def test_parse_fraction_refuses(fraction: object) -> None:
    with pytest.raises(PlacematError, match=r"`budget_fraction`.*`budget_fraction=0.5`"):
        parse_fraction(fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (309644493, "295.3 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (8 * 2**30, "8.0 GiB"),
        (5 * 2**50, "5120.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
