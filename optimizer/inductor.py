"""Inductor: the two emitted functions of a step, compiled by PyTorch's compiler instead of being run op by op.

What is handed from forward to backward is the plan's saved set, byte for byte. Inside each of the two Inductor fuses
and orders as it sees fit, and rounds otherwise than eager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from placemat.codegen import Boxed
from placemat.graph.capture import explanation
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.kernel_strides import true_strides
from placemat.graph.storages import storage_key
from placemat.opaque_random import make_opaque

_Strides = tuple["tuple[int, ...] | None", ...]


@dataclass(frozen=True)
class Inductor:
    """Compiles emitted graphs with the settings of Inductor that held when it was made."""

    settings: Mapping[str, Any]

    @classmethod
    def present(cls) -> Inductor:
        from placemat.graph import torch_inductor

        return cls(torch_inductor.present_settings())

    def function(self, graph_module: fx.GraphModule, name: str) -> Boxed:
        """A function in boxed calling convention, compiled when it is called."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(graph_module.graph, copies))
        for old, new in copies.items():
            new.meta = dict(old.meta)
        storage_bytes = _storage_bytes(graph)
        make_opaque(graph)
        function: Any = _Function(fx.GraphModule(graph_module, graph), name, storage_bytes, self.settings)
        return function


@dataclass
class _Function:
    """Compiled anew for other strides of its arguments: gradients of outputs come with those that the loss gives."""

    graph_module: fx.GraphModule
    name: str
    storage_bytes: Sequence[int | None]  # one for each result, see `_storage_bytes`
    settings: Mapping[str, Any]
    variants: dict[_Strides, Boxed] = field(default_factory=dict)
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> list[Any]:
        strides: _Strides = tuple(a.stride() if isinstance(a, torch.Tensor) else None for a in args)
        if strides not in self.variants:
            self.variants[strides] = self._compiled(strides)
        return self.variants[strides](args)

    def _compiled(self, strides: _Strides) -> Boxed:
        from placemat.graph import torch_inductor

        placeholders = list(self.graph_module.graph.find_nodes(op="placeholder"))
        read = [i for i, p in enumerate(placeholders) if p.users]
        inputs = [_fake(placeholders[i], strides[i]) for i in read]
        try:
            with true_strides():
                code = torch_inductor.compile_graph(
                    _to_compile(self.graph_module), inputs, self.settings, is_backward=self.name == "backward"
                )
        except torch_inductor.FAILURES as error:
            raise UnsupportedFeature(
                f"Inductor could not compile the {self.name} of the planned step: {explanation(error)}. Remedy: "
                'compiler="eager", which needs no compiler; on the CPU Inductor needs a C++ compiler (g++ or clang).'
            ) from error

        def run(args: list[Any]) -> list[Any]:
            passed = [args[i] for i in read]
            args.clear()
            # What follows the step's results are the empty ones of draws that nobody reads (`make_opaque`).
            return [_in_own_storage(r, n) for r, n in zip(code(passed), self.storage_bytes, strict=False)]

        return run


def _storage_bytes(graph: fx.Graph) -> list[int | None]:
    """Of each result of a graph, the bytes of the storage that it was traced in; None if that is an argument's."""
    passed = {storage_key(p.meta["val"]) for p in graph.find_nodes(op="placeholder")}
    (output,) = graph.find_nodes(op="output")
    values = [r.meta["val"] if isinstance(r, fx.Node) else None for r in output.args[0]]
    return [None if v is None or storage_key(v) in passed else v.untyped_storage().nbytes() for v in values]


def _in_own_storage(result: torch.Tensor | None, storage_bytes: int | None) -> torch.Tensor | None:
    """The result, or a copy of it where Inductor made it within a larger tensor (what is concatenated, for one).

    Otherwise the larger one would live as long as the result does, which no plan knows of.
    """
    if result is None or storage_bytes is None or result.untyped_storage().nbytes() <= storage_bytes:
        return result
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device).copy_(result)


def _fake(placeholder: fx.Node, strides: tuple[int, ...] | None) -> torch.Tensor:
    """A stand-in for an argument, with the strides that it really has."""
    value: torch.Tensor = placeholder.meta["val"]
    if strides is None or strides == value.stride():
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _to_compile(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy without arguments that nothing reads. What is a view of a traced argument may be a copy of a real one."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    return fx.GraphModule(graph_module, graph)
