"""Modules that are kept eager: recurrent layers by themselves, others by name."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import placemat
from placemat.graph.eager_run import InnerGraph
from tests.steps import run_step

X = torch.randn(6, 12, 8, generator=torch.Generator().manual_seed(1))


class Around(nn.Module):
    """A module between layers that are worth recomputing; `forward` gets (self, x) and may use `inner`."""

    def __init__(self, forward, **children):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 8)
        self.leave: nn.Module = nn.LazyLinear(8)
        for name, child in children.items():
            setattr(self, name, child)
        self.run = forward

    def forward(self, x, *rest):
        y = self.run(self, self.enter(x).sin().exp().tanh(), *rest)
        return self.leave(y.sin().exp()).pow(2).mean()


def ready(model, *args):
    with torch.no_grad():
        rng = torch.get_rng_state()
        model(*args)
        torch.set_rng_state(rng)
    return model


def first(m, x):
    return m.inner(x)[0]


def check_step(model, args=(X,), *, fractions=(0.0, 0.5), **options):
    """Bitwise eager's at several budgets, and within them; returns the last plan."""
    want = run_step(model, args)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for fraction in fractions:
        placemat.optimize(model, None, args, budget_fraction=fraction, **options, time_limit_s=5)
        plan = model.plan
        assert not plan.runs_original
        for _ in range(2):
            assert run_step(model, args).same_as(want), fraction
        peak = placemat.measure(lambda: model(*args).backward()).peak_bytes + sum(plan.static_bytes.values())
        assert peak <= plan.budget_bytes, (fraction, peak, plan.budget_bytes)
        model.load_state_dict(buffers, strict=False)
        for p in model.parameters():
            p.grad = None
        placemat.restore(model)
    return plan


LAYERS = {
    "lstm": lambda: nn.LSTM(8, 5),
    "lstm-2-batch-first": lambda: nn.LSTM(8, 5, num_layers=2, batch_first=True),
    "lstm-bidirectional-dropout": lambda: nn.LSTM(8, 5, num_layers=2, bidirectional=True, dropout=0.4),
    "lstm-projected": lambda: nn.LSTM(8, 6, proj_size=3, batch_first=True),
    "gru": lambda: nn.GRU(8, 5, num_layers=2, dropout=0.4, batch_first=True),
    "gru-bidirectional": lambda: nn.GRU(8, 5, bidirectional=True),
    "rnn-tanh": lambda: nn.RNN(8, 5, num_layers=2, dropout=0.2),
    "rnn-relu": lambda: nn.RNN(8, 5, nonlinearity="relu", bias=False, batch_first=True),
}


QUICK = ("lstm-bidirectional-dropout", "gru")  # the others are slow


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS])
def test_recurrent_layers_have_eagers_bits_within_the_budget(name):
    model = ready(Around(first, inner=LAYERS[name]()), X)
    plan = check_step(model)
    assert any(note.startswith("inner is kept eager") and "bytes" in note for note in plan.notes)
    assert "inner is kept eager" in plan.summary()


def test_states_and_frozen_parameters_of_a_recurrent_layer():
    def forward(m, x):
        y, (h, c) = m.inner(x)
        z, (h, c) = m.inner(x.flip(1), (h, c))
        return y + z + h[0].unsqueeze(1) * c[0].unsqueeze(1)

    model = Around(forward, inner=nn.LSTM(8, 5, batch_first=True))
    model.inner.weight_hh_l0.requires_grad_(False)
    check_step(ready(model, X))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, (h, _) = self.layer(packed)
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        return y, h


def test_packed_sequences_in_a_kept_module():
    lengths = torch.tensor([12, 3, 7, 12, 1, 9])
    model = ready(Around(lambda m, x, n: m.inner(x, n)[0], inner=Packed()), X, lengths)
    check_step(model, (X, lengths), keep_eager=["inner"])


def test_longer_sequences_than_those_planned_for_are_refused():
    short, long = torch.tensor([2, 3, 7, 2, 1, 9]), torch.tensor([12, 12, 12, 12, 12, 12])
    model = ready(Around(lambda m, x, n: m.inner(x, n)[0], inner=Packed()), X, long)
    want = run_step(model, (X, short))
    placemat.optimize(model, None, (X, long), budget_fraction=0.0, keep_eager=["inner"], time_limit_s=5)
    assert run_step(model, (X, short)).same_as(want)
    placemat.optimize(model, None, (X, short), budget_fraction=0.0, keep_eager=["inner"], time_limit_s=5)
    with pytest.raises(placemat.UnsupportedFeature, match=r"inner saves \d+ bytes.*has \d+"):
        run_step(model, (X, long))


