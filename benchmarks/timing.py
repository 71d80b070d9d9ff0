"""Times that mean something on a machine that does other things too: interleaved runs, medians, ratios."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

# mallopt(3): never give the top of the heap back, never take large blocks straight from the system.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def hold_freed_memory() -> bool:
    """Let malloc hold what is freed, as allocators of accelerators do; False where the C library is not glibc.

    Otherwise glibc gives large blocks back to the system when a step is over, and the next one pays for their pages
    again: up to 3 % of a step here, most where most is kept (6,800 page faults a step of a 4-layer GPT-2 that keeps
    everything, none at half of its activations). Recomputation would look cheaper than its operators are.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_MAX, 0))


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender beside the reference's.

    Attributes:
        seconds: median over rounds.
        ratio: median of the ratios to the reference, taken round by round.
        ratios: these, one for each round.
        fastest_ratio: of the fastest rounds of both: other work on the machine only ever adds seconds, so with many
            rounds this one is disturbed least.
    """

    seconds: float
    ratio: float
    ratios: tuple[float, ...]
    fastest_ratio: float


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Whose turn it is, once in each round, and whether it counts: one round more comes first, which does not."""
    contenders, order = list(names), random.Random(0)
    for round_index in range(-1, rounds):
        for name in order.sample(contenders, len(contenders)):
            yield name, round_index >= 0


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    reference: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all contenders once per round, in an order that is drawn anew for each (and is the same in every run).

    A machine's speed drifts by more than the differences looked for. Within a round it hardly does, so ratios are
    taken there; drawing the order cancels what one contender leaves behind for the next (allocator state, clocks).
    Each timed run follows another one of the same contender, as steps of a training do: right after a contender with
    other tensors it would find its own, and most of all what it keeps, in none of the caches. The first round is not
    counted. With `time.process_time` as clock, what other processes run is not counted either.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for name, is_counted in turns(contenders, rounds):
        contenders[name]()
        start = clock()
        contenders[name]()
        elapsed = clock() - start
        if is_counted:
            seconds[name].append(elapsed)
    ratios = {name: tuple(a / b for a, b in zip(own, seconds[reference], strict=True)) for name, own in seconds.items()}
    return {
        name: Timing(
            seconds=statistics.median(own),
            ratio=statistics.median(ratios[name]),
            ratios=ratios[name],
            fastest_ratio=min(own) / min(seconds[reference]),
        )
        for name, own in seconds.items()
    }
