"""A module that is kept eager, run inside a planned step: its forward with a graph of its own, and its backward.

Eager's own kernels and eager's own autograd do the work, so results are eager's bit for bit. What the inner graph saves
is divided: a tensor that lives in an argument, a parameter or a result of the module is not held, but taken from what
the plan passes to the backward (kept, or recomputed outside); all others stay with the graph, which hangs on a token,
a tensor of no size that the plan keeps from forward to backward. The graph dies with the token.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from placemat.graph.errors import UnsupportedFeature

_TOKEN_ATTRIBUTE = "_placemat_inner_graph"
_ROOT = torch.zeros((), requires_grad=True)  # makes arguments require a gradient, and never gets one


@dataclass(frozen=True)
class Call:
    """How a kept module is called: what is not a tensor, and which gradients are wanted.

    Attributes:
        path: the module's path in the model.
        structure: of (args, kwargs).
        constants: one per leaf of that structure; None where a tensor belongs.
        is_tensor: which leaves are tensors; they are the op's first inputs, the module's parameters follow.
        requires_grad: one per input.
        is_grad_enabled: whether the call happens under torch.enable_grad().
    """

    path: str
    structure: pytree.TreeSpec
    constants: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    is_grad_enabled: bool

    @property
    def num_arguments(self) -> int:
        return sum(self.is_tensor)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        supply = iter(tensors)
        leaves = [next(supply) if t else c for t, c in zip(self.is_tensor, self.constants, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return tuple(args), dict(kwargs)


class _Source(torch.autograd.Function):
    """An argument as the inner graph sees it: not a leaf, as in eager, and without a node that holds its storage."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("gradients are taken at this node, never behind it")


