"""Measured costs: synthetic inputs, trials, the cache on disk, and what falls back to the roofline."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import placemat
from placemat.cost_models import Measured, Roofline, device_spec
from placemat.cost_models import measured as measured_module
from placemat.cost_models.base import cost_graph
from placemat.cost_models.cache import JsonCache
from placemat.cost_models.modes import outside_dispatch_modes
from placemat.cost_models.synthetic import arguments, make_tensor
from placemat.cost_models.trial import Trial
from placemat.cost_models.workspaces import is_bound, is_known, workspace_bytes
from placemat.graph.capture import capture
from placemat.graph.eager_modules import KeptModules
from placemat.graph.ir import OpGraph, OpSignature, TensorSpec
from placemat.graph.lower import lower
from tests.test_cost_models_roofline import op_of, sign

aten = torch.ops.aten
CPU = torch.device("cpu")


def graph_of(model: nn.Module, *args: torch.Tensor) -> OpGraph:
    joint = capture(model.forward, args, {}, KeptModules.find(model, ()))
    return lower(joint, device="cpu", static_bytes={}).graph


class ManyOps(nn.Module):
    """Indices, masks, several results, in-place and random ops, expanded and transposed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, indices: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(indices))
        x = F.dropout(x, 0.5) + x.mean(0, keepdim=True)
        x = x.masked_fill(x > 1, 0.0).clone().mul_(2)
        x = x.index_add(0, indices[0] % 2, x[: indices.shape[1]].detach())
        picked = x.gather(1, indices.unsqueeze(-1).expand(-1, -1, 8) % 4)
        best, _ = picked.max(1)
        pooled = F.max_pool2d(x.unsqueeze(0), 2).flatten(1).sum()
        return F.cross_entropy(self.head(best), target) + x.sort(-1)[0].cumsum(-1).sum().sigmoid() + pooled


def many_ops() -> OpGraph:
    return graph_of(ManyOps(), torch.zeros(6, 4, dtype=torch.long), torch.zeros(6, dtype=torch.long))


def test_every_op_runs_on_synthetic_inputs_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    graph = many_ops()
    state = torch.get_rng_state()
    costs = cost_graph(Measured("cpu", cache_dir=tmp_path), graph)
    assert not [note for note in costs.notes if "estimates" in note]
    assert {op.target for op in graph.ops if costs.runtime_s[op.index] == 0} <= {
        op.target for op in graph.ops if op.target.startswith("placemat.")
    }
    assert all(s < 0.1 for s in costs.runtime_s)
    assert torch.equal(torch.get_rng_state(), state)


def test_results_on_synthetic_inputs_have_the_layout_of_the_signature() -> None:
    for op in many_ops().ops:
        if not op.target.startswith("aten."):
            continue
        with torch.no_grad():
            result = Trial.of(op.signature, CPU, copies=1).calls[0]()
        results = [r for r in (result if isinstance(result, (tuple, list)) else [result]) if r is not None]
        specs = [o for o in op.signature.outputs if o is not None]
        assert [tuple(r.shape) for r in results if r.numel()] == [s.shape for s in specs if s.numel], op.target
        assert all(r.isfinite().all() for r in results if r.is_floating_point()), op.target


def test_workspaces_of_trials_are_those_of_the_exact_formulas() -> None:
    for op in many_ops().ops:
        if op.target.startswith("aten.") and is_known(op.target) and not is_bound(op.signature):
            with torch.no_grad():
                found = Trial.of(op.signature, CPU, copies=1).workspace_bytes()
            formula = workspace_bytes(op.signature, torch.get_num_threads())
            assert found <= formula if op.target == "aten.sort.default" else found == formula, op.target


@pytest.mark.parametrize(
    ("call", "position", "bound"),
    [
        (lambda: sign(aten.embedding.default, torch.ones(7, 2), torch.zeros(50, dtype=torch.long)), 1, 7),
        (
            lambda: sign(
                aten.embedding_dense_backward.default,
                torch.ones(50, 2),
                torch.zeros(50, dtype=torch.long),
                9,
                -1,
                False,
            ),
            1,
            9,
        ),
        (lambda: sign(aten.gather.default, torch.ones(50, 3), 1, torch.zeros(50, 3, dtype=torch.long)), 2, 3),
        (
            lambda: sign(
                aten.scatter_add.default, torch.ones(4, 50), 0, torch.zeros(4, 50, dtype=torch.long), torch.ones(4, 50)
            ),
            2,
            4,
        ),
        (
            lambda: sign(
                aten.nll_loss_forward.default, torch.ones(50, 6), torch.zeros(50, dtype=torch.long), None, 1, -100
            ),
            1,
            6,
        ),
    ],
)
def test_indices_are_spread_over_their_range(call: Callable[[], OpSignature], position: int, bound: int) -> None:
    args, _ = arguments(call(), CPU)
    assert int(args[position].min()) == 0
    assert int(args[position].max()) == bound - 1


def test_values_are_probabilities_in_the_given_layout() -> None:
    expanded = TensorSpec((3, 4), (0, 1), "float32", "cpu", 4)
    transposed = TensorSpec((4, 3), (1, 4), "bfloat16", "cpu", 2)
    for spec in (expanded, transposed):
        made = make_tensor(spec, CPU)
        assert made.stride() == spec.strides
        assert str(made.dtype) == f"torch.{spec.dtype}"
        assert 0.09 < float(made.min()) < float(made.max()) < 0.91
    assert make_tensor(expanded, CPU).untyped_storage().nbytes() == 16
    mask = make_tensor(TensorSpec((1000,), (1,), "bool", "cpu", 1), CPU)
    assert 300 < int(mask.sum()) < 700


