"""Situations from which a wrong result, a broken budget or a foreign error could come: right, or refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

import placemat
from placemat.cost_models import present_roofline
from placemat.schedule import Compute, Free, Schedule
from tests.steps import TORCH_VERSION, make_step, run_step


class Wrap(nn.Module):
    """A linear layer with a forward given as a function of (module, input)."""

    flag: bool
    count: int

    def __init__(self, forward, **parts) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x: torch.Tensor):
        return self.run(self, x)


X = torch.linspace(-1, 1, 48).view(6, 8)


def test_numpy_random_numbers_are_refused():
    model = Wrap(lambda m, x: (m.a(x) * torch.from_numpy(np.random.rand(8)).float()).sum())
    with pytest.raises(placemat.CaptureError, match="random"):
        placemat.optimize(model, "1 GiB", (X,))


def test_batch_norm_whose_new_statistics_are_read_runs_once():
    def forward(m, x):
        h = m.norm(m.a(x)).tanh()
        return (h * m.norm.running_mean + m.norm.running_var).pow(2).mean()

    model = Wrap(forward, norm=nn.BatchNorm1d(8))
    expected = run_step(model, (X,))
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    assert run_step(model, (X,)).same_as(expected)


def test_second_module_whose_outputs_are_all_views_leaves_unreached_gradients_none():
    def views(m, x):
        h, g = torch.exp(m.a(x)), torch.sin(m.b(x))
        return x.view(-1), h.view(-1), h.t(), g.view(-1)

    first, second = Wrap(lambda m, x: m.a(x)), Wrap(views)
    hidden = first(X)
    placemat.optimize(first, None, (X,), budget_fraction=0.5, time_limit_s=5)
    placemat.optimize(second, None, (hidden.detach().requires_grad_(),), budget_fraction=0.5, time_limit_s=5)
    second(first(X))[1].sum().backward()
    assert second.a.weight.grad is not None
    assert second.b.weight.grad is None


def test_changed_attribute_is_planned_again():
    model = Wrap(lambda m, x: (m.a(x) if m.flag else m.b(m.a(x))).pow(2).sum(), flag=True)
    placemat.optimize(model, None, (X,), budget_fraction=1.0, time_limit_s=5)
    run_step(model, (X,))
    model.flag = False
    plan = model.plan
    got = run_step(model, (X,))
    assert model.plan is not plan
    placemat.restore(model)
    assert got.same_as(run_step(model, (X,)))


def test_counter_in_the_forward_keeps_running_and_is_warned_about(caplog):
    def forward(m, x):
        m.count += 1
        return m.a(x).sum()

    model = Wrap(forward, count=0)
    floor = placemat.minimum_budget(model, (X,))
    placemat.optimize(model, floor, (X,))
    model.count = 0
    with caplog.at_level(logging.WARNING, logger="placemat"):
        for _ in range(10):
            run_step(model, (X,))
    assert model.count == 10
    assert "compiled 8 times" in caplog.text


def test_a_decision_by_the_value_of_a_tensor_is_refused_in_plain_words():
    """`in` asks each element, and PyTorch speaks of its symbols then."""
    model = Wrap(lambda m, x: m.a(x).sum() if 3.0 in x else m.b(x).sum())
    with pytest.raises(placemat.CaptureError, match=r"by the value of a tensor.*At .*test_refusals.py:\d+") as caught:
        placemat.optimize(model, "1 GiB", (X,))
    assert "Eq(" not in str(caught.value)


@pytest.mark.parametrize(
    ("forward", "parts", "words"),
    [
        (lambda m, x: torch.linalg.inv(m.a(x)[:, :6] + 9 * torch.eye(6)).sum(), {}, "side effects"),
        (
            lambda m, x: m.table(torch.arange(4)).sum() + m.a(x).sum(),
            {"table": nn.Embedding(9, 3, sparse=True)},
            "sparse",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(forward, parts, words):
    model = Wrap(forward, **parts)
    with pytest.raises(placemat.UnsupportedFeature, match=words):
        placemat.optimize(model, "1 GiB", (X,))
    assert "forward" not in model.__dict__


def test_overwritten_buffer_that_shares_storage_is_refused():
    def forward(m, x):
        m.row.add_(x.sum(0))
        return (m.a(x) + m.row + m.rows.sum(0)).sum()

    model = Wrap(forward)
    model.register_buffer("rows", torch.zeros(2, 8))
    model.register_buffer("row", model.rows[0])
    with pytest.raises(placemat.UnsupportedFeature, match="shares its storage"):
        placemat.optimize(model, "1 GiB", (X,))


def test_full_backward_hook_on_a_submodule_is_refused_by_name():
    model = Wrap(lambda m, x: m.a(x).sum())
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    run_step(model, (X,))
    model.a.register_full_backward_hook(lambda *_: None)
    with pytest.raises(placemat.CaptureError, match="hook"):
        model(X)


def supply_offset(module, args, kwargs):
    module.calls = 1
    return args, {**kwargs, "offset": module.scale}


class Offset(nn.Module):
    """A linear layer whose second one takes part only if a hook supplies an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 2.0, 0

    def forward(self, x: torch.Tensor, offset: float | None = None) -> torch.Tensor:
        return self.a(x) if offset is None else self.a(x) + offset * self.calls * self.b(x)


