"""Segments: a backward whose gradients autograd gets part by part, as a chain of autograd nodes.

The first part runs in AOTAutograd's node, the others in nodes of ours, which it leads to:

    outputs -> AOTAutograd's node -> segment 1 -> segment 2 -> ...
                    |                   |            |
                gradients           gradients    gradients

A link is an edge along which nothing but the engine's turn is passed on. Each node has edges to the inputs whose
gradients it returns. The engine accumulates gradients before it goes on to the next node of a chain: of nodes that are
ready it takes the one with the highest number, and those that accumulate are above all others
(torch/csrc/autograd/engine.h, CompareNodeTaskTime). What segments share is the suspended frame of one generator (see
`codegen`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from placemat.graph import torch_private
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.handing_out import Positions
from placemat.graph.joint import JointGraph
from placemat.graph.storages import storage_key, tensors_of

Running = Generator[list[Any], None, None]


class CallState:
    """The backward of one call: `running` between two of its segments.

    `carrier` goes along the first link as if it were a gradient. Any tensor of its shape on the device would do: of an
    edge without one the engine does not know the device, and another thread than the device's would go on.
    """

    def __init__(self, carrier: torch.Tensor) -> None:
        self.carrier = carrier
        self.running: Running | None = None

    def begin(self, running: Running) -> list[Any]:
        """Gradients of the first segment. A backward that needs no more of them lets go of the others when it ends."""
        self.end()
        self.running = running
        torch_private.when_backward_ends(self.end)
        return self.advance()

    def advance(self) -> list[Any]:
        """Gradients of the next segment."""
        assert self.running is not None, "the engine runs segments one after another"
        handed = next(self.running)
        gradients = list(handed)
        handed.clear()  # the frame has that list, and autograd takes over only what nobody else has
        return gradients

    def end(self) -> None:
        """Let go of everything."""
        if self.running is not None:
            self.running.close()
            self.running = None


@dataclass
class Chain:
    """What a compiled graph with segments needs beside its functions.

    Args:
        segments: primals whose gradients each segment hands out, one after another.
        carrier: the primal that AOTAutograd's node gets by way of the first link.
        num_primals: how many there are.
    """

    segments: tuple[Positions, ...]
    carrier: int
    num_primals: int
    _begun: threading.local = field(default_factory=threading.local)

    @classmethod
    def of(cls, joint: JointGraph, segments: tuple[Positions, ...], num_inputs: int) -> Chain:
        """The chain for a graph with this many inputs.

        Raises:
            UnsupportedFeature: every input with a gradient in a later segment is overwritten or returned, or primals
                are not the inputs.
        """
        returned = {storage_key(t) for n in joint.forward_outputs for t in tensors_of(n) if t is not None}
        overwritten = set(joint.mutated_inputs.values())
        for position in (p for segment in segments[1:] for p in segment):
            keys = {storage_key(t) for t in tensors_of(joint.primals[position]) if t is not None}
            if position not in overwritten and returned.isdisjoint(keys) and len(joint.primals) == num_inputs:
                return cls(segments, position, num_inputs)
        raise UnsupportedFeature(
            f"segments={len(segments)} needs a parameter with a gradient in a later segment that the forward neither "
            "overwrites nor returns, and there is none. Remedy: segments=1, or return .clone() of it."
        )

    def link(self, args: Sequence[Any]) -> tuple[list[Any], Callable[[Any], None]]:
        """Arguments for AOTAutograd's function that lead its node to a new chain, and a prehook for that node."""
        passed, state = list(args), CallState(args[self.carrier].detach())
        link: torch.Tensor | None = None
        for number in range(len(self.segments) - 1, 0, -1):
            inputs = [args[position] for position in self.segments[number]]
            start = args[self.carrier] if number == 1 else torch.empty(0, device=state.carrier.device)
            link = _Segment.apply(state, link, start, *inputs)
        passed[self.carrier] = link

        def expect(grads: Any) -> None:
            """On this thread, the backward of that call begins."""
            self._begun.state = state

        return passed, expect

    def begin(self, running: Running) -> list[Any]:
        """What AOTAutograd's node returns: a gradient of the first segment or None for each primal."""
        state: CallState = self._begun.state
        del self._begun.state
        returned: list[Any] = [None] * self.num_primals
        for position, gradient in zip(self.segments[0], state.begin(running), strict=True):
            returned[position] = gradient
        returned[self.carrier] = state.carrier
        return returned


class _Segment(torch.autograd.Function):
    """A node of the chain: in the forward `start`, with this node behind it."""

    @staticmethod
    def forward(ctx: Any, state: CallState, link: torch.Tensor | None, start: torch.Tensor, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.state, ctx.has_next = state, link is not None
        return start.view_as(start)

    @staticmethod
    def backward(ctx: Any, *turn: Any) -> Any:
        state: CallState = ctx.state
        following = torch.empty(0, device=state.carrier.device) if ctx.has_next else None
        return None, following, None, *state.advance()
