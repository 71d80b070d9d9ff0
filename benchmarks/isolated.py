"""Run a function in a process of its own, with limits on time and memory: what blows up there takes nobody along."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

ENDING_S = 10.0  # that a process whose result is there may take to end


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        value: what the function returned; None if it did not.
        failure: why not, in words.
        seconds: wall-clock, of the function alone where it returned, else until it was over.
        cpu_seconds: of all threads of the process while the function ran; on a busy machine the better figure.
        memory_bytes: highest resident memory of the process, where it lived to tell.
    """

    value: Any
    failure: str | None
    seconds: float
    cpu_seconds: float | None = None
    memory_bytes: int | None = None


def run_isolated(
    function: Callable[..., Any], *args: Any, time_limit_s: float, memory_limit_bytes: int | None = None
) -> Outcome:
    """Call a function of a module, by spawn; arguments and result are pickled.

    Args:
        function: found by its module and name in the new process.
        args: for it.
        time_limit_s: wall-clock, after which the process is killed.
        memory_limit_bytes: what it may allocate; None for no limit.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, args, memory_limit_bytes))
    started = time.monotonic()
    process.start()
    sender.close()
    limit = "" if memory_limit_bytes is None else f"; memory limit {memory_limit_bytes / 1e9:.1f} GB"
    try:
        if receiver.poll(time_limit_s):
            outcome: Outcome = receiver.recv()
            process.join(ENDING_S)
            return outcome
        return Outcome(None, f"killed after {time_limit_s:.0f} s", time.monotonic() - started)
    except EOFError:
        process.join()
        return Outcome(None, f"died with exit code {process.exitcode}{limit}", time.monotonic() - started)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _child(
    sender: Connection, function: Callable[..., Any], args: tuple[Any, ...], memory_limit_bytes: int | None
) -> None:
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    started, cpu_started = time.monotonic(), time.process_time()
    try:
        value, failure = function(*args), None
    except MemoryError:
        value, failure = None, f"out of memory; limit {(memory_limit_bytes or 0) / 1e9:.1f} GB"
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    unit = 1 if sys.platform == "darwin" else 1024
    memory_bytes = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender.send(Outcome(value, failure, seconds, cpu_seconds, memory_bytes))
