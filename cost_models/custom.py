"""Costs that the user knows: a function of the op, or a table by operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from placemat.cost_models.base import CostModel, KnowsDistance, OpCost, Progress, prepare
from placemat.cost_models.operands import base_target
from placemat.cost_models.recorded import checked
from placemat.graph.errors import PlacematError
from placemat.graph.ir import Op

Figures = tuple[float, int]  # seconds of one run, workspace bytes

CostModelLike = CostModel | Callable[[Op], Figures | None] | Mapping[str, Figures]


class CostFunction:
    """Cost model from a function of an `Op` to (seconds, workspace bytes); None leaves the op to `otherwise`.

    Only `op.signature` (target, shapes, strides, dtypes, scalars) may decide: ops of one signature cost the same.
    """

    def __init__(self, function: Callable[[Op], Figures | None], otherwise: CostModel) -> None:
        self.function = function
        self.otherwise = otherwise

    @property
    def source(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"the function {name}; otherwise {self.otherwise.source}"

    def prepare(self, ops: Sequence[Op], progress: Progress | None) -> None:
        prepare(self.otherwise, [op for op in ops if self._own(op) is None], progress)

    def op_cost(self, op: Op) -> OpCost:
        """The function's figures.

        Raises:
            PlacematError: they are no seconds and bytes.
        """
        own = self._own(op)
        return self.otherwise.op_cost(op) if own is None else own

    def _own(self, op: Op) -> OpCost | None:
        figures: Any = self.function(op)
        if figures is None:
            return None
        if not isinstance(figures, (tuple, list)) or len(figures) != 2:
            raise PlacematError(
                f"the cost of {op.name} ({op.target}) must be (seconds, workspace bytes) or None, got {figures!r}."
            )
        return checked(figures[0], figures[1], f"the cost of {op.name} ({op.target})")


class CostTable(CostFunction):
    """Cost model from a table of operators, "aten.mm" or "aten.mm.default", to (seconds, workspace bytes).

    Every call of an operator costs the same, so this is for custom operators rather than for whole models; operators
    that are not in the table are left to `otherwise`.
    """

    def __init__(self, table: Mapping[str, Figures], otherwise: CostModel) -> None:
        self.table = dict(table)
        super().__init__(self._look_up, otherwise)

    @property
    def source(self) -> str:
        return f"a table of {len(self.table)} operators; otherwise {self.otherwise.source}"

    @property
    def far_s_per_byte(self) -> float:
        """What `otherwise` knows of it, for most operators are left to it."""
        return self.otherwise.far_s_per_byte if isinstance(self.otherwise, KnowsDistance) else 0.0

    def _look_up(self, op: Op) -> Figures | None:
        return self.table.get(op.target, self.table.get(base_target(op.target)))


def as_cost_model(given: CostModelLike, otherwise: Callable[[], CostModel]) -> CostModel:
    """What `cost_model=` accepts: a cost model, a function or a table.

    Raises:
        PlacematError: it is none of these.
    """
    if hasattr(given, "op_cost") and hasattr(given, "source"):
        model: CostModel = given
        return model
    if isinstance(given, Mapping):
        return CostTable(given, otherwise())
    if callable(given):
        return CostFunction(given, otherwise())
    raise PlacematError(
        "cost_model must be a cost model (op_cost(op) and source), a function from an op to (seconds, workspace "
        f"bytes), or a table of these by operator; got {type(given).__name__}."
    )