class _Saved:
    """One tensor that the inner graph saved: the tensor itself, or where to find it among the passed ones."""

    __slots__ = ("__weakref__", "geometry", "owner", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # its own node would hold it, and it that node
        self.version = tensor._version
        self.owner = -1
        self.geometry: tuple[Any, ...] = ()

    def refer_to(self, owner: int, base: Tensor) -> None:
        """Let go of the tensor, which lives in the storage of `base`, number `owner` of the passed tensors."""
        assert self.tensor is not None
        offset = self.tensor.storage_offset() - base.storage_offset()
        self.owner, self.geometry = owner, (self.tensor.shape, self.tensor.stride(), offset)
        self.tensor = None

    def get(self, passed: Mapping[int, Tensor], path: str) -> Tensor:
        if self.tensor is None:
            base = passed[self.owner]
            size, stride, offset = self.geometry
            return base.detach().as_strided(size, stride, base.storage_offset() + offset)
        if self.tensor._version != self.version:
            raise UnsupportedFeature(
                f"a tensor that the kept module {path} needs for its backward was changed in place since its forward "
                f"(version {self.tensor._version}, saved at {self.version}). Remedy: change it after the backward."
            )
        return self.tensor


class InnerGraph:
    """The autograd graph of one run of a kept module.

    Attributes:
        inputs, outputs: gradient edges; None where there is no gradient.
        owners: numbers, among inputs and then outputs, of the tensors that `backward` has to be given.
        saved_bytes: bytes of the storages that the graph itself holds, parameters and buffers left out.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.inputs: list[GradientEdge | None] = []
        self.outputs: list[GradientEdge | None] = []
        self.owners: frozenset[int] = frozenset()
        self.saved_bytes = 0
        self._passed: Mapping[int, Tensor] = {}

    @contextmanager
    def recording(self, entries: list[weakref.ref[_Saved]]) -> Iterator[None]:
        def pack(tensor: Tensor) -> _Saved:
            saved = _Saved(tensor)
            entries.append(weakref.ref(saved))
            return saved

        reference = weakref.ref(self)

        def unpack(saved: _Saved) -> Tensor:
            graph = reference()
            assert graph is not None, "its backward runs through it"
            return saved.get(graph._passed, graph.path)

        with saved_tensors_hooks(pack, unpack):
            yield

    def divide(
        self,
        entries: Sequence[weakref.ref[_Saved]],
        tensors: Sequence[Tensor],
        may_refer: Callable[[int], bool],
        static: frozenset[int],
    ) -> None:
        """Let go of what lives in one of `tensors` (inputs, then outputs), and add up the rest."""
        owner_of = {_key(t): i for i, t in reversed(list(enumerate(tensors))) if _is_plain(t) and may_refer(i)}
        owners, held = set(), {}
        for saved in (entry() for entry in entries):
            if saved is None or saved.tensor is None or not _is_plain(saved.tensor):
                continue
            key = _key(saved.tensor)
            owner = owner_of.get(key, -1)
            if owner >= 0 and tensors[owner].dtype == saved.tensor.dtype:
                owners.add(owner)
                saved.refer_to(owner, tensors[owner])
            elif key not in static:
                held[key] = saved.tensor.untyped_storage().nbytes()
        self.owners, self.saved_bytes = frozenset(owners), sum(held.values())

    def backward(self, grads: Sequence[Tensor | None], passed: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs, None for those that `grads` (one per output) do not reach.

        The graph stays: backward(retain_graph=True) of the step may come again.
        """
        pairs = [(e, g) for e, g in zip(self.outputs, grads, strict=True) if e is not None and g is not None]
        wanted = [edge for edge in self.inputs if edge is not None]
        self._passed = passed
        try:
            results = iter(
                torch.autograd.grad(
                    [e for e, _ in pairs], wanted, [g for _, g in pairs], retain_graph=True, allow_unused=True
                )
            )
        finally:
            self._passed = {}
        return unshared([None if edge is None else next(results) for edge in self.inputs], [g for _, g in pairs])


def unshared(results: list[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Results of an operator share no storage with its arguments or with each other; autograd's may."""
    seen = {_key(g) for g in grads}
    for i, result in enumerate(results):
        if result is not None and _key(result) in seen:
            results[i] = result.clone()
        elif result is not None:
            seen.add(_key(result))
    return results


def run(
    module: nn.Module,
    call: Call,
    tensors: Sequence[Tensor],
    may_refer: Callable[[int], bool] = lambda i: True,
) -> tuple[Any, list[Tensor], InnerGraph]:
    """Run a module's own forward.

    Args:
        module: its parameters are used as they are.
        call: how it is called.
        tensors: arguments, and the parameters.
        may_refer: which of inputs and outputs the backward will be given.

    Returns:
        What the forward returned, the tensors in it, and the graph behind them.
    """
    graph = InnerGraph(call.path)
    entries: list[weakref.ref[_Saved]] = []
    with torch.set_grad_enabled(call.is_grad_enabled), graph.recording(entries):
        count = call.num_arguments
        arguments = [_source(t, g) for t, g in zip(tensors[:count], call.requires_grad[:count], strict=True)]
        args, kwargs = call.arguments(arguments)
        result = type(module).forward(module, *args, **kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    inputs = [*arguments, *module.parameters()]
    graph.inputs = [_edge(t) for t in inputs]
    graph.outputs = [_edge(t) for t in outputs]
    static = frozenset(_key(t) for t in (*module.parameters(), *module.buffers()) if _is_plain(t))
    graph.divide(entries, [*inputs, *outputs], may_refer, static)
    return result, outputs, graph


def _source(tensor: Tensor, requires_grad: bool) -> Tensor:
    tensor = tensor.detach()
    if not (requires_grad and torch.is_grad_enabled()):
        return tensor
    result: Tensor = _Source.apply(_ROOT, tensor)
    return result


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def trace_edges(graph: InnerGraph) -> tuple[tuple[frozenset[int], ...], tuple[int, ...]]:
    """Which inputs each output reaches, and how many edges lead to each input.

    Raises:
        UnsupportedFeature: a gradient flows to a tensor that is neither argument nor parameter of the module.
    """
    number = {(e.node, e.output_nr): i for i, e in enumerate(graph.inputs) if e is not None}
    first: dict[Any, set[int]] = {}
    edges: Counter[int] = Counter()
    order: list[Any] = []
    stack = [(e.node, False) for e in graph.outputs if e is not None]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in first:
            continue
        first[node] = set()
        stack.append((node, True))
        for target, nr in node.next_functions:
            if target is None:
                continue
            if (target, nr) in number:
                edges[number[target, nr]] += 1
            elif hasattr(target, "variable"):
                raise UnsupportedFeature(
                    f"a gradient flows out of the kept module {graph.path} to a tensor of shape "
                    f"{tuple(target.variable.shape)} that is neither an argument nor a parameter of it. Remedy: "
                    "register it as an nn.Parameter of the module, pass it as an argument, or detach() it."
                )
            else:
                stack.append((target, False))
    for node in order:
        for target, nr in node.next_functions:
            if (target, nr) in number:
                first[node].add(number[target, nr])
            elif target is not None:
                first[node] |= first[target]
    reaches = tuple(frozenset() if e is None else frozenset(first[e.node]) for e in graph.outputs)
    return reaches, tuple(edges[i] for i in range(len(graph.inputs)))


def make_token(kept: object) -> Tensor:
    """A tensor of no size that keeps an object alive."""
    token = torch.empty(0, dtype=torch.uint8)
    setattr(token, _TOKEN_ATTRIBUTE, kept)
    return token


def kept_by(token: Tensor) -> Any:
    """The object that a token keeps alive.

    Raises:
        UnsupportedFeature: something has put another tensor in the token's place.
    """
    if not hasattr(token, _TOKEN_ATTRIBUTE):
        raise UnsupportedFeature(
            "saved_tensors_hooks around the call of a model with modules that are kept eager (recurrent layers, "
            "keep_eager=) have replaced what the step saves, and the graph of such a module cannot be. Remedy: "
            "call the model outside of the hooks."
        )
    return getattr(token, _TOKEN_ATTRIBUTE)
