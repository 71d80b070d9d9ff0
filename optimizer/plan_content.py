"""A plan as JSON values and back. What a person looks for in the file, the decisions, stands there by module path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, get_origin

from placemat.decisions import Decision
from placemat.graph.errors import InvalidSchedule, PlacematError
from placemat.graph.ir import ModuleCall
from placemat.labels import Labels, OpLabel, ValueLabel
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.schedule import Compute, Free, Schedule
from placemat.simulate import simulate

if TYPE_CHECKING:
    from placemat.plan import Plan

# Options that change what a step runs; the others say how the plan was looked for.
_STEP_OPTIONS = ("used_tangents", "tangents_held", "accumulate_grad", "segments", "keep", "recompute", "keep_eager")


def encode(plan: Plan) -> dict[str, Any]:
    """JSON values of a plan.

    Compute(op) is written as op, Free(v) as -1 - v; ops and values as rows below their column names, problem and labels
    in one; decisions as objects by module path.
    """
    content = {field.name: getattr(plan, field.name) for field in fields(plan)}
    content["schedule"] = _codes(plan.schedule)
    content["notes"] = list(plan.notes)
    content["decisions"] = _by_module(plan.decisions)
    content["problem"] = {
        "border": plan.problem.border,
        "static_bytes": plan.problem.static_bytes,
        "dropped": sorted(plan.problem.dropped),
        "ops": _rows(ProblemOp, OpLabel, plan.problem.ops, plan.labels.ops),
        "values": _rows(ProblemValue, ValueLabel, plan.problem.values, plan.labels.values),
        "modules": [[m.path, m.why_not, m.is_chain] for m in plan.labels.modules],
    }
    del content["labels"]
    return content


def step_digest(plan: Plan) -> str:
    """sha256 over what decides which step a plan runs; see `Plan.digest`."""
    options = {name: plan.options.get(name) for name in _STEP_OPTIONS}
    parts = [plan.fingerprint, plan.module_digest, plan.runs_original, _codes(plan.schedule), options]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()


def _codes(schedule: Schedule) -> list[int]:
    return [step.op if isinstance(step, Compute) else -1 - step.value for step in schedule.steps]


def decode(content: dict[str, Any], hints: dict[str, Any], path: str) -> dict[str, Any]:
    """Arguments of `Plan` from the content of a file; `hints` are the types of its fields.

    Raises:
        PlacematError: the content is not that of a plan, or its schedule is not what the figures say.
    """
    content = dict(content)
    wrong = sorted(content.keys() ^ (hints.keys() - {"labels"}))
    if not wrong:
        try:
            content["schedule"] = Schedule(
                tuple(Compute(code) if code >= 0 else Free(-1 - code) for code in content["schedule"])
            )
            content["problem"], content["labels"] = _problem(content["problem"])
            content["decisions"] = _in_order(content["decisions"])
            content["notes"] = tuple(content["notes"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlacematError(f"{path} holds a plan that cannot be read: {error!r}. Plan again.") from None
        wrong = sorted(name for name, hint in hints.items() if not _fits(content[name], hint))
    if wrong:
        raise PlacematError(f"{path} holds a plan whose entries are not those of a plan: {wrong}. Plan again.")
    _check_figures(content, path)
    return content


def _check_figures(content: dict[str, Any], path: str) -> None:
    """The referee once more: figures that do not belong to the schedule are refused."""
    try:
        simulation = simulate(content["problem"], content["schedule"])
    except (InvalidSchedule, TypeError) as error:
        raise PlacematError(f"{path} holds a plan whose schedule is not one: {error}. Plan again.") from None
    said = content["predicted_peak_bytes"], content["recompute_seconds"]
    if said != (simulation.peak_bytes, simulation.recompute_seconds):
        raise PlacematError(
            f"{path} says that its schedule needs {said[0]} bytes and {said[1]} s of recomputation; it needs "
            f"{simulation.peak_bytes} bytes and {simulation.recompute_seconds} s: the file was edited. Plan again."
        )


def _rows(kind: type, label_kind: type, things: Sequence[Any], labels: Sequence[Any]) -> dict[str, Any]:
    names = [[field.name for field in fields(k)] for k in (kind, label_kind)]
    return {
        "columns": [*names[0], *names[1]],
        "rows": [
            [getattr(thing, name) for name in names[0]] + [getattr(label, name) for name in names[1]]
            for thing, label in zip(things, labels, strict=True)
        ],
    }


def _problem(content: dict[str, Any]) -> tuple[Problem, Labels]:
    ops, op_labels = _split(ProblemOp, OpLabel, content["ops"])
    values, value_labels = _split(ProblemValue, ValueLabel, content["values"])
    problem = Problem(ops, values, content["border"], content["static_bytes"], frozenset(content["dropped"]))
    modules = tuple(ModuleCall(path, why_not, is_chain) for path, why_not, is_chain in content["modules"])
    return problem, Labels(op_labels, value_labels, modules)


def _split(kind: type, label_kind: type, table: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    own = {field.name for field in fields(kind)}
    things, labels = [], []
    for row in table["rows"]:
        cells = {
            name: tuple(cell) if isinstance(cell, list) else cell
            for name, cell in zip(table["columns"], row, strict=True)
        }
        things.append(kind(**{name: cell for name, cell in cells.items() if name in own}))
        labels.append(label_kind(**{name: cell for name, cell in cells.items() if name not in own}))
    return tuple(things), tuple(labels)


def _by_module(decisions: Iterable[Decision]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for decision in decisions:
        row = asdict(decision)
        grouped.setdefault(row.pop("module_path"), []).append(row)
    return grouped


def _in_order(grouped: dict[str, list[dict[str, Any]]]) -> tuple[Decision, ...]:
    decisions = []
    for module_path, rows in grouped.items():
        for row in rows:
            shape = None if row["shape"] is None else tuple(row["shape"])
            decisions.append(Decision(**{**row, "module_path": module_path, "shape": shape}))
    return tuple(sorted(decisions, key=lambda decision: decision.index))


def _fits(value: object, hint: Any) -> bool:
    """Whether a value that JSON gave is of a field's type, as far as its outermost type goes."""
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    outer = get_origin(hint) if get_origin(hint) in (dict, tuple) else hint
    return isinstance(value, outer) and (not isinstance(value, bool) or hint is bool)
