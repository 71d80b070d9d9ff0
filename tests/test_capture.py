"""Capture runs nothing, identifies graphs, and names the user's line when it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from placemat.graph.capture import capture
from placemat.graph.errors import CaptureError, UnsupportedFeature
from placemat.graph.loss import capture_loss
from tests.steps import Branches, make_step


def test_capture_executes_nothing():
    model, args = make_step("branches")
    rng, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    versions = [b._version for b in model.buffers()]
    capture(model.forward, args, {})
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert [b._version for b in model.buffers()] == versions
    assert all(p.grad is None for p in model.parameters())


def test_meta_device_model_is_captured_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 1 << 16))
        x = torch.empty(1 << 16, 1 << 16)
    assert capture(model.forward, (x,), {}).num_forward_outputs == 1


class Scored(nn.Module):
    """Composite operators that have a kernel of their own on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)
        return nn.functional.cross_entropy(torch.where(scores > 0, scores, 0.0), targets) + scores.std()


def test_meta_device_captures_the_backward_of_a_real_device():
    targets = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            joint = capture(Scored().forward, (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)), {})
        targets[device] = [str(n.target) for n in joint.graph_module.graph.nodes if n.op == "call_function"]
    assert targets["meta"] == targets["cpu"]
    assert "aten.nll_loss_backward.default" in targets["meta"]


def test_fingerprint_is_of_the_graph_and_not_of_the_instance():
    x = torch.randn(48, 64)
    first, second = capture(Branches().forward, (x,), {}), capture(Branches().forward, (x,), {})
    other = capture(Branches().forward, (torch.randn(47, 64),), {})
    evaluated = capture(Branches().eval().forward, (x,), {})
    assert first.fingerprint == second.fingerprint
    assert len({first.fingerprint, other.fingerprint, evaluated.fingerprint}) == 3


def test_inputs_have_the_users_names():
    model, args = make_step("branches")
    joint = capture(model.forward, args, {})
    names = {i.name for i in joint.inputs}
    assert {"stem.weight", "left.0.bias", "norm.running_mean", "args.0"} <= names
    assert {i.name for i in joint.inputs if i.is_parameter} == {n for n, _ in model.named_parameters()}


class _BranchOnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum() > 0:  # THE LINE
            return y
        return -y


def test_control_flow_on_data_is_refused_with_the_users_line():
    with open(__file__) as text:
        line = next(i for i, t in enumerate(text, 1) if t.rstrip().endswith("# THE LINE"))
    with pytest.raises(CaptureError, match="data-dependent") as caught:
        capture(_BranchOnData().forward, (torch.randn(2, 3),), {})
    assert f"test_capture.py:{line}" in str(caught.value)


def test_users_own_exception_is_not_hidden():
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(5, 5)

    with pytest.raises(CaptureError, match=r"a and b must have same reduction dim|mat1 and mat2"):
        capture(Fails().forward, (torch.randn(2, 3, requires_grad=True),), {})


def test_nothing_to_differentiate_is_refused():
    model = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(UnsupportedFeature, match="requires a gradient"):
        capture(model.forward, (torch.randn(2, 3),), {})


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 100), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.a(x), "aux": self.b(x).relu(), "x": x}


@pytest.mark.parametrize(
    ("loss_fn", "used", "held"),
    [
        (lambda o: o["logits"].log_softmax(-1).mean(), {0}, 8),
        (lambda o: o["aux"].sum(), {1}, 8),
        (lambda o: o["aux"].sum() + o["logits"].pow(2).sum(), {0, 1}, 8),
    ],
)
def test_loss_tells_which_outputs_it_reaches(loss_fn, used, held):
    model, x = _TwoHeads(), torch.randn(32, 16)
    loss = capture_loss(capture(model.forward, (x,), {}), model.forward, loss_fn, (x,), {})
    assert loss.used_tangents == used
    assert loss.held_bytes == held


def test_loss_that_materializes_the_logits_again_counts_them():
    model, x = _TwoHeads(), torch.randn(32, 16)
    joint = capture(model.forward, (x,), {})
    loss = capture_loss(joint, model.forward, lambda o: o["logits"].log_softmax(-1).mean(), (x,), {})
    logits_bytes = 32 * 100 * 4
    assert loss.workspace_bytes >= logits_bytes  # the log-probabilities, kept for their backward
    assert loss.workspace_bytes <= 2 * logits_bytes + 64


def test_loss_without_the_model_is_refused():
    model, x = _TwoHeads(), torch.randn(32, 16)
    joint = capture(model.forward, (x,), {})
    with pytest.raises(UnsupportedFeature, match="does not depend"):
        capture_loss(joint, model.forward, lambda o: o["x"].sum(), (x,), {})