def test_equal_ops_are_measured_once_and_then_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    measure = measured_module.measure

    def counting(signatures: Any, *rest: Any) -> Any:
        counted.append(len(signatures))
        return measure(signatures, *rest)

    monkeypatch.setattr(measured_module, "measure", counting)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    graph = graph_of(model, torch.zeros(3, 8))
    first = cost_graph(Measured("cpu", cache_dir=tmp_path), graph)
    assert len(counted) == 1
    assert counted[0] <= len({op.signature for op in graph.ops})
    assert counted[0] < len(graph.ops) / 2
    assert cost_graph(Measured("cpu", cache_dir=tmp_path), graph) == first
    assert len(counted) == 1
    tanh = [first.runtime_s[op.index] for op in graph.ops if op.target == "aten.tanh.default"]
    assert len(tanh) == 4
    assert len(set(tanh)) == 1


def test_the_time_limit_leaves_estimates_that_are_named_and_not_kept(tmp_path: Path) -> None:
    signature = sign(aten.mm.default, torch.ones(8, 8), torch.ones(8, 8))
    base = Roofline(device_spec("L4"))
    model = Measured("cpu", cache_dir=tmp_path, time_limit_s=-1, otherwise=base)
    graph = OpGraph((op_of(signature),), (), 1, {}, "cpu", "")
    costs = cost_graph(model, graph)
    assert costs.runtime_s == (base.op_cost(op_of(signature)).runtime_s,)
    assert "aten.mm.default are estimates: they were not measured within the time limit" in costs.notes[0]
    model.time_limit_s = 60
    assert not cost_graph(model, graph).notes


def test_custom_operators_are_not_run(tmp_path: Path) -> None:
    spec = TensorSpec((4,), (1,), "float32", "cpu", 4)
    op = op_of(OpSignature("mylib.launch.default", (spec,), (), (spec,)))
    cost = Measured("cpu", cache_dir=tmp_path, otherwise=Roofline(device_spec("L4"))).op_cost(op)
    assert cost.estimated == "only PyTorch's own operators are run to be measured"
    assert cost.runtime_s > 0


def test_an_op_that_does_not_run_is_estimated_and_said_so_in_the_plan(tmp_path: Path) -> None:
    spec = TensorSpec((4, 4), (4, 1), "float32", "cpu", 4)
    wrong = TensorSpec((3, 3), (3, 1), "float32", "cpu", 4)
    op = op_of(OpSignature("aten.add.Tensor", (spec, wrong), (), (spec,)))
    for _ in range(2):  # failures are not kept: memory may suffice next time
        cost = Measured("cpu", cache_dir=tmp_path, otherwise=Roofline(device_spec("L4"))).op_cost(op)
        assert cost.estimated is not None
        assert cost.estimated.startswith("they do not run on synthetic inputs (RuntimeError: The size of tensor a")


def test_nothing_is_measured_while_a_profiler_runs(tmp_path: Path) -> None:
    op = op_of(sign(aten.mm.default, torch.ones(8, 8), torch.ones(8, 8)))
    model = Measured("cpu", cache_dir=tmp_path)
    with torch.profiler.profile():
        assert "profiler" in str(model.op_cost(op).estimated)
    assert model.op_cost(op).estimated is None


def test_measuring_works_under_fake_tensors_and_travels_by_pickle(tmp_path: Path) -> None:
    op = op_of(sign(aten.mm.default, torch.ones(8, 8), torch.ones(8, 8)))
    model = Measured("cpu", cache_dir=tmp_path)
    with FakeTensorMode():
        cost = model.op_cost(op)
    assert cost.estimated is None
    assert pickle.loads(pickle.dumps(model)).op_cost(op) == cost


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(placemat.PlacematError, match=r"Recorded\.load"):
        Measured("xpu")


def test_a_lone_profiler_free_measurement_finds_what_vendor_libraries_take(tmp_path: Path) -> None:
    x, weight = torch.ones(2, 3, 16, 16), torch.ones(8, 3, 3, 3)
    signature = sign(aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    cost = Measured("cpu", cache_dir=tmp_path).op_cost(op_of(signature))
    with outside_dispatch_modes():
        assert cost.workspace_bytes == Trial.of(signature, CPU, copies=1).workspace_bytes()
    assert cost.workspace_bytes <= workspace_bytes(signature, torch.get_num_threads())


def _write(directory: Path, worker: int) -> None:
    cache = JsonCache("numbers", directory, lambda entry: isinstance(entry, int))
    for i in range(20):
        cache.put_all({f"{worker}-{i}": i, "contested": worker})


def test_concurrent_writers_lose_nothing_and_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(tmp_path, w)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    cache = JsonCache("numbers", tmp_path, lambda entry: isinstance(entry, int))
    assert all(cache.get(f"{w}-{i}") == i for w in range(4) for i in range(20))
    assert cache.put("contested", 99) == cache.get("contested") in range(4)


def test_the_same_call_gets_the_same_plan_from_another_object(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())
    x = torch.ones(64, 16)
    plans = [
        placemat.plan(model, None, (x,), budget_fraction=0.4, cost_model=Measured("cpu", cache_dir=tmp_path))
        for _ in range(2)
    ]
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].overhead == plans[1].overhead
    assert plans[0].cost_source.startswith("measured: ")


def test_measuring_is_the_default_and_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured_module, "_PROGRESS_S", 0.0)
    lines: list[str] = []
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    plan = placemat.plan(model, "1 GiB", (x,), progress=lines.append)
    assert plan.cost_source.startswith("measured: ")
    assert any(line.startswith("measuring ops: round 1 of ") for line in lines)
    assert (tmp_path / "measured.json").exists()
    assert not (tmp_path / "host.json").exists()  # the roofline was not needed
