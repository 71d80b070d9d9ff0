"""What the user wants kept or recomputed, by name: from `keep=` and `recompute=` to facts of an OpGraph.

An entry names forward ops in one of three ways, each with the wildcards of `fnmatch` (`*` also crosses dots):

- a module path, "encoder.layer.*.attention": every op of that module and of the modules inside it;
- an operator, "aten.native_dropout", with or without its overload, written with a dot or with "::";
- the name that a plan gives to one op, "native_dropout_3".

An entry that matches a module is about modules alone: "linear*" does not mean ops of that name elsewhere.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from placemat.graph.errors import ConstraintError
from placemat.graph.ir import Op, OpGraph

_MOST_SUGGESTIONS = 5
# Share of equal letters (difflib's ratio) from which on another name is worth showing for one that matches nothing.
_SIMILAR = 0.5


@dataclass(frozen=True)
class Constraints:
    """Checked entries of `keep=` and `recompute=`; what they match is seen when a graph is there (`constrain`)."""

    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keep or self.recompute)

    def __str__(self) -> str:
        given = {"keep": self.keep, "recompute": self.recompute}
        return ", ".join(f"{name}={list(entries)}" for name, entries in given.items() if entries)


def parse_constraints(keep: Iterable[object], recompute: Iterable[object]) -> Constraints:
    """Entries are texts, or operators of `torch.ops`, which stand for their names.

    Raises:
        ConstraintError: an argument is no list, or an entry is no name.
    """
    return Constraints(_entries("keep", keep), _entries("recompute", recompute))


def parse_patterns(argument: str, given: Iterable[object]) -> tuple[str, ...]:
    """Module-path patterns.

    Raises:
        ConstraintError: the argument is no list of texts.
    """
    entries = _entries(argument, given)
    if any(not isinstance(entry, str) for entry in given):
        raise ConstraintError(f"{argument}= is about modules, not operators: {entries}.")
    return entries


def _entries(argument: str, given: Iterable[object]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConstraintError(f"{argument}= is a list of module-name patterns and operators: write [{given!r}].")
    entries = []
    for entry in given:
        is_operator = type(entry).__name__ in ("OpOverload", "OpOverloadPacket")
        if not isinstance(entry, str) and not is_operator:
            raise ConstraintError(
                f"{argument}= got an entry of type {type(entry).__name__}. Remedy: a module-name pattern such as "
                '"layers.*.attention", an operator such as "aten.native_dropout", or the name of one op in a plan.'
            )
        text = str(entry).strip().replace("::", ".")
        if not text:
            raise ConstraintError(f"{argument}= got an empty entry.")
        entries.append(text)
    return tuple(entries)


@dataclass(frozen=True)
class _Selection:
    """The forward ops that an entry matches; `is_exact` if it names an op or an operator, without wildcards."""

    entry: str
    ops: tuple[int, ...]
    is_exact: bool


def constrain(graph: OpGraph, constraints: Constraints, why_never: Callable[[int], str | None]) -> OpGraph:
    """The graph in which no matching op of `keep` is recomputable, and the values of `recompute` are `dropped`.

    Args:
        graph: as lowered.
        constraints: what was asked for.
        why_never: reason that an op of the graph that is not recomputable stays so even if the user names it, or None
            if only its purity is unknown: naming it in `recompute` then declares it pure.

    Raises:
        ConstraintError: an entry matches no op of the forward, two entries contradict each other, or nothing of what
            an entry matches can be recomputed.
    """
    kept = [_select(graph, "keep", entry) for entry in constraints.keep]
    again = [_select(graph, "recompute", entry) for entry in constraints.recompute]
    for k, r in itertools.product(kept, again):
        if both := set(k.ops) & set(r.ops):
            raise _contradiction(graph.ops[min(both)], k.entry, r.entry)
    ops = list(graph.ops)
    for selection in kept:
        for index in selection.ops:
            if ops[index].recomputable:
                ops[index] = replace(ops[index], recomputable=False, why_not=f"keep={selection.entry!r} was asked for")
    dropped: dict[int, str] = {}
    notes: list[str] = []
    for index in [index for selection in again for index in _declared_pure(graph, selection, why_never)]:
        ops[index] = replace(ops[index], recomputable=True, why_not=None)
    for selection in again:
        notes += _drop(graph, ops, selection, dropped)
    return replace(graph, ops=tuple(ops), notes=(*graph.notes, *notes), dropped=dropped)


def _declared_pure(graph: OpGraph, selection: _Selection, why_never: Callable[[int], str | None]) -> list[int]:
    """Ops that are recomputable because the user names them."""
    declared = [index for index in selection.ops if selection.is_exact and not graph.ops[index].recomputable]
    for index in declared:
        if (why := why_never(index)) is not None:
            raise _cannot(selection.entry, graph.ops[index], why)
    return declared


def _drop(graph: OpGraph, ops: Sequence[Op], selection: _Selection, dropped: dict[int, str]) -> list[str]:
    """Add what an entry drops to `dropped`; returns notes on what it leaves out because that cannot be recomputed."""
    entry = selection.entry
    stuck = [ops[index] for index in selection.ops if not ops[index].recomputable]
    made = [v for index in selection.ops if ops[index].recomputable for v in ops[index].outputs]
    droppable = [v for v in made if not graph.values[v].pinned]
    if not droppable and stuck:
        raise _cannot(entry, stuck[0], stuck[0].why_not)
    if not droppable:
        raise _cannot(entry, ops[selection.ops[0]], "its results are outputs of the model, which the caller holds")
    for v in droppable:
        dropped.setdefault(v, f"recompute={entry!r} was asked for")
    wanted = _read_again(graph)
    by_reason = {op.why_not: op for op in reversed(stuck) if wanted.intersection(op.outputs)}
    return [f"recompute={entry!r} leaves out {_told(op)}: {why}" for why, op in reversed(by_reason.items())]


def _read_again(graph: OpGraph) -> set[int]:
    """Values that something may read after the border: backward itself, or what it recomputes."""
    backward = {v for op in graph.ops[graph.border + 1 :] for v in op.inputs}
    return backward.union(v for op in graph.ops[: graph.border] if op.recomputable for v in op.recompute_inputs)


def _select(graph: OpGraph, argument: str, entry: str) -> _Selection:
    """What an entry matches: modules, or else operators and ops."""
    candidates = [op for op in graph.ops if op.phase == "forward" and not op.target.startswith("placemat.")]
    inside = [op.index for op in candidates if is_inside(op.module_path, entry)]
    named = [op.index for op in candidates if any(fnmatchcase(name, entry) for name in _names(op))]
    if not inside and not named:
        raise _no_match(candidates, argument, entry)
    is_exact = not inside and entry in _names(graph.ops[named[0]])
    return _Selection(entry, tuple(inside or named), is_exact)


def _names(op: Op) -> tuple[str, str, str]:
    """An op's own name, its operator, and its operator without the overload."""
    return op.name, op.target, op.target.rpartition(".")[0]


