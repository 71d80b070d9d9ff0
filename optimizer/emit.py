"""Emit: from a Schedule back to two FX graphs, the forward and the backward of the step.

The forward is the schedule up to the border, the backward what follows it. Between them go the *bases* of the storages
that the schedule holds at the border and the backward reads; views are applied again where they are needed, and are
dropped with their storage, so that nothing outlives what the plan says. Recomputed ops are copies with the suffix
`_recomputed`.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from placemat import rng
from placemat.graph import batch_norm, eager_ops
from placemat.graph.gradients import hand_out
from placemat.graph.handing_out import Positions
from placemat.graph.in_place import candidates
from placemat.graph.lower import Lowering
from placemat.graph.storages import tensors_of
from placemat.graph.torch_private import is_tangent
from placemat.schedule import Compute, Free, Schedule

IN_PLACE = "placemat in place"  # in a node's meta: how its call writes into an argument, and the position of that


@dataclass(frozen=True)
class EmittedStep:
    """Forward: primals -> (forward outputs, saved). Backward: (saved, tangents) -> gradients of the primals.

    `segments` are the primals of which each `hand_out` in the backward has the gradients; there are none in a backward
    of one segment. What the backward returns is then for AOTAutograd to read only: it wants to see all gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_saved: int
    segments: tuple[Positions, ...] = ()


def emit(lowering: Lowering, schedule: Schedule, below_peak: Container[int] = ()) -> EmittedStep:
    """Graphs that run a schedule which the referee accepted.

    `below_peak`: steps of the schedule at which an op may write into an argument that is freed right after it. They
    then need less than the referee counts; with the steps at the peak not among them the peak is what it is.
    """
    border = next(i for i, s in enumerate(schedule.steps) if s == Compute(lowering.graph.border))
    forward = _Side(lowering, set(), is_forward=True)
    for node in lowering.joint.primals:
        forward.add_placeholder(node)
    dying = _dying(schedule, below_peak)
    for i, step in enumerate(schedule.steps[:border]):
        forward.run(step, dying.get(i, frozenset()))
    assert not forward.saved, f"the forward reads {list(forward.saved)} where the schedule does not hold them"
    backward = _Side(lowering, set(forward.computed), is_forward=False)
    for i, step in enumerate(schedule.steps[border + 1 :], border + 1):
        backward.run(step, dying.get(i, frozenset()))
    gradients = [backward.handed.get(i) or backward.gradient(i) for i in range(len(lowering.joint.gradients))]
    saved = list(backward.saved)
    forward.graph.output((*forward.outputs(), *(forward.get_saved(n) for n in saved)))
    backward.graph.output(tuple(gradients))
    _add_tangents(backward)
    owner = lowering.joint.graph_module
    segments = tuple(lowering.handouts[op] for op in sorted(lowering.handouts))
    return EmittedStep(
        fx.GraphModule(owner, forward.graph), fx.GraphModule(owner, backward.graph), len(saved), segments
    )


def _dying(schedule: Schedule, below_peak: Container[int]) -> dict[int, frozenset[int]]:
    """For steps in `below_peak`: the values that are freed right after."""
    dying: dict[int, frozenset[int]] = {}
    freed: list[int] = []
    for i in range(len(schedule.steps) - 1, -1, -1):
        step = schedule.steps[i]
        if isinstance(step, Free):
            freed.append(step.value)
            continue
        if freed and i in below_peak:
            dying[i] = frozenset(freed)
        freed = []
    return dying


def _add_tangents(backward: _Side) -> None:
    """All tangents, in order, after the saved tensors: AOT passes each, used or not.

    The output is there already: a tangent may itself be a gradient.
    """
    for node in backward.lowering.joint.tangents:
        used = backward.tangents.get(node)
        fresh = backward.add_placeholder(node)
        if used is not None:
            used.replace_all_uses_with(fresh)
            backward.graph.erase_node(used)


