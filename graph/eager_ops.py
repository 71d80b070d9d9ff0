"""The operators that stand for a kept module in a captured graph, and what runs in their place.

`eager_forward` returns the module's tensors and a token, `eager_backward` the gradients that flow from those results
that get one. In the graph they only have shapes; the emitted code calls `run_forward` and `run_backward` instead,
because an operator's kernel runs below autograd, and the module needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from placemat.graph import lstm_kernels
from placemat.graph.eager_facts import Facts
from placemat.graph.eager_run import kept_by, make_token, run, trace_edges
from placemat.graph.errors import UnsupportedFeature

_LIBRARY = torch.library.Library("placemat_ops", "FRAGMENT")
# The tag keeps the module in its place among random ops, and alive if nobody reads its results: it may draw numbers.
_LIBRARY.define("eager_forward(str key, Tensor[] inputs) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define(
    "eager_backward(str key, Tensor token, Tensor?[] grads, Tensor[] passed, int[] wanted) -> Tensor[]",
)
FORWARD = torch.ops.placemat_ops.eager_forward.default
BACKWARD = torch.ops.placemat_ops.eager_backward.default


class Registry(Protocol):
    """Where the operators find their modules: that of the model which is traced or run."""

    def facts(self, key: str) -> Facts: ...

    def module(self, key: str) -> nn.Module: ...

    def call(self, path: str, parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any: ...


ACTIVE: ContextVar[Registry] = ContextVar("placemat kept modules")


@torch.library.register_fake("placemat_ops::eager_forward", lib=_LIBRARY)
def _fake_forward(key: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The token has the size of what it keeps alive: so it is charged where values are."""
    facts = ACTIVE.get().facts(key)
    device = inputs[0].device if inputs else "cpu"
    return [*(o.empty() for o in facts.outputs), torch.empty(facts.saved_bytes, dtype=torch.uint8, device=device)]


@torch.library.register_fake("placemat_ops::eager_backward", lib=_LIBRARY)
def _fake_backward(
    key: str, token: Tensor, grads: Sequence[Tensor | None], passed: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor]:
    layouts = [ACTIVE.get().facts(key).gradients[i] for i in wanted]
    return [layout.empty() for layout in layouts if layout is not None]


