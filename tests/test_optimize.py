"""optimize, plan, apply, restore and minimum_budget from end to end on small models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import placemat
from placemat.cost_models import Roofline, device_spec
from placemat.graph.static import static_bytes
from tests.steps import STEPS, Branches, make_step, run_step

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
QUICK = (0.0, 1.0)  # the others are slow
MATMUL_ONLY = ("attention",)  # steps in which no op has a workspace that the default cost model only bounds


def measured_peak(model: nn.Module, args, loss_fn=None, **budgeted) -> int:
    """Static bytes and the allocator's peak over a step, as the budget counts."""

    def step() -> None:
        output = model(*args)
        (output if loss_fn is None else loss_fn(output)).backward()

    step()  # compiles
    for p in model.parameters():
        p.grad = None
    return sum(static_bytes(model, args, {}).values()) + placemat.measure(step).peak_bytes


@pytest.mark.parametrize("fraction", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FRACTIONS])
@pytest.mark.parametrize("name", STEPS)
def test_same_training_within_the_budget(name, fraction):
    model, args = make_step(name)
    expected = run_step(model, args)
    assert placemat.optimize(model, None, args, budget_fraction=fraction, time_limit_s=5) is model
    plan = model.plan
    assert not plan.runs_original
    assert run_step(model, args).same_as(expected)
    measured = measured_peak(model, args)
    assert measured <= plan.budget_bytes
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    if name in MATMUL_ONLY:
        assert measured == plan.predicted_peak_bytes


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "attention" else n for n in STEPS])
def test_below_the_floor_is_refused_and_at_the_floor_runs(name):
    model, args = make_step(name)
    floor = placemat.minimum_budget(model, args)
    with pytest.raises(placemat.BudgetTooSmall, match=f"{floor} bytes") as caught:
        placemat.optimize(model, floor - 1, args)
    assert caught.value.minimum_budget_bytes == floor
    assert sum(caught.value.breakdown.values()) == floor
    assert caught.value.binding_op in str(caught.value)
    assert "forward" not in model.__dict__
    placemat.optimize(model, floor, args)
    assert measured_peak(model, args) <= floor


def test_ample_budget_runs_the_original_forward():
    model, args = make_step("branches")
    expected = run_step(model, args)
    placemat.optimize(model, "1 TiB", args)
    assert model.plan.runs_original
    called = []
    model.stem.register_forward_hook(lambda *_: called.append(1))
    assert run_step(model, args).same_as(expected)
    assert called == [1]


def test_cost_and_memory_move_in_opposite_directions():
    model, args = make_step("branches")
    plans = [placemat.plan(model, None, args, budget_fraction=f, time_limit_s=5) for f in FRACTIONS]
    overheads = [p.overhead for p in plans]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > 0 == overheads[-1]
    assert all(sum(p.breakdown.values()) == p.predicted_peak_bytes for p in plans)


def test_plan_leaves_model_and_random_numbers_alone():
    model, args = make_step("branches")
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    placemat.plan(model, None, args, budget_fraction=0.5, time_limit_s=5)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert "forward" not in model.__dict__
    assert all(p.grad is None for p in model.parameters())


def test_plan_allocates_no_activations():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    x = torch.randn(4096, 256)
    placemat.plan(model, "1 GiB", (x,))  # imports and calibrations
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(5)])
    measured = placemat.measure(lambda: placemat.plan(model, "1 GiB", (x,)))
    assert measured.peak_bytes < x.nbytes


def test_without_examples_the_first_call_is_planned():
    model, args = make_step("branches")
    expected = run_step(model, args)
    floor = placemat.minimum_budget(model, args)
    placemat.optimize(model, floor)
    assert model.forward.plan is None
    assert run_step(model, args).same_as(expected)
    assert model.plan.predicted_peak_bytes <= floor


def test_another_batch_size_is_planned_under_the_same_budget(caplog):
    model, args = make_step("attention")
    placemat.optimize(model, None, args, budget_fraction=0.5, time_limit_s=5)
    first = model.plan
    smaller = (args[0][:1],)
    expected = run_step(placemat.restore(copy.deepcopy(model)), smaller)
    assert run_step(model, smaller).same_as(expected)
    assert model.plan.fingerprint != first.fingerprint
    assert "planned again" in caplog.text


def test_restore_undoes_optimize():
    model, args = make_step("branches")
    placemat.optimize(model, None, args, budget_fraction=0.5, time_limit_s=5)
    assert placemat.restore(model) is model
    assert "forward" not in model.__dict__
    with pytest.raises(placemat.PlacematError, match="not optimized"):
        placemat.restore(model)


