"""Emitted steps: bitwise eager's results, and exactly the memory that the referee computed."""

from __future__ import annotations

import operator
import random
from collections.abc import Container

import pytest
import torch
from torch import fx, nn

from placemat import rng
from placemat.backend import Backend, Planned
from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.codegen import last_uses
from placemat.cost_models.base import cost_graph
from placemat.emit import emit
from placemat.graph import batch_norm, torch_private
from placemat.graph.capture import capture, make_entry
from placemat.graph.eager_modules import KeptModules
from placemat.graph.lower import RNG_STATE_BYTES, Lowering, lower
from placemat.graph.storages import storage_key, tensors_of
from placemat.problem import Problem
from placemat.schedule import Schedule, canonical
from placemat.simulate import simulate
from tests.steps import STEPS, FreeOfWorkspace, make_step, run_step


def problem_of(lowering: Lowering) -> Problem:
    return Problem.from_op_graph(lowering.graph, cost_graph(FreeOfWorkspace(), lowering.graph))


def recompute_some(problem: Problem, seed: int) -> Schedule:
    """Recompute random forward ops at random places of the backward, some of them several times."""
    generator = random.Random(seed)
    assert problem.border is not None
    computes = list(range(problem.border + 1))
    for step in range(problem.border + 1, len(problem.ops)):
        recomputed: list[int] = []
        for op in range(problem.border):
            if problem.ops[op].recomputable and generator.random() < 0.15:
                recomputed.append(op)
        computes += [*recomputed, step]
    return canonical(problem, computes)


SCHEDULES = {
    "save_all": save_all,
    "recompute_all": recompute_all,
    "chen": chen_sqrt_n,
    "some": lambda p: recompute_some(p, 1),
    "others": lambda p: recompute_some(p, 2),
}


def run_with(model: nn.Module, make_schedule):
    """A callable that runs the model under a schedule."""

    def planner(joint):
        lowering = lower(joint, device="cpu", static_bytes={})
        schedule = make_schedule(problem_of(lowering))
        return Planned(lowering, schedule, below_peak=range(len(schedule.steps)))  # in place wherever it is possible

    backend, entry = Backend(planner, lambda: None, KeptModules({}).refuse_shared), make_entry()
    compiled = torch.compile(entry, backend=backend, fullgraph=True, dynamic=False)

    def forward(*args):
        with torch_private.compile_settings():
            return compiled(model.forward, args, {}, False)

    return forward


class _Optimized(nn.Module):
    """The same parameters and buffers, run by emitted code."""

    def __init__(self, model: nn.Module, make_schedule) -> None:
        super().__init__()
        self.model, self.run = model, run_with(model, make_schedule)

    def forward(self, *args):
        return self.run(*args)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", STEPS)
def test_every_schedule_gives_eagers_bits(name, schedule):
    model, args = make_step(name)
    expected = run_step(model, args)
    got = run_step(_Optimized(model, SCHEDULES[schedule]), args)
    assert got.same_as(expected)


class Walk:
    """Peak bytes of emitted graphs by an independent walk: a storage is dropped when no name that shows it is needed.

    Storages are told apart by the node that made them; names of one storage are the nodes that share its fake tensor.
    """

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.maker: dict[fx.Node, fx.Node | None] = {}  # None: in a storage of the caller's
        self.static = {storage_key(t) for n in lowering.joint.primals for t in tensors_of(n) if t is not None}
        self.peak_bytes = 0

    def forward(self, graph: fx.Graph) -> None:
        self._run(graph, dict.fromkeys(graph.find_nodes(op="placeholder")))

    def backward(self, graph: fx.Graph, saved: list[fx.Node], held: list[fx.Node]) -> None:
        """`saved` and `held` are nodes of the forward graph: what it hands over, and outputs that the caller keeps.

        The caller keeps the tangents, too.
        """
        placeholders = list(graph.find_nodes(op="placeholder"))
        for placeholder, source in zip(placeholders, saved, strict=False):
            self.maker[placeholder] = self.maker[source]
        self._run(graph, dict.fromkeys([*placeholders, *held]), keep=set(placeholders[len(saved) :]))

    def _run(self, graph: fx.Graph, names: dict[fx.Node, None], keep: Container[fx.Node] = ()) -> None:
        dying = last_uses(graph)
        for placeholder in graph.find_nodes(op="placeholder"):
            self.maker.setdefault(placeholder, self._maker(placeholder))
        for node in graph.nodes:
            if node.op == "output":
                return
            self.maker.setdefault(node, self._maker(node))
            names[node] = None
            put_aside = RNG_STATE_BYTES["cpu"] if node.target is rng.replay else 0
            self.peak_bytes = max(self.peak_bytes, self._live_bytes(names) + put_aside)
            if node.op != "placeholder":
                for gone in [*dying.get(node, []), *([] if node.users else [node])]:
                    if gone not in keep:
                        names.pop(gone, None)

    def _maker(self, node: fx.Node) -> fx.Node | None:
        keys = {storage_key(t) for t in tensors_of(node) if t is not None}
        if node.op == "placeholder":
            return None if keys <= self.static else node
        sources = [n for n in node.all_input_nodes if keys <= {storage_key(t) for t in tensors_of(n) if t is not None}]
        return self.maker[sources[0]] if sources else node

    def _live_bytes(self, names) -> int:
        storages = {
            (storage_key(t), self.maker[n]): int(t.untyped_storage().nbytes())
            for n in names
            if self.maker[n] is not None
            for t in tensors_of(n)
            if t is not None
        }
        return sum(storages.values())


@pytest.mark.parametrize("schedule", ["save_all", "recompute_all", "some"])
@pytest.mark.parametrize("name", STEPS)
def test_emitted_graphs_need_what_the_referee_says(name, schedule):
    model, args = make_step(name)
    lowering = lower(capture(model.forward, args, {}), device="cpu", static_bytes={})
    problem = problem_of(lowering)
    plan = SCHEDULES[schedule](problem)
    step = emit(lowering, plan)
    outputs = list(step.forward.graph.output_node().args[0])
    kept, saved = outputs[: -step.num_saved], outputs[-step.num_saved :]
    walk = Walk(lowering)
    walk.forward(step.forward.graph)
    walk.backward(step.backward.graph, saved, [n for i, n in enumerate(kept) if i not in lowering.joint.mutated_inputs])
    assert walk.peak_bytes == simulate(problem, plan).peak_bytes


def test_batch_norm_replay_has_the_same_bits():
    x, w, b = torch.randn(6, 5, 4), torch.randn(5), torch.randn(5)
    mean, var = torch.zeros(5), torch.ones(5)
    full = batch_norm.FUNCTIONAL(x, w, b, mean, var, True, 0.1, 1e-5)
    replay = batch_norm.NO_STATS(x, w, b, True, 0.1, 1e-5)
    assert all(torch.equal(a, c) for a, c in zip(full[:3], replay, strict=True))


def test_recomputed_ops_are_named_so_and_repeat_as_often_as_scheduled():
    model, args = make_step("branches")
    lowering = lower(capture(model.forward, args, {}), device="cpu", static_bytes={})
    problem = problem_of(lowering)
    plan = recompute_some(problem, 1)
    names = [
        n.name
        for n in emit(lowering, plan).backward.graph.nodes
        if "_recomputed" in n.name and n.target is not operator.getitem
    ]
    assert len(names) == len(plan.recomputes) > 10
