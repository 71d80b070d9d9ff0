"""Worker: a process of its own in which one contender at a time runs steps, one command after another over a pipe."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import placemat
from benchmarks.contest.comparison import Comparison, compare, run_from_seed
from benchmarks.contest.op_costs import op_seconds
from benchmarks.peers import CONTENDERS, Setting
from benchmarks.timing import hold_freed_memory
from benchmarks.work import WORKS
from placemat.graph.static import static_bytes
from tests.models import Workload

_WARM_UP_STEPS = 2  # the first compiles; the second is the first to run without


class WorkerFailed(Exception):
    """A command failed in the worker, or the worker died or did not answer; the text begins with the error's type."""


class StepSession:
    """What a worker does with one workload; methods are its commands."""

    def __init__(self, work_name: str) -> None:
        self.work = WORKS[work_name]
        self.workload: Workload | None = None
        self.buffers: dict[str, torch.Tensor] = {}

    def prepare(self, contender: str, setting: Setting) -> str:
        """Build the workload anew and let it run under a setting; whatever ran before is dropped.

        Returns:
            Text that identifies what is run, see `Contender.prepare`.
        """
        self.workload = None
        torch._dynamo.reset()
        gc.collect()
        workload = self.work.build()
        self.buffers = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
        program = CONTENDERS[contender].prepare(self.work, workload, setting)
        self.workload = workload
        for _ in range(_WARM_UP_STEPS):
            self.step()
        return program()

    @property
    def _ready(self) -> Workload:
        assert self.workload is not None, "prepare() comes first"
        return self.workload

    def step(self) -> float:
        """Processor seconds of one step, gradients cleared before."""
        workload = self._ready
        workload.model.zero_grad(set_to_none=True)
        start_s = time.process_time()
        workload.step()
        return time.process_time() - start_s

    def peak_bytes(self) -> int:
        """Peak of one step by the allocator's events, with what is alive throughout: parameters, buffers, inputs."""
        model, args, kwargs, _ = self._ready
        model.zero_grad(set_to_none=True)
        peak_bytes = placemat.measure(self._ready.step, device="cpu").peak_bytes
        return sum(static_bytes(model, args, kwargs).values()) + peak_bytes

    def op_seconds(self) -> float:
        """What the operators of one step cost alone, summed."""
        self._ready.model.zero_grad(set_to_none=True)
        return op_seconds(self._ready.step)

    def record(self, path: Path) -> None:
        """Write what one step makes, for others to compare with."""
        torch.save(run_from_seed(self._ready, self.buffers), path)

    def compare(self, path: Path) -> Comparison:
        """Compare what one step makes with what another contender recorded."""
        return compare(torch.load(path), run_from_seed(self._ready, self.buffers))


def serve(
    connection: Connection, environment: dict[str, str], session_type: Callable[[str], Any], work_name: str
) -> None:
    """Run commands until the pipe is closed. One thread; freed memory stays with the process, as on accelerators."""
    os.environ.update(environment)  # a forked process has that of its server
    hold_freed_memory()
    torch.set_num_threads(1)
    session = session_type(work_name)
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(session, command)(*arguments)))
        except Exception as error:  # whatever a contender fails with is its result
            connection.send((False, f"{type(error).__name__}: {error}"))


class Worker:
    """The process, as its owner sees it; a context manager. One that died begins anew at the next call."""

    def __init__(self, session_type: Callable[[str], Any], work_name: str, patience_s: float = 900.0) -> None:
        self._what = session_type, work_name
        self._patience_s = patience_s
        self._start()

    def _start(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from configurations
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # importing torch takes longer than most steps
        self._connection, theirs = context.Pipe()
        arguments = theirs, dict(os.environ), *self._what
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def call(self, command: str, *arguments: Any) -> Any:
        """What a command returned.

        Raises:
            WorkerFailed: it failed, or there was no answer in time, after which the process is ended.
        """
        if not self._process.is_alive():
            self._start()
        try:
            self._connection.send((command, arguments))
            if not self._connection.poll(self._patience_s):
                self._process.kill()
                self._process.join()
                raise WorkerFailed(f"TimeoutError: `{command}` took over {self._patience_s:.0f} s")
            done, answer = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(5.0)
            message = f"the process ended during `{command}`, exit code {self._process.exitcode}"
            raise WorkerFailed(f"{type(error).__name__}: {message}") from None
        if not done:
            raise WorkerFailed(answer)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