class Branching(nn.Module):
    """Data-dependent control flow, dropout, BatchNorm, and a Python counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("switch", torch.ones(()))
        self.lin, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.switch > 0:
            return self.drop(self.norm(self.lin(x).flatten(0, 1))).view_as(x) + x
        return x.tanh()


def test_branch_on_a_buffer_with_dropout_and_batch_norm_in_a_kept_module():
    model = ready(Around(lambda m, x: m.inner(x), inner=Branching()), X)
    check_step(model, keep_eager=["inner"])
    calls = model.inner.calls
    placemat.plan(model, "1 GiB", (X,), keep_eager=["inner"])
    assert model.inner.calls == calls


def test_a_branch_that_changes_what_is_computed_is_refused():
    model = ready(Around(lambda m, x: m.inner(x), inner=Branching()), X)
    placemat.optimize(model, None, (X,), budget_fraction=0.0, keep_eager=["inner"], time_limit_s=5)
    run_step(model, (X,))
    model.inner.switch.zero_()
    with pytest.raises(placemat.UnsupportedFeature, match="gradients of the kept module inner reach its inputs"):
        run_step(model, (X,))


def test_a_kept_module_that_is_used_twice():
    model = ready(Around(lambda m, x: m.inner(m.inner(x).cos()), inner=nn.Sequential(nn.Linear(8, 8), nn.Tanh())), X)
    check_step(model, keep_eager=["inner"])
    wide = Around(lambda m, x: first(m, first(m, x)), inner=nn.GRU(8, 8))
    with pytest.raises(placemat.UnsupportedFeature, match=r"of the kept module inner is used 6 times.*rounding.*test_"):
        placemat.optimize(ready(wide, X), None, (X,), budget_fraction=0.0, time_limit_s=5)


def test_graph_of_a_kept_module_stays_for_a_second_backward_and_dies_with_the_step():
    model = ready(Around(first, inner=nn.LSTM(8, 5)), X)
    model.zero_grad()
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    placemat.optimize(model, None, (X,), budget_fraction=0.0, accumulate_grad=True, time_limit_s=5)
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert not any(type(o) is InnerGraph for o in gc.get_objects())


def test_results_that_the_loss_does_not_reach():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.enter, self.inner = nn.Linear(8, 8), Pair()

        def forward(self, x):
            return self.inner(self.enter(x).sin())

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = Two()
    for loss_fn in (lambda o: o[0].sum(), lambda o: o[1].pow(2).sum(), lambda o: (o[0] * o[1]).sum()):
        want = run_step(model, (X,), loss_fn=loss_fn)
        for planned in (None, loss_fn):
            placemat.optimize(
                model, None, (X,), budget_fraction=0.0, keep_eager=["inner"], loss_fn=planned, time_limit_s=5
            )
            got = run_step(model, (X,), loss_fn=loss_fn)
            assert [g is None for g in got.gradients] == [g is None for g in want.gradients]
            assert got.same_as(want)
            placemat.restore(model)


def test_plans_travel_and_modules_are_copied(tmp_path):
    model = ready(Around(first, inner=nn.LSTM(8, 5)), X)
    want = run_step(model, (X,))
    plan = placemat.plan(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    assert "forward" not in model.inner.__dict__
    plan.save(tmp_path / "plan.json")
    placemat.apply(model, placemat.Plan.load(tmp_path / "plan.json"))
    assert run_step(model, (X,)).same_as(want)
    assert "forward" not in model.inner.__dict__
    twin = copy.deepcopy(model)
    assert run_step(twin, (X,)).same_as(want)
    gone = weakref.ref(twin)
    del twin
    gc.collect()
    assert gone() is None


def test_kept_modules_are_pickled_with_the_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    want = run_step(model, (X,), loss_fn=torch.sum)
    placemat.optimize(model, None, (X,), budget_fraction=0.0, keep_eager=["2"], time_limit_s=5)
    again = pickle.loads(pickle.dumps(model))
    assert run_step(again, (X,), loss_fn=torch.sum).same_as(want)


def test_planning_draws_nothing_and_changes_nothing():
    model = ready(Around(lambda m, x: m.inner(x), inner=Branching()), X)
    before = [t.clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    placemat.plan(model, "1 GiB", (X,), keep_eager=["inner"])
    after = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in model.parameters())


def writes_argument(m, x):
    return x.mul_(2.0) * m.weight


def returns_a_view(m, x):
    return x[0]


def sets_a_tensor(m, x):
    m.last = x * m.weight
    return m.last * 2


def shares_results(m, x):
    y = x * m.weight
    return y, y[0]


def fails_on_zeros(m, x):
    if x.abs().sum() == 0:
        raise KeyError("nothing there")
    return x * m.weight


class Own(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.ones(8))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def whole(m, x):
    y = m.inner(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize(
    ("inner", "forward", "options", "error", "words"),
    [
        (writes_argument, whole, {}, placemat.UnsupportedFeature, "inner is kept eager.*writes to an argument"),
        (returns_a_view, whole, {}, placemat.UnsupportedFeature, "shares its storage with an argument"),
        (shares_results, whole, {}, placemat.UnsupportedFeature, "shares its storage with another result"),
        (sets_a_tensor, whole, {}, placemat.UnsupportedFeature, "sets the tensor attribute inner.last"),
        (fails_on_zeros, whole, {}, placemat.CaptureError, "does not run on zeros.*KeyError.*nothing there"),
        (
            torch.nn.Module.get_parameter,
            whole,
            {"keep_eager": ["outer"]},
            placemat.ConstraintError,
            "matches no module",
        ),
        (None, lambda m, x: m.inner(x) * m.inner.scale, {}, placemat.UnsupportedFeature, "reads inner.scale outside"),
        (None, whole, {"keep_eager": "inner"}, placemat.ConstraintError, "is a list"),
        (None, whole, {"keep_eager": [torch.ops.aten.mm]}, placemat.ConstraintError, "about modules"),
    ],
)
def test_what_a_kept_module_must_not_do_is_refused_by_name(inner, forward, options, error, words):
    model = Around(forward, inner=Own(inner or (lambda m, x: x * m.weight)))
    model.leave = nn.Linear(8, 8)
    with pytest.raises(error, match=words):
        placemat.optimize(
            model, None, (X,), budget_fraction=0.0, **{"keep_eager": ["inner"], **options}, time_limit_s=5
        )


def test_refusals_name_the_line():
    model = Around(whole, inner=Own(returns_a_view))
    model.leave = nn.Linear(8, 8)
    with pytest.raises(placemat.UnsupportedFeature, match=r"At .*test_keep_eager.py:\d+, in whole"):
        placemat.optimize(model, None, (X,), budget_fraction=0.0, keep_eager=["inner"], time_limit_s=5)


def test_nested_matches_are_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(placemat.ConstraintError, match=r"'0' and '0\.0', which is inside"):
        placemat.optimize(model, None, (X,), budget_fraction=0.0, keep_eager=["*"], time_limit_s=5)


def test_attribute_that_the_forward_sets_on_a_kept_module_is_refused():
    def forward(m, x):
        m.inner.memory = x
        return m.inner(x)

    model = Around(forward, inner=Own(lambda m, x: x * m.weight + m.memory))
    model.leave = nn.Linear(8, 8)
    with pytest.raises(placemat.UnsupportedFeature, match="sets the attribute memory of the kept module inner"):
        placemat.optimize(model, None, (X,), budget_fraction=0.0, keep_eager=["inner"], time_limit_s=5)


def test_kept_module_under_autocast_is_refused():
    def forward(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.inner(x)[0].float()

    model = Around(forward, inner=nn.LSTM(8, 8))
    model.leave = nn.Linear(8, 8)
    with pytest.raises(placemat.UnsupportedFeature, match=r"under torch.autocast.*enabled=False"):
        placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)


def test_saved_tensors_hooks_around_the_step_are_refused():
    model = ready(Around(first, inner=nn.LSTM(8, 5)), X)
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        loss = model(X)
    with pytest.raises(placemat.UnsupportedFeature, match="saved_tensors_hooks"):
        loss.backward()


def test_parameter_changed_between_forward_and_backward_is_noticed():
    model = ready(Around(first, inner=nn.LSTM(8, 5)), X)
    placemat.optimize(model, None, (X,), budget_fraction=0.0, time_limit_s=5)
    loss = model(X)
    with torch.no_grad():
        model.inner.weight_hh_l0.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
