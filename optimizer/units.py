"""Sizes as people write them: text to bytes, and bytes to text."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np

from placemat.graph.errors import PlacematError

# Decimal prefixes are the SI's (kB = 1000 bytes), binary ones those of IEC 80000-13 (KiB = 1024 bytes).
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
# An exponent of two digits covers every size that exists; more digits would only make huge integers.
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d{1,2})?)\s*(?P<unit>[a-z]*)", re.ASCII)
_EXAMPLE = 'Give an int (8 * 2**30) or text such as "8 GiB", "300 MiB" or "8GB".'


def parse_bytes(size: int | str, what: str = "budget_bytes", *, minimum: int = 1) -> int:
    """Bytes of a size given as an int or as text.

    Args:
        size: a Python or numpy int, or text: a decimal number and one of B, kB, MB, GB, TB (powers of 1000), KiB, MiB,
            GiB, TiB (powers of 1024), in any case, with or without a space. A number without a unit is bytes; a part
            of a byte is dropped.
        what: name of the argument, for messages.
        minimum: smallest size accepted.

    Raises:
        PlacematError: `size` is a bool, a float, below `minimum`, or text that is no size.
    """
    if isinstance(size, (bool, np.bool_)):
        raise PlacematError(f"`{what}` is a number of bytes; got the bool {size}. {_EXAMPLE}")
    if isinstance(size, (float, np.floating)):
        raise PlacematError(
            f"`{what}` is a number of bytes and bytes are ints; got the float {size}. {_EXAMPLE} "
            "A fraction of the way from the floor to the keep-everything peak is `budget_fraction=0.5`."
        )
    if isinstance(size, str):
        num_bytes = _parse_text(size, what)
    elif isinstance(size, (int, np.integer)):
        num_bytes = int(size)
    else:
        raise PlacematError(f"`{what}` is an int or text; got {type(size).__name__}. {_EXAMPLE}")
    if num_bytes < minimum:
        wanted = "positive" if minimum == 1 else f"at least {minimum}"
        raise PlacematError(f"`{what}` must be {wanted}; got {size!r}, which is {num_bytes} bytes. {_EXAMPLE}")
    return num_bytes


def _parse_text(text: str, what: str) -> int:
    """Bytes that a text says, rounded down; see `parse_bytes`."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match["unit"] not in _UNIT_BYTES:
        raise PlacematError(f"`{what}` is no size: got {text!r}. {_EXAMPLE}")
    return int(Fraction(match["number"]) * _UNIT_BYTES[match["unit"]])


def parse_fraction(fraction: float, what: str = "budget_fraction") -> float:
    """A number from 0 to 1, both included, as a float.

    Raises:
        PlacematError: `fraction` is no real number, not a number (NaN), or outside [0, 1].
    """
    example = f"Give a number from 0 (the floor) to 1 (the keep-everything peak), for example `{what}=0.5`."
    if isinstance(fraction, (bool, np.bool_)) or not isinstance(fraction, (int, float, np.integer, np.floating)):
        raise PlacematError(f"`{what}` is a number; got {type(fraction).__name__} {fraction!r}. {example}")
    if not 0 <= fraction <= 1:  # false for NaN as well
        raise PlacematError(f"`{what}` must lie in [0, 1]; got {fraction}. {example}")
    return float(fraction)


def format_bytes(num_bytes: int) -> str:
    """Bytes with one decimal and a binary prefix ("295.3 MiB"); exact below 1 KiB ("512 B")."""
    if num_bytes < 0:
        return "-" + format_bytes(-num_bytes)
    if num_bytes < 1024:
        return f"{num_bytes} B"
    scaled = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        scaled /= 1024
        if round(scaled, 1) < 1024:
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1024:.1f} TiB"
