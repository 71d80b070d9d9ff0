"""Planned steps in Inductor's code, and optimized modules beside torch.compile."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func

import placemat
from placemat.graph import torch_inductor, torch_private
from placemat.graph.static import static_bytes
from tests.models import gpt2
from tests.steps import STEPS, FreeOfWorkspace, Outcome, make_step, run_step
from tests.test_optimize import measured_peak

needs_compiler = pytest.mark.skipif(
    all(shutil.which(name) is None for name in ("g++", "clang++")), reason="Inductor needs a C++ compiler"
)


@pytest.fixture
def interpreted_graphs(monkeypatch) -> list[fx.GraphModule]:
    """What Inductor would compile is run op by op, and listed: seconds instead of minutes, and no C++ compiler."""
    graphs = []

    def interpreted(graph_module, inputs, **_):
        graphs.append(graph_module)
        return make_boxed_func(fx.Interpreter(graph_module).run)

    monkeypatch.setattr(torch_inductor, "compile_fx_inner", interpreted)
    return graphs


class Total(nn.Module):
    """The sum; it also draws what nobody reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        nn.functional.dropout(x, 0.5)
        return x.sum()


def small_step() -> tuple[nn.Module, tuple[torch.Tensor]]:
    layers = (nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    return nn.Sequential(*layers, Total()), (torch.randn(64, 8),)


def small_plan(model: nn.Module, args, budget_fraction: float = 0.0, **options) -> placemat.Plan:
    return placemat.plan(model, None, args, budget_fraction=budget_fraction, cost_model=FreeOfWorkspace(), **options)


def assert_close(outcome: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(outcome.loss, expected.loss)
    torch.testing.assert_close(outcome.gradients, expected.gradients, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outcome.buffers, expected.buffers)
    assert torch.equal(outcome.rng_state, expected.rng_state)


def saved_by(loss: torch.Tensor) -> list[tuple[object, ...]]:
    """Shape, strides, dtype and storage of each tensor that the step's one autograd node keeps."""
    saved = loss.grad_fn.saved_tensors
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in saved]


def check_step(model: nn.Module, args, plan: placemat.Plan) -> None:
    """One plan under both compilers: the same saved set, the same random numbers, close gradients."""
    saved = {}
    for compiler in ("eager", "inductor"):
        expected = run_step(model, args)
        placemat.apply(model, plan, compiler=compiler)
        assert_close(run_step(model, args), expected)
        saved[compiler] = saved_by(model(*args))
        placemat.restore(model)
    assert saved["eager"] == saved["inductor"]


def test_decomposed_steps_draw_the_same_numbers(interpreted_graphs):
    model, args = small_step()
    check_step(model, args, small_plan(model, args, recompute=["aten.native_dropout"]))
    forward, backward = ({str(n.target) for n in g.graph.nodes} for g in interpreted_graphs)
    in_forward = ("draw_aten_native_dropout", "rng_state_5056", "discard_aten_rand_like", "discard_aten_native_dropout")
    assert {f"placemat_ops.{name}.default" for name in in_forward} <= forward
    assert "placemat_ops.replay_aten_native_dropout.default" in backward
    assert not any("gelu" in target for target in forward | backward)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_compiled_steps(name):
    model, args = make_step(name)
    plan = small_plan(model, args)
    check_step(model, args, plan)
    peaks = []
    for compiler in ("eager", "inductor"):
        placemat.apply(model, plan, compiler=compiler)
        peaks.append(measured_peak(model, args))
        model.zero_grad()
    assert peaks[1] <= 1.35 * peaks[0]  # not promised; with order and reuse left to Inductor, attention is at 1.4


@needs_compiler
@pytest.mark.slow
def test_plans_for_fused_kernels_are_compiled():
    work = gpt2(layers=2, width=64, heads=2, sequence=64, batch=8)
    model, args, kwargs, loss_fn = work
    plan = placemat.plan(
        model, None, args, kwargs, budget_fraction=0.4, loss_fn=loss_fn, compiler="inductor", time_limit_s=5
    )
    assert plan.recompute_seconds > 0
    placemat.apply(model, plan)
    for parameter in model.parameters():
        parameter.grad = None
    report = placemat.verify(model, model, args, kwargs)
    assert {row.status for row in report.rows} <= {"bitwise", "close"}
    static = sum(static_bytes(model, args, kwargs).values())
    assert static + report.optimized.peak_bytes <= 1.1 * plan.budget_bytes  # not promised; 1.02 was measured


@needs_compiler
@pytest.mark.slow
def test_draws_that_nobody_reads_are_compiled():
    model, args = small_step()
    check_step(model, args, small_plan(model, args, recompute=["aten.native_dropout"]))


class Concatenated(nn.Module):
    """Backward reads the parts, not what they are concatenated to, and Inductor makes the parts inside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x).tanh() for layer in self.layers]).sum()


@needs_compiler
@pytest.mark.slow
def test_saved_tensors_have_storages_of_their_own():
    model, args = Concatenated(), (torch.randn(32, 8),)
    check_step(model, args, small_plan(model, args, 1.0))


@needs_compiler
@pytest.mark.slow
def test_expanded_gradients_and_copies_of_the_module():
    model, args = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (torch.randn(32, 8),)
    expected = run_step(model, args, loss_fn=torch.Tensor.sum)
    placemat.apply(model, small_plan(model, args, loss_fn=torch.Tensor.sum), compiler="inductor")
    for optimized in (model, pickle.loads(pickle.dumps(model))):
        for loss_fn in (torch.Tensor.sum, lambda y: (y * torch.ones(32, 4)).sum()):
            assert_close(run_step(optimized, args, loss_fn=loss_fn), expected)
        assert optimized.forward.compiler == "inductor"


@needs_compiler
@pytest.mark.slow
def test_what_inductor_cannot_compile_is_refused():
    model, args = small_step()
    placemat.apply(model, small_plan(model, args), compiler="inductor")
    settings = {"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}
    with torch._inductor.config.patch(settings), pytest.raises(placemat.UnsupportedFeature, match="C\\+\\+ compiler"):
        model(*args)


def test_no_such_compiler():
    model, args = small_step()
    with pytest.raises(placemat.PlacematError, match="'eager', 'inductor'"):
        placemat.optimize(model, "1 GiB", args, compiler="nvcc")


def test_kept_modules_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    with pytest.raises(placemat.UnsupportedFeature, match="'1' is kept eager"):
        placemat.optimize(model, "1 GiB", (torch.randn(3, 4),), compiler="inductor")


def test_wrappers_of_torch_compile_are_refused():
    model, args = small_step()
    plan = small_plan(model, args)
    wrapper = torch.compile(model, backend="eager")
    with pytest.raises(placemat.UnsupportedFeature, match="gives a wrapper"):
        placemat.optimize(wrapper, "1 GiB", args)
    with pytest.raises(placemat.UnsupportedFeature, match="gives a wrapper"):
        placemat.apply(wrapper, plan)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_an_optimized_module_keeps_its_plan(fullgraph):
    model, args = small_step()
    expected = run_step(model, args)
    placemat.apply(model, small_plan(model, args))
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    assert run_step(compiled, args).same_as(expected)
    assert model.forward._backend.runs == 1


def test_a_larger_graph_ends_at_an_optimized_module():
    model, args = small_step()
    placemat.apply(model, small_plan(model, args))

    def step(x):
        return 2.0 * model(2.0 * x)

    def whole_step(x):
        return 2.0 * model(2.0 * x)

    torch.compile(step, backend="eager")(*args).backward()
    assert model.forward._backend.runs == 1
    whole = torch.compile(whole_step, backend="eager", fullgraph=True)
    with pytest.raises(torch_private.Unsupported, match="placemat optimized is compiled by itself"):
        whole(*args)
    with torch.no_grad():  # the original forward, as if it were not optimized
        assert whole(*args).shape == ()