@dataclass
class _Side:
    """One of the two graphs while it is written.

    `env` maps nodes of the joint graph to their present copy here; freeing or recomputing a value removes the entries
    of its storage. `saved` are joint nodes (or rng-state pseudo-ops) that this side expects from the forward.
    """

    lowering: Lowering
    computed: set[int]  # ops that ran at least once
    is_forward: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    states: dict[int, fx.Node] = field(default_factory=dict)  # value of a generator state -> its node here
    saved: dict[fx.Node | int, fx.Node] = field(default_factory=dict)
    tangents: dict[fx.Node, fx.Node] = field(default_factory=dict)
    last_placeholder: fx.Node | None = None
    results: list[Any] | None = None  # outputs of the forward, once they are all there
    handed: dict[int, fx.Node] = field(default_factory=dict)  # primal -> its gradient, once it is handed out
    names_of_value: dict[int, list[fx.Node]] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)  # values that were computed on this side

    def run(self, step: Compute | Free, dying: frozenset[int]) -> None:
        if isinstance(step, Free):
            self.forget(step.value)
        else:
            self.compute(step.op, dying)

    def compute(self, index: int, dying: frozenset[int]) -> None:
        op = self.lowering.graph.ops[index]
        node = self.lowering.node_of_op[index]
        again = index in self.computed
        self.computed.add(index)
        if op.target == "placemat.rng_state":
            (state,) = op.outputs
            random = self.lowering.node_of_op[index + 1]
            assert random is not None
            self.states[state] = self.add_rng_state(random, op.name)
        if op.target == "placemat.copy_back":
            self.results = self.outputs()
        if index in self.lowering.handouts:
            self.hand_out(self.lowering.handouts[index])
        if node is None:
            return
        copy = self.call_again(index, node) if again else self.graph.node_copy(node, self.get)
        if dying:
            self.reuse(node, copy, dying)
        self.made.update(op.outputs)
        held: set[int] = set()
        if again:
            # The caller holds the first copy of an output, so the new one goes at once.
            held = {value for value in op.outputs if self.lowering.graph.values[value].pinned}
            for value in op.outputs:
                if value not in held:
                    self.forget(value)
        if self.lowering.value_of_node.get(node) not in held:
            self.bind(node, copy)
        self.add_results(node, copy, held)

    def call_again(self, index: int, node: fx.Node) -> fx.Node:
        """A recomputation: the same call; a random op with the state it had, BatchNorm without its statistics.

        In the forward BatchNorm remakes its new statistics, too: they go back to the module when the forward returns,
        and until then its inputs are the old ones.
        """
        target: Any = node.target
        args, kwargs = node.args, node.kwargs
        if not self.is_forward and batch_norm.replays_without_statistics(node):
            target, args = batch_norm.replay_call(node)
        if target is eager_ops.FORWARD:
            target = eager_ops.runs_again()
        args, kwargs = fx.map_arg(args, self.get), fx.map_arg(kwargs, self.get)
        state = self.lowering.state_of_op.get(index)
        if state is not None:
            args = (self.get_state(state), *rng_device(node), target, *args)
            target = rng.replay
        copy = self.graph.create_node("call_function", target, args, kwargs, name=f"{node.name}_recomputed")
        copy.meta = dict(node.meta)
        if target is batch_norm.NO_STATS:
            copy.meta["val"] = node.meta["val"][:3]
        return copy

    def reuse(self, node: fx.Node, copy: fx.Node, dying: frozenset[int]) -> None:
        """Let a call write into an argument that was made on this side and is about to be freed.

        What the forward saved is not touched: a second backward reads it again.
        """
        for value, position, how in candidates(node, self.lowering.base_of_value, self.lowering.names):
            if value in dying and value in self.made and not self.lowering.graph.values[value].pinned:
                copy.meta[IN_PLACE] = how, position
                return

    def add_results(self, node: fx.Node, copy: fx.Node, held: Container[int | None] = ()) -> None:
        """Name the results of an op with several outputs right away, so that each storage lives on its own.

        Values in `held` are there already.
        """
        results = copy.meta.get("val")
        if not isinstance(results, (list, tuple)):
            return
        for user in node.users:
            if self.lowering.value_of_node.get(user) in held:
                continue
            if user.target is operator.getitem and user.args[1] < len(results):  # type: ignore[operator]
                result = self.graph.call_function(operator.getitem, (copy, user.args[1]))
                result.meta = dict(user.meta)
                self.bind(user, result)
                self.add_results(user, result, held)

    def get(self, node: fx.Node) -> fx.Node:
        """The present copy of a joint node: at hand, a view to apply again, or a tensor saved by the forward."""
        if node in self.env:
            return self.env[node]
        value = self.lowering.value_of_node.get(node)
        is_base = value is not None and self.lowering.base_of_value.get(value) is node
        if node.op == "placeholder" or is_base:
            return self.bind(node, self.add_saved(node))
        assert node not in self.lowering.op_of_node, f"{node} is read where the schedule does not hold it"
        return self.bind(node, self.graph.node_copy(node, self.get))  # a view, or an attribute

    def bind(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        self.env[node] = copy
        value = self.lowering.value_of_node.get(node)
        if value is not None:
            self.names_of_value.setdefault(value, []).append(node)
        return copy

    def outputs(self) -> list[Any]:
        """The forward's outputs. New contents of overwritten inputs are taken before the schedule drops them."""
        if self.results is None:
            self.results = [self.get(o) if isinstance(o, fx.Node) else o for o in self.lowering.joint.forward_outputs]
        return self.results

    def gradient(self, position: int) -> Any:
        gradient = self.lowering.joint.gradients[position]
        return self.get(gradient) if isinstance(gradient, fx.Node) else gradient

    def hand_out(self, positions: Positions) -> None:
        """End a segment: these gradients are returned, and nothing here has them any more."""
        self.handed.update({position: self.gradient(position) for position in positions})
        end = self.graph.call_function(hand_out, (tuple(self.handed[position] for position in positions),))
        end.meta = {"val": None}

    def get_state(self, value: int) -> fx.Node:
        if value not in self.states:
            self.states[value] = self.add_saved(value)
        return self.states[value]

    def get_saved(self, key: fx.Node | int) -> fx.Node:
        return self.states[key] if isinstance(key, int) else self.get(key)

    def forget(self, value: int) -> None:
        """A storage is gone: so are the names of it and of its views."""
        self.states.pop(value, None)
        for node in self.names_of_value.pop(value, ()):
            self.env.pop(node, None)

    def add_placeholder(self, node: fx.Node) -> fx.Node:
        copy = self._insert_placeholder(node.name)
        copy.meta = dict(node.meta)
        return self.bind(node, copy)

    def add_saved(self, key: fx.Node | int) -> fx.Node:
        name = key.name if isinstance(key, fx.Node) else self.lowering.graph.values[key].name
        copy = self._insert_placeholder(name)
        copy.meta = dict(key.meta) if isinstance(key, fx.Node) else {"val": self.lowering.fake_rng_state}
        if isinstance(key, fx.Node) and is_tangent(key):
            self.tangents[key] = copy
        else:
            self.saved[key] = copy
        return copy

    def _insert_placeholder(self, name: str) -> fx.Node:
        anchor = self.last_placeholder
        first = next(iter(self.graph.nodes), None)
        if anchor is not None:
            with self.graph.inserting_after(anchor):
                copy = self.graph.placeholder(name)
        elif first is not None:
            with self.graph.inserting_before(first):
                copy = self.graph.placeholder(name)
        else:
            copy = self.graph.placeholder(name)
        self.last_placeholder = copy
        return copy

    def add_rng_state(self, random: fx.Node, name: str) -> fx.Node:
        state = self.graph.create_node("call_function", rng.save_state, rng_device(random), {}, name=name)
        state.meta = {"val": self.lowering.fake_rng_state}
        return state


def rng_device(node: fx.Node) -> tuple[str, int | None]:
    """Device type and ordinal of the generator that a random op draws from."""
    tensor = next(t for t in tensors_of(node) if t is not None)
    return tensor.device.type, tensor.device.index
