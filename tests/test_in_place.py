"""Ops that write into an argument which nobody reads afterwards: the same bits, and never into what somebody reads."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import placemat
from placemat.graph.in_place import VARIANTS

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = {
    "dense": lambda t: t,
    "permuted": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "channels": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


def _arguments(op, tensor) -> list[tuple]:
    """Calls of an operator with tensors of one shape, dtype and layout, and with what it takes beside them."""
    x, y = tensor(1), tensor(2)
    numbers = {
        aten.clamp_min.default: [(x, 0.25)],
        aten.mul.Tensor: [(x, y), (x, y[:1, :1]), (y[:1, :1], x), (x, 0.3), (x, x)],
        aten.add.Tensor: [(x, y), (x, y[:1, :1]), (y[:1, :1], x), (x, 0.3), (x, x)],
        aten.sub.Tensor: [(x, y), (x, y[:1, :1]), (y[:1, :1], x)],
        aten.div.Tensor: [(x, y), (x, 3.0), (y[:1, :1], x)],
        aten.pow.Tensor_Scalar: [(x.abs_(), exponent) for exponent in (2, 3.0, 0.5, 1.3)],
        aten.where.self: [(y > 0, x, y)],
        aten.threshold_backward.default: [(x, y, 0)],
        aten.leaky_relu_backward.default: [(x, y, 0.01, False)],
        aten.gelu_backward.default: [(x, y)],
    }
    binary = [(x, y)] if "backward" in op.name() else [(x,)]
    return numbers.get(op, binary)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", VARIANTS, ids=lambda op: op.name().removeprefix("aten::"))
def test_an_operator_gives_the_same_bits_in_place(op, dtype, layout, device):
    own, with_out, name = VARIANTS[op]

    def tensor(seed: int) -> Tensor:
        made = torch.randn(7, 33, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return LAYOUTS[layout](made.to(device, dtype))

    for case in range(len(_arguments(op, tensor))):
        expected = op(*_arguments(op, tensor)[case])
        calls = [(own, "")] if own is not None else []
        calls += [(with_out, name)] if with_out is not None else []
        ran = 0
        for target, out in calls:
            positions = range(len(_arguments(op, tensor)[case])) if out else (0,)
            for position in positions:
                arguments = _arguments(op, tensor)[case]
                written = arguments[position]
                if not isinstance(written, Tensor) or written.shape != expected.shape or written.dtype != dtype:
                    continue
                result = target(*arguments, **({out: written} if out else {}))
                assert result.data_ptr() == written.data_ptr()
                assert torch.equal(_bits(result), _bits(expected))
                assert result.stride() == expected.stride()
                ran += 1
        assert ran, "no argument could be written to"


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_does_the_gelu_of_tanh(dtype):
    grad, x = (torch.randn(99, 37, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    expected = aten.gelu_backward(grad, x, approximate="tanh")
    for written in (0, 1):
        arguments = [grad.clone(), x.clone()]
        aten.gelu_backward.grad_input(*arguments, approximate="tanh", grad_input=arguments[written])
        assert torch.equal(arguments[written], expected)


class Gates(nn.Module):
    """Elementwise ops whose arguments live on in different ways: reread, viewed, returned, kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        viewed = h.t()
        s = torch.relu(h * 2 + 1)
        t = (self.b(s) + viewed.t()).tanh() + s
        u = self.c(t).sigmoid() * t - s / 3
        return (u * u.mean()).square().sum(), t.neg()


def _step(model: nn.Module, x: Tensor, again: bool) -> list[Tensor]:
    loss, other = model(x)
    total = loss + other.sum()
    total.backward(retain_graph=again)
    if again:
        total.backward()
    made = [loss.detach(), other.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return made


@pytest.mark.parametrize("again", [False, True], ids=["one_backward", "two"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_a_step_has_eagers_bits_and_the_peak_that_was_predicted(fraction, again):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
    expected = _step(Gates(), x, again)
    model = placemat.optimize(Gates(), None, (x,), budget_fraction=fraction, time_limit_s=5)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(_step(model, x, again), expected, strict=True))
    measured = placemat.measure(lambda: sum(t.sum() for t in model(x)).backward())
    assert measured.peak_bytes + sum(model.plan.static_bytes.values()) <= model.plan.budget_bytes


def test_a_gradient_that_does_not_come_leaves_others_as_they_are():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
    model = placemat.optimize(Gates(), None, (x,), budget_fraction=0.5, time_limit_s=5)
    for outputs in ([0], [1], [0, 1]):
        made = []
        for m in (model, Gates()):
            sum(m(x)[i].sum() for i in outputs).backward()
            made.append([p.grad for p in m.parameters()])
            m.zero_grad(set_to_none=True)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*made, strict=True))


class Complex(nn.Module):
    """Products of complex tensors, one of them strided: kernels round otherwise in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.fft.fft(self.layer(x))
        product = ((z * 1e-3).exp() + 1) * z.t()
        return product.abs().tanh() * 2, product.real


class Half(nn.Module):
    """Saves a complex view of its argument, which its own graph holds: no tensor of the step around has that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.view_as_complex(x) * self.weight).abs()


class AroundKept(nn.Module):
    """A kept module reads a part of what is overwritten last."""

    def __init__(self, cut: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.kept, self.cut = nn.Linear(32, 32), nn.Linear(32, 32), Half(), cut

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).view(16, 4, 8) * 2
        u = self.kept(self.cut(h, 4, 2)[1])
        return self.b(self.b(h.relu().view(16, -1).tanh()).tanh()).sum() + u.sum()


def test_complex_ops_make_new_tensors():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    expected, model = Complex(), Complex()
    placemat.optimize(model, None, (x,), budget_fraction=0.3, time_limit_s=5)
    for made, wanted in zip(model(x), expected(x), strict=True):
        assert torch.equal(made, wanted)
    for m in (model, expected):
        sum(t.sum() for t in m(x)).backward()
    assert torch.equal(model.layer.weight.grad, expected.layer.weight.grad)


@pytest.mark.parametrize("cut", [torch.chunk, torch.unsafe_chunk])
def test_what_a_kept_module_holds_a_part_of_is_not_written_to(cut):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    expected, model = AroundKept(cut), AroundKept(cut)
    placemat.optimize(model, None, (x,), budget_fraction=0.5, time_limit_s=5, keep_eager=["kept"])
    for m in (model, expected):
        m(x).backward()
    assert torch.equal(model.kept.weight.grad, expected.kept.weight.grad)