class KeptFunction(torch.autograd.Function):
    """Lets AOTAutograd write both operators into the joint graph."""

    @staticmethod
    def forward(ctx: Any, key: str, facts: Facts, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        *outputs, token = FORWARD(key, list(tensors))
        both = [*tensors, *outputs]
        ctx.key, ctx.facts = key, facts
        ctx.save_for_backward(token, *(both[i] for i in sorted(facts.owners)))
        ctx.mark_non_differentiable(*(o for o, g in zip(outputs, facts.requires_grad, strict=True) if not g))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        token, *passed = ctx.saved_tensors
        facts: Facts = ctx.facts
        wanted = facts.wanted([g is not None for g in grads])
        results = dict(zip(wanted, BACKWARD(ctx.key, token, list(grads), passed, wanted), strict=True))
        return (None, None, *(results.get(i) for i in range(len(facts.edges))))


def run_forward(key: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the module; its results, detached, and the token.

    Raises:
        UnsupportedFeature: it did not do what the plan was made for.
    """
    registry = ACTIVE.get()
    facts = registry.facts(key)
    if facts.by_kernels and lstm_kernels.are_enabled():
        results, kernel_run = lstm_kernels.run(registry.module(key), facts.call, inputs, facts.owners)
        _check_run(facts, results, facts.requires_grad, kernel_run.saved_bytes)
        return [*results, make_token((kernel_run, facts))]
    _, outputs, graph = run(registry.module(key), facts.call, inputs, facts.owners.__contains__)
    _check_run(facts, outputs, tuple(o.requires_grad for o in outputs), graph.saved_bytes)
    if not facts.is_fixed:
        _check_edges(facts, *trace_edges(graph))
    return [*(o.detach() for o in outputs), make_token((graph, facts))]


def _check_run(facts: Facts, outputs: Sequence[Tensor], requires_grad: tuple[bool, ...], saved_bytes: int) -> None:
    fits = len(outputs) == len(facts.outputs) and all(map(lambda f, t: f.matches(t), facts.outputs, outputs))
    if not fits or requires_grad != facts.requires_grad:
        raise UnsupportedFeature(
            f"the kept module {facts.call.path} returned {_shapes(outputs)}, but the plan was made for "
            f"{_shapes([o.empty() for o in facts.outputs])}: shapes or gradients of its results depend on data or on "
            "its own state. Remedy: let it return the same shapes for the same inputs, or optimize() the model again."
        )
    if saved_bytes > facts.saved_bytes:
        raise UnsupportedFeature(
            f"the kept module {facts.call.path} saves {saved_bytes} bytes for its backward, but the plan has "
            f"{facts.saved_bytes}: what it saves depends on data or on its own state. Remedy: plan with an example "
            "call for which it saves most."
        )


def _check_edges(facts: Facts, reaches: tuple[frozenset[int], ...], edges: tuple[int, ...]) -> None:
    """Refuse other inputs, and an input that is now used several times: `eager_lower.check_sums` has not seen that."""
    if reaches != facts.reaches or any(edges[i] > 1 for i in facts.summed):
        raise UnsupportedFeature(
            f"gradients of the kept module {facts.call.path} reach its inputs (arguments, then parameters) in another "
            f"way than in the run that it was planned by: {_told(reaches, edges)} instead of "
            f"{_told(facts.reaches, facts.edges)}. What it computes depends on data or on its own state. Remedy: "
            "optimize() the model again, or let it use the same parameters at every call."
        )


def _told(reaches: tuple[frozenset[int], ...], edges: tuple[int, ...]) -> str:
    return "; ".join(", ".join(f"{i} (x{edges[i]})" for i in sorted(reached)) or "none" for reached in reaches)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(t.shape)} with strides {t.stride()}" for t in tensors) or "nothing"


def run_backward(
    key: str, token: Tensor, grads: Sequence[Tensor | None], passed: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor]:
    """Gradients of the wanted inputs.

    Raises:
        UnsupportedFeature: gradients reach other inputs than those that the plan was made for.
    """
    graph, facts = kept_by(token)
    results = graph.backward(grads, dict(zip(sorted(facts.owners), passed, strict=True)))
    there = [i for i, g in enumerate(results) if g is not None]
    if there != list(wanted):
        raise UnsupportedFeature(
            f"gradients of the kept module {facts.call.path} reach inputs {there}, but the plan was made for "
            f"{list(wanted)} (its arguments, then its parameters): what it computes depends on data or on its own "
            "state. Remedy: optimize() the model again, or let it use the same parameters at every call."
        )
    return [g for g in results if g is not None]


def runs_again() -> Callable[[str, Sequence[Tensor]], list[Tensor]]:
    """`run_forward` for a recomputation, which happens in the backward: with the modules that are active now."""
    registry = weakref.ref(ACTIVE.get())

    def run_forward_again(key: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        alive = registry()
        assert alive is not None, "the step's graph is alive, and the model with it"
        token = ACTIVE.set(alive)
        try:
            return run_forward(key, inputs)
        finally:
            ACTIVE.reset(token)

    return run_forward_again


RUNS: dict[Any, Callable[..., list[Tensor]]] = {FORWARD: run_forward, BACKWARD: run_backward}


def attach_facts(graph: fx.Graph) -> None:
    """Note on every node of a kept module what is known of its call: the backward is specialized outside of a trace."""
    for target in RUNS:
        for node in graph.find_nodes(op="call_function", target=target):
            node.meta["kept"] = ACTIVE.get().facts(node.args[0])


def drop_absent_grads(node: fx.Node, absent: set[fx.Node]) -> set[fx.Node]:
    """Take absent gradients out of an `eager_backward`, in place; returns those of its results that are then absent.

    The inner graph gets None for them, as it does in eager, and inputs that only those gradients reach get none.
    """
    key, token, grads, passed, wanted = node.args
    facts: Facts = node.meta["kept"]
    remaining = [None if g in absent else g for g in grads]  # type: ignore[union-attr]
    still = facts.wanted([g is not None for g in remaining])
    node.args = (key, token, remaining, passed, still)
    before: list[Any] = list(wanted)  # type: ignore[arg-type]
    positions: list[Any] = [before.index(i) for i in still]
    node.meta["val"] = [node.meta["val"][p] for p in positions]
    gone = set()
    for user in list(node.users):
        if user.args[1] in positions:
            user.args = (node, positions.index(user.args[1]))
        else:
            gone.add(user)
    return gone