def is_inside(module_path: str, entry: str) -> bool:
    """Whether a module is one that an entry names, or is inside one."""
    return any(fnmatchcase(path, entry) for path in module_ancestors(module_path))


def module_ancestors(path: str) -> list[str]:
    """ "h", "h.3" and "h.3.mlp" of "h.3.mlp"; "" of the root."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _no_match(candidates: Sequence[Op], argument: str, entry: str) -> ConstraintError:
    names: dict[str, None] = {}
    for op in candidates:
        names.update(dict.fromkeys([*module_ancestors(op.module_path), op.target.rpartition(".")[0], op.name]))
    names.pop("", None)
    close = difflib.get_close_matches(entry, names, _MOST_SUGGESTIONS, _SIMILAR) or list(names)[:_MOST_SUGGESTIONS]
    return ConstraintError(
        f"{argument}={entry!r} matches no op of the forward (modules that only make views have none). Remedy: a module "
        f"path, an operator or an op's name in the plan, with * as a wildcard; there are, among others: "
        f"{', '.join(close)}."
    )


def _contradiction(op: Op, keep: str, recompute: str) -> ConstraintError:
    return ConstraintError(
        f"keep={keep!r} and recompute={recompute!r} both match {_told(op)}: it can be kept or recomputed, not both. "
        "Remedy: narrow one of the two."
    )


def _cannot(entry: str, op: Op, why: str | None) -> ConstraintError:
    return ConstraintError(
        f"recompute={entry!r} asks for {_told(op)}, which cannot be recomputed: {why}. Remedy: leave it out of "
        "recompute=; what backward needs of it is kept."
    )


def _told(op: Op) -> str:
    where = f"in {op.module_path or 'the root module'}"
    return f"{op.name} ({op.target}, {where}{', ' + op.source if op.source else ''})"
