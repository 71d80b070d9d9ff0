"""Recorded: costs from a file of measurements, for plans that must come out the same anywhere.

    measured = placemat.Measured()                                        # on the machine with the device
    placemat.plan(model, budget, args, cost_model=measured)
    measured.recorded().save("h200.json")

    placemat.plan(model, budget, args, cost_model=placemat.Recorded.load("h200.json"))   # on any machine

The file is JSON: a version, the source in words, and one entry per op, filed under the op's signature as text (see
`signature_text`), with seconds and workspace bytes; and `far_s_per_byte`, 0 where it has none. It is meant to be read
and may be edited.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from placemat.cost_models.base import CostModel, OpCost, Progress, prepare
from placemat.cost_models.signature_text import signature_text
from placemat.cost_models.workspaces import is_free
from placemat.graph.errors import PlacematError, UnsupportedFeature
from placemat.graph.ir import Op

_VERSION = 1


class Recorded:
    """Cost model that repeats what was measured.

    Views and pseudo-ops take no time and need no entry.

    Args:
        costs: by signature as text.
        source: where the figures come from, for people.
        otherwise: cost model for ops that are not in the recording, which `plan.notes` then names; None refuses them.
        far_s_per_byte: see `cost_models.distance`.
    """

    def __init__(
        self,
        costs: Mapping[str, OpCost],
        *,
        source: str,
        otherwise: CostModel | None = None,
        far_s_per_byte: float = 0.0,
    ) -> None:
        self.costs = dict(costs)
        self.far_s_per_byte = far_s_per_byte
        self.otherwise = otherwise
        self._source = source

    @property
    def source(self) -> str:
        return f"recorded: {self._source.removeprefix('recorded: ')}"

    def prepare(self, ops: Sequence[Op], progress: Progress | None) -> None:
        if self.otherwise is not None:
            prepare(self.otherwise, [op for op in ops if signature_text(op.signature) not in self.costs], progress)

    def op_cost(self, op: Op) -> OpCost:
        """The recorded cost.

        Raises:
            UnsupportedFeature: the op is not in the recording and there is no `otherwise`.
        """
        text = signature_text(op.signature)
        if text in self.costs:
            return self.costs[text]
        if self.otherwise is not None:
            cost = self.otherwise.op_cost(op)
            return cost if is_free(op.signature) else replace(cost, estimated="they are not in the recording")
        if is_free(op.signature):
            return OpCost(0.0, 0)
        raise UnsupportedFeature(
            f"the recording ({self.source}, {len(self.costs)} ops) has no figures for {op.name}, {text}"
            f"{', ' + op.source if op.source else ''}. Remedy: record a plan of this very call, with the same shapes, "
            "or pass `otherwise=`, a cost model for what is not in it."
        )

    def save(self, path: Path | str) -> None:
        entries = {text: [c.runtime_s, c.workspace_bytes] for text, c in sorted(self.costs.items())}
        content = {
            "version": _VERSION,
            "source": self._source,
            "far_s_per_byte": self.far_s_per_byte,
            "costs": entries,
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str, *, otherwise: CostModel | None = None) -> Recorded:
        """Read a recording.

        Raises:
            PlacematError: the file is no recording, or one of another version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlacematError(f"{path} is no recording of costs: it is not JSON ({error}).") from None
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise PlacematError(f"{path} is no recording of costs in version {_VERSION} of the format.")
        if not isinstance(content.get("costs"), dict):
            raise PlacematError(f"{path} is no recording of costs: it has no table `costs`.")
        costs = {text: _parse(path, text, entry) for text, entry in content["costs"].items()}
        far = checked(content.get("far_s_per_byte", 0.0), 0, f"`far_s_per_byte` in {path}").runtime_s
        return cls(costs, source=str(content.get("source", path)), otherwise=otherwise, far_s_per_byte=far)


def _parse(path: Path | str, text: str, entry: Any) -> OpCost:
    if isinstance(entry, list) and len(entry) == 2:
        return checked(entry[0], entry[1], f"the entry for {text} in {path}")
    raise PlacematError(f"the entry for {text} in {path} must be [seconds, workspace bytes], got {entry!r}.")


def checked(runtime_s: Any, workspace_bytes: Any, what: str) -> OpCost:
    """A cost from figures that someone else wrote.

    Raises:
        PlacematError: seconds are negative or not finite, or bytes are no integer from 0 on.
    """
    is_time = isinstance(runtime_s, (int, float)) and not isinstance(runtime_s, bool) and 0 <= runtime_s < math.inf
    is_size = isinstance(workspace_bytes, int) and not isinstance(workspace_bytes, bool) and workspace_bytes >= 0
    if not is_time or not is_size:
        raise PlacematError(
            f"{what} must be seconds (finite, not negative) and workspace bytes (an int, not negative), got "
            f"{runtime_s!r} and {workspace_bytes!r}."
        )
    return OpCost(float(runtime_s), workspace_bytes)