def test_pre_hook_that_supplies_an_argument_and_sets_an_attribute_is_part_of_the_step():
    model = Wrap(lambda m, x: m.inner(x).tanh().sum(), inner=Offset())
    model.inner.register_forward_pre_hook(supply_offset, with_kwargs=True)
    expected = run_step(model, (X,))
    assert sum(g is not None for g in expected.gradients) == 4
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    assert model.inner.calls == 1
    model.inner.calls = 0
    assert run_step(model, (X,)).same_as(expected)
    assert model.inner.calls == 1
    model.inner.scale = 3.0  # read anew
    got = run_step(model, (X,))
    placemat.restore(model)
    assert got.same_as(run_step(model, (X,)))


class Hooked(nn.Module):
    """Registers hooks around its inner module for one call, and again after they are gone."""

    def __init__(self, always_call: bool = False, leave: bool = False) -> None:
        super().__init__()
        self.inner, self.always_call, self.leave = Offset(), always_call, leave

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        def scaled(module, args):
            return (factor * args[0],)

        late = self.inner.register_forward_pre_hook(supply_offset, with_kwargs=True)
        self.inner.register_forward_pre_hook(scaled, prepend=True).remove()
        first = self.inner.register_forward_pre_hook(scaled, prepend=True)
        after = self.inner.register_forward_hook(lambda m, args, out: out.tanh(), always_call=self.always_call)
        y = self.inner(x)
        first.remove()
        with after:
            y = y + self.inner(x)
        if not self.leave:
            late.remove()
        return (y + self.inner(x)).sum()


traces_hooks = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="Dynamo takes hook dictionaries for constants")


@pytest.mark.skipif(TORCH_VERSION >= (2, 13), reason="Dynamo traces them")
def test_hooks_that_the_forward_registers_are_refused_where_they_cannot_be_traced():
    with pytest.raises(placemat.CaptureError, match=r"test_refusals\.py:\d+.*register_forward_pre_hook"):
        placemat.optimize(Hooked(), None, (X, 2.0), budget_fraction=0.0, time_limit_s=5)


@traces_hooks
@pytest.mark.parametrize("others", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hooks_that_the_forward_registers_and_removes_are_part_of_the_step(others):
    torch.manual_seed(0)
    model = Hooked()
    if others:  # they were there before
        model.inner.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model.inner.register_forward_hook(lambda m, args, out: out * 2)
    hooks = model.inner._forward_hooks, model.inner._forward_pre_hooks
    before = [dict(h) for h in hooks]
    expected = [run_step(model, (X, factor)) for factor in (2.0, 3.0)]
    placemat.optimize(model, None, (X, 2.0), budget_fraction=0.0, time_limit_s=5)
    for factor, outcome in zip((2.0, 3.0), expected, strict=True):
        assert run_step(model, (X, factor)).same_as(outcome)
    assert (model.inner._forward_hooks, model.inner._forward_pre_hooks) == hooks  # the objects, as handles know them
    assert model.inner._forward_hooks is hooks[0]
    assert [dict(h) for h in hooks] == before


@traces_hooks
def test_hooks_that_the_forward_leaves_behind_are_refused():
    model = Hooked(leave=True)
    with pytest.raises(placemat.CaptureError, match=r"still there when it returns \(on Offset\)"):
        placemat.optimize(model, None, (X, 2.0), budget_fraction=0.0, time_limit_s=5)
    assert not model.inner._forward_pre_hooks


@traces_hooks
def test_hook_of_a_kind_that_cannot_be_traced_is_refused_with_its_line():
    model = Hooked(always_call=True)
    with pytest.raises(placemat.CaptureError, match=r"calls register_forward_hook\(\).*test_refusals.py:\d+"):
        placemat.optimize(model, None, (X, 2.0), budget_fraction=0.0, time_limit_s=5)
    assert not model.inner._forward_hooks


def run_packed(module, x):
    packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 3, 8), torch.tensor([3, 2]), batch_first=True)
    return module.layer(packed)[0].data.sum()


