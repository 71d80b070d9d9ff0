"""A small JSON file of measurements, shared by processes and kept between them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

CACHE_DIR_VARIABLE = "PLACEMAT_CACHE_DIR"
_VERSION = 1


def default_cache_dir() -> Path:
    """`$PLACEMAT_CACHE_DIR`, otherwise the user's cache directory."""
    named = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("placemat"))


class JsonCache:
    """Entries by key in `<directory>/<name>.json`.

    A measurement can always be made again, so a file that cannot be read, is no JSON, or is of another format version
    counts as empty, an entry that is not `is_valid` as absent, and the next `put` replaces it; a directory that cannot
    be written makes the cache forgetful.
    """

    def __init__(self, name: str, directory: Path | None, is_valid: Callable[[object], bool]) -> None:
        self.path = (directory if directory is not None else default_cache_dir()) / f"{name}.json"
        self._is_valid = is_valid
        self._read: tuple[tuple[int, ...], dict[str, Any]] | None = None  # (identity of the file, its entries)

    def _entries(self) -> dict[str, Any]:
        """The file's entries, read again when it was replaced."""
        try:
            status = self.path.stat()
            identity = (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._read is None or self._read[0] != identity:
                self._read = identity, self._parse()
        except OSError:
            return {}
        return self._read[1]

    def _parse(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError:
            return {}
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            return {}
        entries = content.get("entries")
        return entries if isinstance(entries, dict) else {}

    def get(self, key: str) -> Any:
        """The entry, or None."""
        entry = self._entries().get(key)
        return entry if self._is_valid(entry) else None

    def put(self, key: str, value: Any) -> Any:
        """Store an entry unless another process was faster; returns the one that stands."""
        return self.put_all({key: value})[key]

    def put_all(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Store entries, but for those that other processes stored before; returns the ones that stand.

        The file is replaced in one step (`os.replace`), so no reader ever sees half of it, and under a lock, so that
        no writer undoes what another one has just stored.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.parent):
                present = {key: entry for key, entry in self._entries().items() if self._is_valid(entry)}
                standing = {key: present.get(key, value) for key, value in values.items()}
                self._write({**present, **standing})
        except OSError:
            return dict(values)
        return standing

    def _write(self, entries: Mapping[str, Any]) -> None:
        text = json.dumps({"version": _VERSION, "entries": entries}, indent=0, sort_keys=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, self.path)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One writer at a time. Where the system has no such locks (Windows), the last of two writers wins."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