def test_module_stays_itself():
    model, args = make_step("branches")
    keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    placemat.optimize(model, None, args, budget_fraction=0.25, time_limit_s=5)
    assert type(model) is Branches
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == parameters
    expected = run_step(model, args)
    twin = copy.deepcopy(model)
    assert twin.forward.module is twin
    assert run_step(twin, args).same_as(expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.forward.plan == model.plan
    assert run_step(loaded, args).same_as(expected)
    assert pickle.loads(pickle.dumps(model)).forward.plan == model.plan


def test_optimized_module_is_collected():
    model, args = make_step("attention")
    placemat.optimize(model, None, args, budget_fraction=0.25, time_limit_s=5)
    run_step(model, args)
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None


def test_no_grad_and_evaluation_use_the_original_forward():
    model, args = make_step("branches")
    placemat.optimize(model, None, args, budget_fraction=0.0, time_limit_s=5)
    model.eval()
    with torch.no_grad():
        expected = placemat.restore(copy.deepcopy(model))(*args)
        assert torch.equal(model(*args), expected)
    assert model.forward._backend.runs == 0


def test_plan_is_saved_and_applied_in_another_process(tmp_path):
    model, args = make_step("branches")
    plan = placemat.plan(model, None, args, budget_fraction=0.25, time_limit_s=5)
    plan.save(tmp_path / "plan.json")
    script = textwrap.dedent(
        """
        import sys, torch, placemat
        import placemat.pipeline
        def forbidden(*args, **kwargs):
            raise AssertionError("solved again")
        placemat.pipeline.solve = placemat.pipeline.known_floor = placemat.pipeline.floor_for = forbidden
        from tests.steps import make_step, run_step
        from tests.test_optimize import measured_peak
        torch.set_num_threads(1)
        model, args = make_step("branches")
        expected = run_step(model, args)
        placemat.apply(model, placemat.Plan.load(sys.argv[1]))
        assert run_step(model, args).same_as(expected)
        print(measured_peak(model, args), model.plan.schedule == placemat.Plan.load(sys.argv[1]).schedule)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "plan.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, same_schedule = done.stdout.split()[-2:]
    assert same_schedule == "True"
    placemat.apply(model, plan)
    assert int(peak) == measured_peak(model, args)


def test_plan_of_another_model_or_shape_is_refused():
    model, args = make_step("branches")
    plan = placemat.plan(model, None, args, budget_fraction=0.25, time_limit_s=5)
    with pytest.raises(placemat.PlanMismatch, match="other parameters"):
        placemat.apply(make_step("attention")[0], plan)
    placemat.apply(model, plan)
    with pytest.raises(placemat.PlanMismatch, match=r"\(7, 64\).*drop_last"):
        model(torch.randn(7, 64))
    assert run_step(model, args).loss.isfinite()


def test_ample_plan_is_checked_too():
    model, args = make_step("branches")
    placemat.apply(model, placemat.plan(model, "1 TiB", args))
    with pytest.raises(placemat.PlanMismatch, match=r"\(7, 64\).*drop_last"):
        model(torch.randn(7, 64))


class _Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 500))
        self.aux = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.aux(x)


def _cross_entropy(output) -> torch.Tensor:
    return nn.functional.cross_entropy(output[0], torch.zeros(len(output[0]), dtype=torch.long))


def test_loss_outside_the_module_is_planned_for():
    model, args = _Logits(), (torch.randn(64, 32),)
    without = placemat.plan(model, None, args, budget_fraction=1.0, time_limit_s=5)
    expected = run_step(model, args, loss_fn=_cross_entropy)
    placemat.optimize(model, None, args, budget_fraction=0.0, loss_fn=_cross_entropy, time_limit_s=5)
    plan = model.plan
    assert plan.predicted_peak_bytes > without.predicted_peak_bytes
    got = run_step(model, args, loss_fn=_cross_entropy)
    assert got.same_as(expected)
    assert [g is None for g in got.gradients] == [False] * 4 + [True] * 2
    targets = 64 * 8  # the int64 labels that the loss makes for itself
    assert measured_peak(model, args, _cross_entropy) <= plan.budget_bytes + targets


def test_gradient_that_the_loss_does_not_send_stays_none_without_loss_fn():
    model, args = _Logits(), (torch.randn(64, 32),)
    placemat.optimize(model, None, args, budget_fraction=0.0, time_limit_s=5)
    got = run_step(model, args, loss_fn=_cross_entropy)
    assert [g is None for g in got.gradients] == [False] * 4 + [True] * 2


def test_gradient_into_an_output_that_the_plan_excludes_is_refused():
    model, args = _Logits(), (torch.randn(64, 32),)
    placemat.optimize(model, None, args, budget_fraction=0.0, loss_fn=_cross_entropy, time_limit_s=5)
    with pytest.raises(placemat.UnsupportedFeature, match="loss_fn"):
        sum(o.sum() for o in model(*args)).backward()


def test_double_backward_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)
    placemat.optimize(model, None, (x,), budget_fraction=0.5, time_limit_s=5)
    with pytest.raises(placemat.UnsupportedFeature, match="double backward"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_retained_graph_runs_backward_twice():
    model, args = make_step("branches")
    placemat.optimize(model, None, args, budget_fraction=0.25, time_limit_s=5)
    torch.manual_seed(0)
    loss = model(*args)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))


def test_two_forwards_before_their_backwards():
    model, args = make_step("branches")

    def both() -> list[torch.Tensor]:
        torch.manual_seed(1)
        a, b = model(*args), model(*args)
        b.backward()
        a.backward()
        gradients = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return gradients

    expected = both()
    placemat.optimize(model, None, args, budget_fraction=0.0, time_limit_s=5)
    with pytest.warns(placemat.UndeclaredGradients):  # of b, when a's backward begins
        assert all(torch.equal(a, b) for a, b in zip(both(), expected, strict=True))


def test_unplanned_run_is_noticed():
    model, args = make_step("branches")
    placemat.optimize(model, None, args, budget_fraction=0.25, time_limit_s=5)
    with torch.compiler.set_stance("force_eager"), pytest.raises(placemat.UnsupportedFeature, match="did not run"):
        model(*args)


@pytest.mark.parametrize(
    "budget", [-5, 0, "lots", "", float("nan"), 0.5, True, None, "12 parsecs", "-3 GiB", [1], np.float64(3.0)]
)
def test_bad_budgets_are_refused_before_anything_happens(budget):
    model, args = make_step("branches")
    rng = torch.get_rng_state()
    for function in (placemat.optimize, placemat.plan):
        with pytest.raises(placemat.PlacematError, match="budget_bytes"):
            function(model, budget, args)
    assert "forward" not in model.__dict__
    assert torch.equal(torch.get_rng_state(), rng)


def test_other_bad_input_is_refused_by_name():
    model, args = make_step("branches")
    with pytest.raises(placemat.PlacematError, match="example inputs"):
        placemat.plan(model, "1 GiB")
    with pytest.raises(placemat.PlacematError, match="budget_fraction"):
        placemat.plan(model, None, args, budget_fraction=1.5, time_limit_s=5)
    with pytest.raises(placemat.PlacematError, match="not both"):
        placemat.plan(model, "1 GiB", args, budget_fraction=0.5, time_limit_s=5)
    with pytest.raises(placemat.PlacematError, match="Module"):
        placemat.plan(lambda x: x, "1 GiB", args)
    with pytest.raises(placemat.UnsupportedFeature, match="nothing to train"):
        placemat.optimize(Branches().requires_grad_(False), "1 GiB", args)
    with pytest.raises(placemat.UnsupportedFeature, match="2 devices"):
        placemat.plan(model, "1 GiB", (torch.empty(48, 64, device="meta"),))
    assert "forward" not in model.__dict__


def test_equal_models_get_equal_plans():
    plans = []
    for _ in range(2):
        model, args = make_step("branches")
        plans.append(placemat.plan(model, None, args, budget_fraction=0.3, time_limit_s=5))
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes


def test_accumulating_gradients_are_budgeted():
    model, args = make_step("branches")
    plain = placemat.plan(model, None, args, budget_fraction=1.0, time_limit_s=5)
    accumulating = placemat.plan(model, None, args, budget_fraction=1.0, accumulate_grad=True, time_limit_s=5)
    gradients = sum(p.nbytes for p in model.parameters())
    assert accumulating.predicted_peak_bytes - plain.predicted_peak_bytes == gradients


def test_meta_model_is_planned_for_a_device_that_is_not_here():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)])
        x = torch.empty(65536, 4096)
    plan = placemat.plan(
        model, None, (x,), budget_fraction=0.3, cost_model=Roofline(device_spec("H200")), time_limit_s=5
    )
    assert plan.device == "meta"
    assert 0 < plan.overhead < 0.5
    assert plan.keep_everything_bytes > plan.budget_bytes > 4 * x.nbytes


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.shared(x))
        b = torch.sigmoid(self.shared(a))
        return self.head(a * b + self.shared(b)).float().pow(2).sum()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("cache", [True, False])
def test_weight_shared_under_autocast_is_cast_as_often_as_in_eager(fraction, cache):
    torch.manual_seed(0)
    model, args = _Shared(), (torch.randn(512, 64),)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            loss = model(*args)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return [loss.detach(), *gradients]

    expected = step()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        placemat.optimize(model, None, args, budget_fraction=fraction, time_limit_s=5)
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    assert model.forward._backend.runs == 1
