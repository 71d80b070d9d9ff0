"""Wrapping modules in torch.utils.checkpoint: bitwise the same step, and what cannot be wrapped is named."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import placemat
from placemat import PlacematError, UnsupportedFeature, apply_checkpointing, restore
from tests import models
from tests.models import Workload
from tests.steps import FreeOfWorkspace, run_step

WORKLOADS = {
    "transformer": (lambda: models.transformer(layers=3), ["blocks.0", "blocks.1.mlp", "blocks.2.norm1"]),
    "unet": (lambda: models.unet(2, 4, 16, batch=2), ["encoders.0", "encoders.1.0", "decoders.0"]),
    "inception": (lambda: models.inception(2, 4, size=16), ["stem", "blocks.0.deep", "blocks.1", "dropout"]),
    "gpt2": (lambda: models.gpt2(2, 32, sequence=16, batch=2), ["transformer.h.0", "transformer.h.1.attn"]),
}


def outcome(work: Workload):
    return run_step(work.model, work.args, work.kwargs, work.loss)


@pytest.mark.parametrize(
    "name", ["transformer", *(pytest.param(n, marks=pytest.mark.slow) for n in ("unet", "inception", "gpt2"))]
)
def test_same_step_and_same_buffers(name):
    make, paths = WORKLOADS[name]
    work = make()
    expected = outcome(work)
    assert apply_checkpointing(work.model, paths) is work.model
    assert outcome(work).same_as(expected)
    report = placemat.verify(work.model, work.model, work.args, work.kwargs, work.loss_fn)
    assert report.ok, str(report)
    assert report.optimized.peak_bytes < report.reference.peak_bytes
    restore(work.model)
    assert not any("forward" in module.__dict__ for module in work.model.modules())
    with pytest.raises(PlacematError, match="nothing to restore"):
        restore(work.model)


def test_plain_checkpoint_would_count_batches_twice():
    """What apply_checkpointing sees to: PyTorch's function alone moves the statistics twice."""
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(8, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert norm[1].num_batches_tracked == 2
    model = apply_checkpointing(nn.Sequential(copy.deepcopy(norm)), ["0"])
    model(x).sum().backward()
    assert model[0][1].num_batches_tracked == 3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_of_several_steps(momentum):
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3, momentum=momentum), nn.InstanceNorm1d(3, track_running_stats=True), nn.Dropout(0.4), nn.Tanh())  # noqa: E501  # fmt: skip

    eager, wrapped = nn.Sequential(layers()), apply_checkpointing(nn.Sequential(layers()), ["0"])
    for model in (eager, wrapped):
        torch.manual_seed(1)
        xs = [torch.randn(2, 2, 8) for _ in range(4)]
        (model(xs[0]).sum() + model(xs[1]).pow(2).sum()).backward()  # two forwards, then their backward
        for x in xs[2:]:
            model(x).pow(2).sum().backward()
        model.random = torch.rand(1)
    for (name, a), b in zip(eager.state_dict().items(), wrapped.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for p, q in zip(eager.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert torch.equal(eager.random, wrapped.random)


class Stateful(nn.Module):
    """Counts its calls in an attribute, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, *, scales=()):
        self.calls += 1
        for scale in scales:
            x = x * scale
        return torch.tanh(self.layer(x) * self.calls).sin()


def test_attributes_are_those_of_the_first_run():
    inner = Stateful()
    model = nn.Sequential(inner)
    x = torch.randn(3, 4)

    def gradient():
        inner.calls, inner.layer.weight.grad = 4, None
        loss = model(x).sum()
        model.eval()  # after the forward, and it must not matter
        loss.backward()
        model.train()
        return inner.layer.weight.grad, inner.calls

    expected, calls = gradient()
    apply_checkpointing(model, ["0"])
    found, calls_wrapped = gradient()
    assert torch.equal(expected, found)
    assert calls == calls_wrapped == 5


def test_nested_arguments_double_backward_hooks_and_copies():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stateful()

        def forward(self, x):
            return self.inner(x, scales=[x.sin(), 2.0])

    def second(model, x):
        model.inner.calls = 0
        (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), x)[0]

    model, x = Outer(), torch.randn(3, 4, requires_grad=True)
    seen = []
    model.inner.register_full_backward_hook(lambda *_: seen.append(1))
    expected = second(model, x)
    apply_checkpointing(model, ["inner"])
    twin = copy.deepcopy(model)
    assert twin.inner.forward.module is twin.inner
    assert torch.equal(second(model, x), expected)
    assert seen
    assert torch.equal(second(twin, x), expected)
    linear = pickle.loads(pickle.dumps(apply_checkpointing(nn.Sequential(nn.Linear(4, 4)), ["0"])))
    assert linear[0].forward.module is linear[0]
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))


class Overwrites(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layer = nn.Linear(4, 4)
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        if self.what == "input":
            x.mul_(2.0)
        elif self.what == "buffer":
            self.average.add_(x.detach().mean(0))
        elif self.what == "rebound":
            self.average = self.average + 1
        return self.layer(x).tanh() + self.average


@pytest.mark.parametrize(
    ("what", "message"), [("input", "0 writes to its arguments"), ("buffer", r"0\.average"), ("rebound", r"0\.average")]
)
def test_a_forward_that_overwrites_is_refused(what, message):
    model = apply_checkpointing(nn.Sequential(Overwrites(what)), ["0"])
    with pytest.raises(UnsupportedFeature, match=message):
        model(torch.randn(2, 4))


def test_a_parameter_changed_before_backward_is_refused():
    model = apply_checkpointing(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), ["0"])
    loss = model(torch.randn(2, 4)).sum()
    with torch.no_grad():
        model[0][0].bias.add_(1.0)
    with pytest.raises(UnsupportedFeature, match=r"0\.0\.bias was changed between forward and backward"):
        loss.backward()


def test_rrelu_is_refused_and_not_advised():
    """PyTorch saves the noise before the kernel draws it; a second run that stops there leaves it unset."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.RReLU(), nn.Tanh())), torch.randn(4, 6)
    excluded = dict(placemat.plan(model, "1 GiB", (x,), cost_model=FreeOfWorkspace()).checkpoint_modules().excluded)
    assert "rrelu saves its noise" in excluded["1"]
    assert "rrelu saves its noise" in excluded["1.0"]
    apply_checkpointing(model, ["1"])
    with pytest.raises(UnsupportedFeature, match="rrelu"):
        model(x).sum().backward()


def test_wrong_paths_change_nothing():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    for paths, message in (
        (["0", "nothing"], "'nothing' names no submodule"),
        ([""], "names no submodule"),
        (["1", "1"], "one inside the other"),
        (["0", "0.0"], "one inside the other"),
        ("0", r"write \['0'\]"),
    ):
        with pytest.raises(PlacematError, match=message):
            apply_checkpointing(model, paths)
    assert not any("forward" in module.__dict__ for module in model.modules())
    apply_checkpointing(model, ["1"])
    with pytest.raises(PlacematError, match="wrapped already"):
        apply_checkpointing(model, ["1"])
    restore(model)
    x = torch.randn(2, 4)
    placemat.optimize(model, "1 GiB", (x,))
    with pytest.raises(PlacematError, match="optimized"):
        apply_checkpointing(model, ["1"])


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("*.1", ["blocks.0.mlp.1", "blocks.1"]),
        ("blocks.[1]", ["blocks.1"]),
    ],
)
def test_patterns_name_the_outermost_modules(pattern, paths):
    model = models.transformer(layers=2).model
    apply_checkpointing(model, [pattern])
    assert [path for path, module in model.named_modules() if "forward" in module.__dict__] == paths


