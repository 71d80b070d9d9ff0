"""A small JSON file of measurements, shared by processes and kept between them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

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
        """Store an entry unless another process was faster; returns the one that stands.

        The file is replaced in one step (`os.replace`), so no reader ever sees half of it.
        """
        entries = self._entries()
        if self._is_valid(entries.get(key)):
            return entries[key]
        text = json.dumps({"version": _VERSION, "entries": {**entries, key: value}}, indent=1, sort_keys=True)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        except OSError:
            return value
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, self.path)
        return value