def run_function(module, x):
    weights = [module.a.weight.repeat(3, 1), module.b.weight.repeat(3, 1)]
    return module.layer(x.unsqueeze(1), torch.zeros(1, 1, 8), weights, False, 1, 0.0, True, False, False)[0].sum()


@pytest.mark.parametrize("allowed", [False, True])  # Dynamo's own switch must not let other bits in
@pytest.mark.parametrize(
    ("kind", "forward", "words"),
    [
        (nn.LSTM, run_packed, "packed sequences"),
        (lambda *_: torch.gru, run_function, "LSTM, GRU or RNN"),
        (lambda *_: torch.ops.aten.gru.input, run_function, "LSTM, GRU or RNN"),
    ],
)
def test_recurrent_functions_and_packing_are_refused_with_their_line(kind, forward, words, allowed):
    model = Wrap(forward, layer=kind(8, 5))
    with (
        torch._dynamo.config.patch(allow_rnn=allowed),
        pytest.raises(placemat.CaptureError, match=rf"{words}.*At .*test_refusals.py:\d+.*LSTMCell"),
    ):
        placemat.optimize(model, "1 GiB", (X,))


@pytest.mark.parametrize("kind", [pytest.param(nn.LSTMCell, marks=pytest.mark.slow), nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_in_a_loop_have_eagers_bits(kind):
    def forward(m, x):
        state = None
        for _ in range(3):
            state = m.cell(x, state)
        return (state[0] if isinstance(state, tuple) else state).pow(2).sum()

    model = Wrap(forward, cell=kind(8, 5))
    expected = run_step(model, (X,))
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    assert run_step(model, (X,)).same_as(expected)


@pytest.mark.parametrize("loss_fn", [lambda o: o, lambda o: (o.sum(), o.mean())])
def test_loss_that_is_no_number_is_refused(loss_fn):
    with pytest.raises(placemat.UnsupportedFeature, match="one element"):
        placemat.plan(Wrap(lambda m, x: m.a(x)), "1 GiB", (X,), loss_fn=loss_fn)


def test_arguments_of_the_wrong_kind_are_refused():
    model, args = make_step("branches")
    for call, words in (
        (lambda: placemat.optimize(model, "1 GiB", args[0]), "tuple"),
        (lambda: placemat.optimize(model, "1 GiB", args, "kwargs"), "dict"),
        (lambda: placemat.optimize(model, "1 GiB", args, cost_model="fast"), "op_cost"),
        (lambda: placemat.optimize(model, "1 GiB", args, loss_fn=3), "loss_fn"),
        (lambda: placemat.optimize(model, "1 GiB", args, time_limit_s=-1), "time_limit_s"),
        (lambda: placemat.optimize(nn.LazyLinear(3), "1 GiB", args), "lazy"),
        (lambda: placemat.apply(model, "plan.json"), "apply"),
    ):
        with pytest.raises(placemat.PlacematError, match=words):
            call()


def test_op_with_an_unknown_workspace_is_noted():
    model = Wrap(lambda m, x: torch.matrix_exp(m.a(x)[:, :6]).sum())
    plan = placemat.plan(model, "1 GiB", (X,), cost_model=present_roofline("cpu"))
    assert any("linalg_matrix_exp" in note for note in plan.notes)
    assert "linalg_matrix_exp" in plan.summary()
    assert placemat.plan(model, "1 GiB", (X,)).notes == ()  # where it is measured, it is known


def without_frees(schedule: Schedule) -> Schedule:
    return Schedule(tuple(step for step in schedule.steps if isinstance(step, Compute)))


def without_recomputations(schedule: Schedule) -> Schedule:
    steps = schedule.steps
    return Schedule(tuple(step for i, step in enumerate(steps) if isinstance(step, Free) or step not in steps[:i]))


@pytest.mark.parametrize("edit", [without_frees, without_recomputations])
def test_edited_schedule_is_refused(tmp_path, edit):
    """When the file is loaded, though its checksum is right, and again when a plan in memory is applied."""
    model, args = make_step("branches")
    plan = placemat.plan(model, None, args, budget_fraction=0.0, time_limit_s=5)
    edited = replace(plan, schedule=edit(plan.schedule))
    edited.save(tmp_path / "plan.json")
    with pytest.raises(placemat.PlacematError, match=r"the file was edited|whose schedule is not one"):
        placemat.Plan.load(tmp_path / "plan.json")
    placemat.apply(model, edited)
    with pytest.raises(placemat.PlanMismatch, match="plan"):
        model(*args)


def test_a_loss_of_two_arguments_is_refused_as_such():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    with pytest.raises(placemat.UnsupportedFeature, match=r"loss_fn takes \(output, target\).*Remedy: loss_fn=lambda"):
        placemat.plan(model, "1 MiB", (x,), loss_fn=lambda output, target: (output - target).sum())