def test_a_model_with_wrapped_modules_is_planned_as_it_is_without():
    work = models.transformer(layers=1)
    options = {"budget_fraction": 1.0, "cost_model": FreeOfWorkspace(), "time_limit_s": 1}
    plain = placemat.plan(work.model, None, work.args, **options)
    apply_checkpointing(work.model, ["blocks.0"])
    assert placemat.plan(work.model, None, work.args, **options).fingerprint == plain.fingerprint


def test_a_plan_and_checkpointing_are_never_both_there():
    work = models.transformer(layers=2)
    plan = placemat.plan(work.model, 2**30, work.args, cost_model=FreeOfWorkspace(), time_limit_s=1)
    forwards = [module.forward for module in work.model.modules()]
    apply_checkpointing(work.model, ["blocks.0"])
    for start in (lambda m: placemat.apply(m, plan), lambda m: placemat.optimize(m, 2**30)):
        with pytest.raises(PlacematError, match=r"wrapped 'blocks\.0'.*Remedy: placemat\.restore"):
            start(work.model)
    with pytest.raises(PlacematError, match="wrapped this module"):
        placemat.optimize(work.model.blocks[0], 2**30)
    restore(work.model)
    assert [module.forward for module in work.model.modules()] == forwards
    placemat.optimize(work.model.blocks[0], 2**30)
    with pytest.raises(PlacematError, match=r"'blocks\.0' is optimized.*wrapping 'blocks'"):
        apply_checkpointing(work.model, ["blocks"])
    assert apply_checkpointing(work.model, ["blocks.1"]) is work.model


def test_autocast_and_functional_batch_norm():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x):
            x = F.batch_norm(self.layer(x).float(), self.mean, running_var=self.var, training=True)
            return self.layer(x).tanh()

    model, x = nn.Sequential(Functional(), nn.Linear(4, 4)), torch.randn(8, 4)
    results = []
    for wrapped in (False, True):
        twin = copy.deepcopy(model)
        if wrapped:
            apply_checkpointing(twin, ["0"])
        with torch.autocast("cpu", torch.bfloat16):
            loss = twin(x).pow(2).sum()
        loss.backward()
        results.append([*(p.grad for p in twin.parameters()), *twin.buffers()])
    assert all(itertools.starmap(torch.equal, zip(*results, strict=True)))
