"""Codegen: from an emitted FX graph to a Python function in boxed calling convention.

The callee empties its argument list and drops every name after its last use: with an ordinary call the caller's tuple
would keep all saved tensors alive to the end of the backward, and the plan would be void. Operators are called through
their `_op` builtin, which skips a layer of Python per call.

A graph with marks of segments' ends becomes a generator: it yields the gradients of a segment, and between segments its
suspended frame holds what the next ones read, and nothing else does.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from placemat.emit import IN_PLACE
from placemat.graph.eager_ops import RUNS
from placemat.graph.gradients import hand_out

Boxed = Callable[[list[Any]], list[Any]]


def boxed_function(graph_module: fx.GraphModule, name: str) -> Boxed:
    """Compile a graph. The function has `.source`, its text, for people to read."""
    writer = _Writer(graph_module)
    source = writer.write(name)
    filename = f"<placemat {name} {id(writer)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # readable tracebacks
    namespace = dict(writer.constants)
    exec(compile(source, filename, "exec"), namespace)
    function: Any = namespace[name]
    function._boxed_call = True
    function.source = source
    boxed: Boxed = function
    return boxed


@dataclass
class _Writer:
    graph_module: fx.GraphModule
    constants: dict[str, Any] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    constant_names: dict[int, str] = field(default_factory=dict)

    def write(self, name: str) -> str:
        graph = self.graph_module.graph
        dying = last_uses(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        for i, node in enumerate(graph.nodes):
            self.names[node] = f"v{i}_{node.name}" if not node.name.isidentifier() else node.name
        self.lines.append(f"def {name}(boxed_args):")
        if placeholders:
            self.lines.append(f"    {', '.join(self.names[p] for p in placeholders)}, = boxed_args")
        self.lines.append("    boxed_args.clear()")
        self.drop([p for p in placeholders if not p.users])
        for node in graph.nodes:
            self.statement(node)
            self.drop(dying.get(node, []))
            if node.target is hand_out:
                self.lines.append("    yield _handed")
        return "\n".join(self.lines) + "\n"

    def statement(self, node: fx.Node) -> None:
        if node.op == "output":
            self.lines.append(f"    return [{', '.join(self.text(a) for a in node.args[0])}]")  # type: ignore[union-attr]
        elif node.op == "get_attr":
            self.lines.append(
                f"    {self.names[node]} = {self.constant(operator.attrgetter(str(node.target))(self.graph_module))}"
            )
        elif node.target is hand_out:
            self.lines.append(f"    _handed = [{', '.join(self.text(a) for a in node.args[0])}]")  # type: ignore[union-attr]
        elif node.op == "call_function" and not _is_unpacked(node):
            self.lines.append(f"    {self.results(node)} = {self.call(node)}")
            self.drop(_unused_results(node))

    def results(self, node: fx.Node) -> str:
        """Name of the result, or the names of all results if the op returns several and is only ever unpacked."""
        if not unpacks(node):
            return self.names[node]
        by_index = {user.args[1]: self.names[user] for user in node.users}
        return ", ".join(by_index.get(i, "_") for i in range(len(node.meta["val"]))) + ","

    def call(self, node: fx.Node) -> str:
        target = node.target
        function = RUNS.get(target) or (target._op if isinstance(target, torch._ops.OpOverload) else target)
        if function is operator.getitem:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        arguments = [self.text(a) for a in node.args] + [f"{k}={self.text(a)}" for k, a in node.kwargs.items()]
        if (in_place := node.meta.get(IN_PLACE)) is not None:
            how, position = in_place
            function = how.target._op
            arguments += [f"{how.out}={self.text(node.args[position])}"] if how.out else []
        return f"{self.constant(function)}({', '.join(arguments)})"

    def text(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.names[x]
        if isinstance(x, (list, tuple)) and any(isinstance(y, (fx.Node, list, tuple)) for y in x):
            inner = ", ".join(self.text(y) for y in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner},)"
        if x is None or isinstance(x, (bool, int, str)):
            return repr(x)
        if isinstance(x, (list, tuple)) and all(isinstance(y, (bool, int)) for y in x):
            return repr(list(x))
        return self.constant(x)

    def constant(self, x: Any) -> str:
        """Name of a global that holds an object which has no exact text: an operator, a float, a dtype, a device."""
        key = id(x)
        if key not in self.constant_names:
            label = getattr(x, "__name__", type(x).__name__)
            self.constant_names[key] = name = (
                f"_{len(self.constants)}_{''.join(c if c.isalnum() else '_' for c in label)}"
            )
            self.constants[name] = x
        return self.constant_names[key]

    def drop(self, nodes: list[Any]) -> None:
        names = [n if isinstance(n, str) else self.names[n] for n in nodes if isinstance(n, str) or not unpacks(n)]
        if names:
            self.lines.append(f"    {' = '.join(dict.fromkeys(names))} = None")


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every node, the nodes whose last use it is."""
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                dying.setdefault(node, []).append(source)
    return dying


def unpacks(node: fx.Node) -> bool:
    """Whether an op with several results is unpacked at once: its users are the getitems that follow it directly."""
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)) or node.op != "call_function" or not node.users:
        return False
    if node.target is operator.getitem:
        return False
    following = node.next
    users = set(node.users)
    while following in users and following.target is operator.getitem:
        users.discard(following)
        following = following.next
    return not users


def _is_unpacked(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and unpacks(node.args[0])


def _unused_results(node: fx.Node) -> list[Any]:
    """Results that nobody reads: they go at once."""
    if unpacks(node):
        unread: list[Any] = [user for user in node.users if not user.users]
        return unread + (["_"] if len(node.users) < len(node.meta["val"]) else [])
    return [node] if not node.users else []
