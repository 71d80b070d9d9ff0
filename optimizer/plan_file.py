"""The file format of plans: one JSON object with a schema number and a digest of its content.

    {"format": "placemat.plan", "schema": 4, "plan": {...}, "sha256": "..."}

Reading executes nothing. The digest is over the canonical JSON text (sorted keys, no spaces) of the other three
entries: it finds damage and careless edits, it is no signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from placemat.graph.errors import PlacematError, PlanMismatch

FORMAT = "placemat.plan"
SCHEMA = 4
_MAX_DEPTH = 5


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a plan's content; readers see the old file or the whole new one, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    text = to_text(content)
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=target.name, suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private, a plan is meant for every rank
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Content of a plan file.

    Raises:
        PlanMismatch: another version of placemat wrote the file, in a format that this one does not read.
        PlacematError: the file is truncated, is something else, or was changed after it was written.
        OSError: the file cannot be read.
    """
    return from_text(Path(path).read_bytes(), str(path))


def to_text(content: dict[str, Any]) -> str:
    """Text of a plan file."""
    body: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA, "plan": content}
    return _readable({**body, "sha256": _digest(body)})


def from_text(text: bytes, path: str) -> dict[str, Any]:
    """Content of a plan from the bytes of its file; `path` is what errors call it, and they are those of `read`."""
    try:
        body = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlacematError(f"{path} is no plan file, or a truncated one: {error}. Save the plan again.") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise PlacematError(f'{path} is JSON but no plan file: it lacks "format": "{FORMAT}".')
    schema = body.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise PlacematError(f"{path} has the schema {schema!r}; plan files of this version have {SCHEMA}.")
    if schema > SCHEMA:
        raise PlanMismatch(
            f"{path} was written by a newer placemat: its schema is {schema}, this version reads {SCHEMA}. Update "
            "placemat or plan again."
        )
    if schema < SCHEMA:
        raise PlanMismatch(
            f"{path} was written by an older placemat: its schema is {schema}, this version reads {SCHEMA}. Plan again."
        )
    if body.pop("sha256", None) != _digest(body):
        raise PlacematError(f"{path} was changed after it was saved: its sha256 does not match. Plan again.")
    if not isinstance(body.get("plan"), dict):
        raise PlacematError(f"{path} holds no plan. Plan again.")
    content: dict[str, Any] = body["plan"]
    return content


def _readable(value: Any, depth: int = 0) -> str:
    """JSON text with a line per entry of the outer objects and per row of a table, for people and git."""
    if depth == _MAX_DEPTH or not isinstance(value, (dict, list)) or not _is_nested(value):
        return json.dumps(value, allow_nan=False)
    indent = " " * (depth + 1)
    if isinstance(value, dict):
        entries = [f"{indent}{json.dumps(key)}: {_readable(entry, depth + 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(indent + _readable(entry, depth + 1) for entry in value) + "\n" + " " * depth + "]"


def _is_nested(value: dict[str, Any] | list[Any]) -> bool:
    return any(isinstance(entry, (dict, list)) for entry in (value.values() if isinstance(value, dict) else value))


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
