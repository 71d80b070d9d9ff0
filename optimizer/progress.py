"""Progress: who hears what planning is doing. Lines go to the log, to a function, or into a bar on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

Progress = Callable[[str], None]
PATIENCE_S = 2.0  # what is over by then needs no bar
_REFRESH_S = 0.2


class Bar:
    """A bar on a terminal: the latest line, the time that passed, and the share of the search's time limit.

    It appears after `PATIENCE_S` and is erased at the end. A thread of its own draws it, since the solver gives no sign
    of life while it runs.
    """

    def __init__(self, stream: TextIO | None = None, patience_s: float = PATIENCE_S) -> None:
        self._stream, self._patience_s = stream, patience_s
        self._line = ""
        self._search: tuple[float, float] | None = None  # when it began, and the seconds it may take

    def __call__(self, line: str) -> None:
        self._line = line

    def search_begins(self, limit_s: float) -> None:
        """From now on the bar fills up, and is full after `limit_s`."""
        self._search = (time.monotonic(), limit_s)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Draw while the block runs, if the stream is a terminal."""
        stream = self._stream or sys.stderr
        if not stream.isatty():
            yield
            return
        self._line, self._search = "", None
        done = threading.Event()
        painter = threading.Thread(target=self._paint, args=(stream, done), name="placemat-progress", daemon=True)
        painter.start()
        try:
            yield
        finally:
            done.set()
            painter.join()

    def _paint(self, stream: TextIO, done: threading.Event) -> None:
        started = time.time()
        if done.wait(self._patience_s):
            return
        form = "placemat {elapsed} |{bar:20}| {desc}"
        with tqdm(total=1.0, file=stream, leave=False, bar_format=form, dynamic_ncols=True) as bar:
            bar.start_t = started
            while not done.wait(_REFRESH_S):
                if self._search is not None:
                    begun, limit_s = self._search
                    bar.n = min(1.0, (time.monotonic() - begun) / limit_s)
                bar.set_description_str(self._line)


def make_progress(progress: bool | Progress | None) -> Progress | None:
    """What the argument `progress` of the planning functions means."""
    if progress is None:
        return Bar()
    if progress is True:
        return lambda line: print(f"placemat: {line}", file=sys.stderr, flush=True)
    return progress or None


@contextlib.contextmanager
def shown(progress: Progress | None) -> Iterator[None]:
    """Show a bar while the block runs, if `progress` is one."""
    with progress.shown() if isinstance(progress, Bar) else contextlib.nullcontext():
        yield
