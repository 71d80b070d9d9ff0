"""Calls of submodules, as the front end of the capture sees them: what eager would do that a functional graph hides.

Read from Dynamo's graph, before AOTAutograd makes writes into new tensors: which modules are called, how often, and
which tensors are written to in place. `torch.utils.checkpoint` runs a module's forward a second time on the tensors
that it was given, so these must still be what they were.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from placemat.graph import torch_private
from placemat.graph.ir import ModuleCall
from placemat.graph.sources import tidy, user_line
from placemat.graph.storages import storage_key

# Key in `node.meta["custom"]`, which travels through AOTAutograd: eager writes the result over the first argument.
IN_PLACE = "placemat_in_place"
# Another: no local variable has had the result, or a view of it.
UNNAMED = "placemat_unnamed"
# A third: position of the call; what it makes for itself is C++'s.
CALL = "placemat_call"
_NUMBER = re.compile(r"_\d+$")
_OPERATORS = frozenset(
    (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
     operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem)
)  # fmt: skip


@dataclass
class _Seen:
    """One module during the walk through the graph; positions are those of its first and last node."""

    kind: Any
    keys: set[str]
    first: int
    last: int
    read: dict[int, None]  # storages that it reads and did not make


def module_calls(graph: fx.Graph) -> tuple[ModuleCall, ...]:
    """The submodules that are called, in order of their first operation; marks the calls that write in place."""
    seen: dict[str, _Seen] = {}
    birth: dict[int, int] = {}
    writes: list[tuple[int, int, fx.Node]] = []
    for position, node in enumerate(graph.nodes):
        if node.op in ("call_function", "call_method"):
            _mark(node, CALL, position)
            for path, key, kind in _stack(node):
                module = seen.setdefault(path, _Seen(kind, set(), position, position, {}))
                module.keys.add(key)
                module.last = position
                for read in node.all_input_nodes:
                    module.read.update((k, None) for k in _storages(read) if birth.get(k, -1) < module.first)
            for written in _written(node):
                writes.extend((position, k, node) for k in _storages(written))
                if written is node.args[0] and node.op != "placeholder":
                    _mark(node, IN_PLACE)
        for k in _storages(node):
            birth.setdefault(k, position if node.op.startswith("call") else -1)
    _mark_unnamed(graph)
    return tuple(
        ModuleCall(path, _why_not(module, writes), _is_chain(module.kind)) for path, module in seen.items() if path
    )


def _mark(node: fx.Node, key: str, value: int = 1) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def _mark_unnamed(graph: fx.Graph) -> None:
    """Mark calls whose results only stand inside of an expression: Python drops them once they are used.

    Dynamo names a node after the first local variable that its result is bound to. A parameter of a helper function is
    a variable, too, so what another function reads or returns does not count.
    """
    named: set[int] = set()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            own = getattr(node.target, "__name__", str(node.target))
            is_bound = _NUMBER.sub("", node.name) != own.strip("_") and _NUMBER.sub("", node.name) != own
            elsewhere = (u for u in node.users if u.op != "output" and _place(u)[0] == _place(node)[0])
            if is_bound or any(_place(user) != _place(node) for user in elsewhere):
                named.update(_storages(node))
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and named.isdisjoint(_storages(node)):
            _mark(node, UNNAMED)


def _place(node: fx.Node) -> tuple[str, tuple[str, ...]]:
    """Innermost module around a call, and the functions in whose frames it is made."""
    modules = list(node.meta.get("nn_module_stack") or {})
    functions = re.findall(r'File "([^"]+)", line \d+, in (\S+)', node.meta.get("stack_trace") or "")
    return (modules[-1] if modules else ""), tuple(map(":".join, functions))


def root_call(forward: Callable[..., Any]) -> ModuleCall:
    """The call of the model itself, which the graph's stacks of modules leave out."""
    return ModuleCall("", "it is the whole model", _is_chain(type(getattr(forward, "__self__", None))))


def _stack(node: fx.Node) -> Iterator[tuple[str, str, Any]]:
    """(path, key, class) of the modules around a node; calls of one module differ in the key."""
    for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items():
        yield tidy(name), key, kind


def _storages(node: fx.Node) -> list[int]:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    tensors = (torch_private.below_transforms(t) for t in leaves if isinstance(t, torch.Tensor))
    return [storage_key(t) for t in tensors if t.layout == torch.strided]


def _why_not(module: _Seen, writes: list[tuple[int, int, fx.Node]]) -> str | None:
    if len(module.keys) > 1:
        return f"it is called {len(module.keys)} times in one forward"
    for position, key, node in writes:
        if position < module.first or key not in module.read or _is_own_statistics(node):
            continue
        where = user_line(node.meta.get("stack_trace")) or "an unknown line"
        who = "it writes" if position <= module.last else "what runs later writes"
        return f"{who} in place to a tensor that it reads from outside ({where})"
    return None


def _is_own_statistics(node: fx.Node) -> bool:
    """Whether a write is to the counter or the statistics of a normalisation layer, which a second run leaves alone."""
    stack = list(_stack(node))
    written = node.args[0]
    kind = stack[-1][2] if stack else None
    known = (_BatchNorm.forward, _InstanceNorm.forward)
    is_norm = isinstance(kind, type) and issubclass(kind, _NormBase) and kind.forward in known
    return is_norm and isinstance(written, fx.Node) and written.op == "placeholder"


def _is_chain(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Sequential) and kind.forward is nn.Sequential.forward


def _written(node: fx.Node) -> list[fx.Node]:
    """Arguments that a call writes to in eager."""
    target, name = node.target, getattr(node.target, "__name__", str(node.target))
    if isinstance(target, torch._ops.OpOverload):
        parameters = target._schema.arguments
        given = {**dict(zip((p.name for p in parameters), node.args, strict=False)), **node.kwargs}
        found: list[Any] = [given.get(p.name) for p in parameters if p.alias_info is not None and p.alias_info.is_write]
    else:
        is_write = target in _OPERATORS or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        found = list(node.args[:1]) if is_write or _is_asked_for(node) else []
        found.append(node.kwargs.get("out"))
    return [n for n in pytree.tree_leaves(found) if isinstance(n, fx.Node)]


def _is_asked_for(node: fx.Node) -> bool:
    """Whether a function is called with `inplace=True`."""
    if node.op != "call_function":
        return False
    try:
        given: Mapping[str, Any] = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtins have no signature, and none of these takes the argument
        return node.kwargs.get("inplace") is True
    return given.get("inplace") is True
