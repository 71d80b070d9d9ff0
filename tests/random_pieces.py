"""What random modules are made of: each piece adds a layer or a few operators to a sketch, where one fits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.random_sketch import Sketch

PIECES: list[Callable[[Sketch], None]] = []


def piece(weight: int) -> Callable[[Callable[[Sketch], None]], Callable[[Sketch], None]]:
    def register(function: Callable[[Sketch], None]) -> Callable[[Sketch], None]:
        PIECES.extend([function] * weight)
        return function

    return register


def _is_single(t: torch.Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float64)


@piece(6)
def linear(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim >= 2 and t.shape[-1] <= 16):
        width = s.values[x].shape[-1]
        out = s.choose.choice((width, 4, 6, 8))
        s.layer(f"nn.Linear({width}, {out}, bias={s.maybe(0.8)})", x)


@piece(5)
def convolution(s: Sketch) -> None:
    if not (x := s.pick(lambda t: t.ndim in (3, 4) and _is_single(t) and t.shape[1] <= 8 and t.shape[-1] >= 3)):
        return
    t = s.values[x]
    channels, dim = t.shape[1], t.ndim - 2
    groups = s.choose.choice((1, 1, channels))
    out = channels if groups > 1 else s.choose.choice((channels, 4))
    extra = s.choose.choice(("", ", stride=2", ", dilation=2", ", bias=False", ", padding_mode='circular'"))
    kind = s.choose.choice(("Conv", "Conv", "ConvTranspose"))
    if kind == "ConvTranspose" and "padding_mode" in extra:
        extra = ""
    kernel = s.choose.choice((1, 3))
    s.layer(f"nn.{kind}{dim}d({channels}, {out}, {kernel}, padding={kernel // 2}, groups={groups}{extra})", x)


@piece(6)
def norm(s: Sketch) -> None:
    if not (x := s.pick(lambda t: t.ndim >= 2)):
        return
    t = s.values[x]
    channels, last = t.shape[1], t.shape[-1]
    kinds = [f"nn.LayerNorm({last})", f"nn.LayerNorm({list(t.shape[-2:])}, elementwise_affine=False)"]
    kinds += [f"nn.RMSNorm({last})"]
    if _is_single(t):
        momentum = s.choose.choice(("", ", momentum=0.3", ", affine=False", ", track_running_stats=False"))
        mode = s.choose.choice(("", "", ".eval()"))
        if t.ndim <= 4:
            kinds += [f"nn.BatchNorm{max(1, t.ndim - 2)}d({channels}{momentum}){mode}"] * 4
        if t.ndim in (3, 4):
            tracked = s.choose.choice(("", ", affine=True", ", track_running_stats=True"))
            kinds += [f"nn.GroupNorm(1, {channels})", f"nn.InstanceNorm{t.ndim - 2}d({channels}{tracked})"]
            kinds += ["nn.LocalResponseNorm(2)"]
    s.layer(s.choose.choice(kinds), x)


@piece(6)
def dropout(s: Sketch) -> None:
    if not (x := s.pick(_is_single)):
        return
    t = s.values[x]
    inplace = ", inplace=True" if s.maybe(0.15) else ""
    kinds = [f"nn.Dropout({p}{inplace})" for p in (0.1, 0.5)]
    kinds += [f"nn.AlphaDropout(0.3{inplace})", f"nn.RReLU({inplace.strip(', ')})"]
    if t.ndim in (3, 4):
        kinds += [f"nn.Dropout{t.ndim - 2}d(0.4{inplace})", f"nn.FeatureAlphaDropout(0.4{inplace})"]
    s.layer(s.choose.choice(kinds), x)


@piece(3)
def random_numbers(s: Sketch) -> None:
    if x := s.pick(_is_single):
        s.one_of(
            f"{x} + torch.randn_like({x}) * 0.1",
            f"{x} * torch.bernoulli(torch.full_like({x}, 0.7))",
            f"F.dropout({x}, 0.25, training=True)",
            f"F.gumbel_softmax({x}, dim=-1)",
            f"{x} + torch.rand({x}.shape[-1], dtype={x}.dtype)",
            f"{x}[torch.randperm({x}.shape[0])]",
            f"torch.normal({x}, 0.5)",
            f"{x} * {x}.detach().sigmoid().bernoulli()",
            f"{x} * torch.empty_like({x}).exponential_()",
            f"{x} + torch.empty_like({x}).uniform_(-1, 1)",
            f"{x}.clone().add_(torch.randint(0, 3, {x}.shape))",
        )


_ACTIVATIONS = ("ReLU", "ELU", "LeakyReLU", "Hardtanh", "SiLU", "Hardswish", "Mish", "SELU", "CELU", "ReLU6")
_SMOOTH = ("GELU", "Tanh", "Sigmoid", "Softplus", "LogSigmoid", "Hardshrink", "Tanhshrink", "Softsign", "PReLU")


@piece(7)
def activation(s: Sketch) -> None:
    if x := s.pick():
        if s.maybe(0.3):
            s.layer(f"nn.{s.choose.choice(_ACTIVATIONS)}(inplace=True)", x)
        elif s.maybe(0.1):
            s.value(f"F.glu({x}, -1)")
        else:
            s.layer(f"nn.{s.choose.choice((*_ACTIVATIONS, *_SMOOTH))}()", x)


@piece(3)
def pooling(s: Sketch) -> None:
    if not (x := s.pick(lambda t: t.ndim in (3, 4) and _is_single(t) and min(t.shape[2:]) >= 2)):
        return
    dim = s.values[x].ndim - 2
    if s.maybe(0.25):
        if names := s.values_of(f"F.max_pool{dim}d({x}, 2, return_indices=True)", 2):
            s.value(f"F.max_unpool{dim}d({names[0]}, {names[1]}, 2)")
        return
    kinds = [f"F.max_pool{dim}d({x}, 2)", f"F.avg_pool{dim}d({x}, 2)", f"F.adaptive_avg_pool{dim}d({x}, 2)"]
    kinds += [f"F.adaptive_max_pool{dim}d({x}, 2)", f"F.interpolate({x}, scale_factor=2.0, mode='nearest')"]
    kinds += [f"F.adaptive_avg_pool{dim}d({x}, 1)", f"F.max_pool{dim}d({x}, 3, stride=1, padding=1)"]
    kinds += [f"F.pad({x}, (1, 1), mode={mode!r})" for mode in ("reflect", "replicate", "circular")] if dim == 1 else []
    kinds += [f"F.pixel_unshuffle({x}, 2)", f"F.unfold({x}, 2)", f"F.channel_shuffle({x}, 2)"] if dim == 2 else []
    s.one_of(*kinds)


@piece(4)
def attention(s: Sketch) -> None:
    if not (x := s.pick(lambda t: t.ndim == 3 and t.shape[-1] in (4, 6, 8))):
        return
    t = s.values[x]
    length, width = t.shape[1], t.shape[2]
    p = s.choose.choice((0.0, 0.2)) if _is_single(t) and not s.autocast else 0.0
    kind = s.choose.choice(("sdpa", "sdpa", "mha", "encoder"))
    if kind == "encoder":
        s.layer(f"nn.TransformerEncoderLayer({width}, 2, 8, dropout={p}, batch_first=True, norm_first=True)", x)
    elif kind == "mha":
        suffix = {torch.float64: ".double()", torch.bfloat16: ".bfloat16()"}.get(t.dtype, "")
        cell = s.attribute(f"nn.MultiheadAttention({width}, 2, dropout={p}, batch_first=True){suffix}")
        s.values_of(f"{cell}({x}, {x}, {x}, need_weights=True)", 2)
    elif qkv := s.layer(f"nn.Linear({width}, {3 * width})", x):
        heads = f"{qkv}.view({t.shape[0]}, {length}, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)"
        if names := s.values_of(heads, 3):
            mask = s.choose.choice(("", "bool", "float", "causal"))
            extra = {"": "", "causal": ", is_causal=True"}.get(mask) if mask in ("", "causal") else None
            if extra is None:
                tril = s.buffer(f"torch.ones({length}, {length}).tril()")
                extra = f", attn_mask={tril}.bool()" if mask == "bool" else f", attn_mask={tril}.to({names[0]}.dtype)"
            s.value(f"F.scaled_dot_product_attention({', '.join(names)}, dropout_p={p}{extra}).transpose(1, 2)")


@piece(2)
def embedding(s: Sketch) -> None:
    indices = [n for n, t in s.values.items() if t.dtype == torch.int64 and t.ndim == 2 and n.startswith("x")]
    if indices:
        extra = s.choose.choice(("", ", padding_idx=0", ", scale_grad_by_freq=True"))
        mode = s.choose.choice(("sum", "mean", "max"))
        bag = f"nn.EmbeddingBag(7, 6, mode={mode!r})"
        s.layer(s.choose.choice((f"nn.Embedding(7, 8{extra})", bag)), s.choose.choice(indices))


@piece(5)
def join(s: Sketch) -> None:
    if not (x := s.pick()):
        return
    t = s.values[x]
    if not (y := s.pick(lambda u: u.shape == t.shape and u.dtype == t.dtype)):
        return
    s.one_of(
        f"{x} + {y}",
        f"{x} * {y}",
        f"{x} - 0.5 * {y}",
        f"torch.cat([{x}, {y}], -1)",
        f"torch.stack([{x}, {y}]).mean(0)",
        f"torch.cat([{x}, {y}, {x}], 0)",
        f"torch.maximum({x}, {y})",
        f"{x} @ {y}.transpose(-1, -2)",
        f"torch.where({x} > 0, {x}, {y})",
        f"torch.lerp({x}, {y}, 0.3)",
        f"torch.addcmul({x}, {x}, {y}, value=0.5)",
        f"F.mse_loss({x}, {y}, reduction='none')",
        f"F.cosine_similarity({x}, {y}, dim=-1)",
        f"torch.einsum('...i,...j->...ij', {x}, {y})",
        f"{x} / (1 + {y}.abs())",
        f"torch.cdist({x}, {y})",
        f"torch.atan2({x}, {y})",
        f"torch.hypot({x}, {y})",
    )


@piece(6)
def shape(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim >= 2):
        n = s.values[x].shape[-1]
        s.one_of(
            f"{x}.transpose(-1, -2)",
            f"{x}.reshape({x}.shape[0], -1)",
            f"{x}.flatten(1)",
            f"{x}.movedim(0, -1)",
            f"{x}.unsqueeze(1)",
            f"{x}.squeeze()",
            f"{x}.unsqueeze(0).expand(2, *{x}.shape)",
            f"{x}.repeat_interleave(2, 0)",
            f"{x}[..., : {max(1, n // 2)}]",
            f"{x}[:, 0]",
            f"{x}[:, ::2]",
            f"{x}.flip(-1)",
            f"{x}.roll(1, -1)",
            f"{x}.unfold(-1, 2, 1)",
            f"{x}.diagonal(dim1=-2, dim2=-1)",
            f"F.pad({x}, (1, 0))",
            f"{x}.tril()",
            f"{x}.contiguous()",
            f"{x}.mT.contiguous()",
            f"{x}.select(-1, 0)",
            f"{x}.as_strided(({n},), (1,))",
            f"{x}.view_as({x})",
        )


@piece(3)
def split(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim >= 2 and t.shape[-1] % 2 == 0 and t.shape[-1] > 0):
        half = s.values[x].shape[-1] // 2
        text = s.choose.choice((f"{x}.chunk(2, -1)", f"{x}.split({half}, -1)", f"torch.tensor_split({x}, 2, -1)"))
        s.values_of(text, 2)


@piece(4)
def index(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim >= 2 and t.shape[0] >= 2):
        order = f"{x}.detach().argsort(-1)"
        s.one_of(
            f"{x}.gather(-1, {order})",
            f"torch.zeros_like({x}).scatter(-1, {order}, {x})",
            f"torch.zeros_like({x}).scatter_add(-1, {order} // 2, {x})",
            f"{x}.index_select(0, torch.tensor([1, 0, 1]))",
            f"{x}[torch.tensor([0, 0, 1])]",
            f"{x}[:, torch.tensor([0, 0])]",
            f"torch.zeros_like({x}).index_add(0, torch.arange({x}.shape[0]) // 2, {x})",
            f"torch.zeros_like({x}).index_put((torch.tensor([0, 1]),), {x}[:2], accumulate=True)",
            f"{x}.masked_fill({x} > 0.5, 0.1)",
            f"torch.where({x}.detach() > 0, {x}, torch.zeros_like({x}))",
            f"{x}.take_along_dim({order}, -1)",
            f"{x}.clone().index_copy(0, torch.tensor([1]), {x}[:1])",
            f"{x}.masked_scatter({x} > 0, {x}.detach())",
            f"{x}.scatter_reduce(-1, {order}, {x}, 'amax')",
        )


@piece(5)
def reduction(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim >= 1):
        s.one_of(
            f"{x}.softmax(-1)",
            f"{x}.log_softmax(-1)",
            f"{x}.logsumexp(-1, keepdim=True)",
            f"{x}.cumsum(-1)",
            f"{x}.cumprod(-1)",
            f"{x}.logcumsumexp(-1)",
            f"{x}.cummax(-1).values",
            f"{x}.mean(0)",
            f"{x}.sum(-1, keepdim=True)",
            f"{x}.amax(-1)",
            f"{x}.max(-1).values",
            f"{x}.sort(-1).values",
            f"{x}.topk(1, -1).values",
            f"{x}.median(-1).values",
            f"{x}.kthvalue(1, -1).values",
            f"{x}.std(-1, keepdim=True)",
            f"{x}.var(0)",
            f"{x}.norm(dim=-1)",
            f"F.normalize({x}, dim=-1)",
            f"{x}.prod(-1)",
            f"torch.std_mean({x}, -1)[0]",
            f"F.cross_entropy({x}, torch.zeros(len({x}), dtype=torch.long))",
            f"F.smooth_l1_loss({x}, torch.zeros_like({x}))",
            f"F.binary_cross_entropy_with_logits({x}, torch.ones_like({x}))",
            f"F.kl_div({x}.log_softmax(-1), {x}.detach().softmax(-1), reduction='batchmean')",
        )


@piece(5)
def pointwise(s: Sketch) -> None:
    if x := s.pick():
        s.one_of(
            f"{x}.exp().clamp(max=3.0)",
            f"{x}.sin()",
            f"{x}.square()",
            f"{x}.abs().sqrt()",
            f"torch.special.erf({x})",
            f"{x}.clamp(-0.5, 0.5)",
            f"{x}.abs().add(1).log()",
            f"{x}.abs().add(1).pow(1.5)",
            f"{x}.sigmoid() * {x}",
            f"{x}.nan_to_num()",
            f"{x}.abs().add(0.5).rsqrt()",
            f"torch.special.xlogy({x}.abs(), {x}.abs() + 1)",
            f"torch.fmod({x}, 1.0)",
            f"{x}.abs().add(0.5).lgamma()",
            f"{x} * torch.arange({x}.shape[-1]).cos().to({x}.dtype)" if s.values[x].ndim else f"-{x}",
        )


@piece(6)
def in_place(s: Sketch) -> None:
    """On intermediates, their copies and their views."""
    if not (x := s.pick(lambda t: t.ndim >= 2)):
        return
    if s.maybe(0.6) and not (x := s.one_of(f"{x}.clone()", f"{x} + 1", f"{x} * 0.5")):
        return
    if s.maybe(0.4) and not (x := s.one_of(f"{x}[:1]", f"{x}.transpose(0, 1)", f"{x}[:, 1:]")):
        return
    s.statement(
        s.choose.choice(
            (
                f"{x}.mul_(0.5)",
                f"{x}.add_(1.0)",
                f"{x}.relu_()",
                f"{x}[:, 0] = 0.25",
                f"{x}[0] = {x}[-1]",
                f"{x}[:1] += 1",
                f"{x}.zero_()",
                f"{x}[:1].fill_(0.5)",
                f"{x}.masked_fill_({x}.detach() > 0.5, 0.2)",
                f"{x}.copy_({x}.detach().flip(0))",
                f"{x}.clamp_(-1, 1)",
                f"{x}.sigmoid_()",
                f"{x}.add_(torch.randn_like({x}))",
                f"{x}[:, :1].copy_({x}[:, :1].sin())",
                f"{x}.bernoulli_(0.5)",
                f"{x}.index_fill_(0, torch.tensor([0]), 0.5)",
                f"{x}.squeeze_()",
                f"{x}.t_()",
                f"{x} *= 2",
            )
        )
    )


@piece(4)
def reuse(s: Sketch) -> None:
    fitting = [
        (m, x) for m, shape, dtype in s.calls for x, t in s.values.items() if (shape, dtype) == (t.shape, t.dtype)
    ]
    if fitting:
        module, x = s.choose.choice(fitting[-6:])
        s.value(f"{module}({x})")


@piece(2)
def tied(s: Sketch) -> None:
    """A weight under a second name, or used transposed by a functional call."""
    linears = [m for m, _, dtype in s.calls if type(eval(m, s.scope)) is torch.nn.Linear and dtype == torch.float32]
    if not linears:
        return
    first = s.choose.choice(linears)
    rows, columns = eval(first, s.scope).weight.shape
    if s.maybe(0.5) and (x := s.pick(lambda t: t.ndim >= 1 and t.shape[-1] == rows and t.dtype == torch.float32)):
        s.value(f"F.linear({x}, {first}.weight.t())")
    elif x := s.pick(lambda t: t.ndim >= 2 and t.shape[-1] == columns and t.dtype == torch.float32):
        second = s.attribute(f"nn.Linear({columns}, {rows})")
        s.statement_of_init(f"{second}.weight = {first}.weight")
        s.value(f"{second}({x})")


@piece(3)
def detached(s: Sketch) -> None:
    if x := s.pick():
        s.one_of(f"{x}.detach() * 2", f"{x}.detach()", f"{x} * {x}.detach().sigmoid()", f"{x}.data + 1")


@piece(4)
def buffer(s: Sketch) -> None:
    """Counters, averages and memories that the forward updates."""
    if not (x := s.pick(lambda t: t.ndim >= 1 and t.shape[-1] <= 16 and t.dtype == torch.float32)):
        return
    width = s.values[x].shape[-1]
    kind = s.choose.choice(("counter", "average", "replaced", "read", "queue", "python", "training", "parameter"))
    if kind in ("counter", "python"):
        text = s.buffer("torch.zeros((), dtype=torch.int64)") if kind == "counter" else s.attribute("0", "n")
        s.statement(f"{text} += 1")
        if kind == "counter" and s.maybe(0.5):
            s.value(f"{x} / {text}")
        return
    if kind == "parameter":
        weight = s.attribute(f"nn.Parameter(torch.ones({width}))", "w")
        s.value(f"{x} * {weight} + {weight}.abs()")
        return
    name = s.buffer(f"torch.ones({width})")
    mean = f"{x}.detach().reshape(-1, {width}).mean(0)"
    if kind == "average":
        s.statement(f"{name}.mul_(0.9).add_({mean}, alpha=0.1)")
    elif kind == "training":
        s.statement(f"{name}.copy_({mean} if self.training else {name})")
    elif kind == "replaced":
        s.statement(f"{name} = 0.9 * {name} + 0.1 * {mean}")
    elif kind == "queue":
        s.statement(f"{name}[:1] = {mean}[:1]")
    s.value(f"{x} * {name}")
    if kind == "read" or s.maybe(0.3):
        s.statement(f"{name}.add_(1.0)")


@piece(2)
def spectral(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim >= 1 and _is_single(t) and t.shape[-1] >= 2):
        s.one_of(
            f"torch.fft.rfft({x}).abs()",
            f"torch.fft.rfft({x}).real",
            f"torch.fft.irfft(torch.fft.rfft({x}) * 2, n={x}.shape[-1])",
            f"torch.fft.fft({x}).imag",
            f"torch.view_as_real(torch.fft.rfft({x})).sum(-1)",
            f"torch.complex({x}, {x} * 2).angle()",
            f"torch.polar({x}.abs(), {x}).real",
        )


@piece(2)
def contraction(s: Sketch) -> None:
    if x := s.pick(lambda t: t.ndim == 3):
        s.one_of(
            f"torch.einsum('bij,bkj->bik', {x}, {x})",
            f"torch.bmm({x}, {x}.transpose(1, 2))",
            f"torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT)",
            f"torch.einsum('bij->bj', {x})",
            f"torch.tensordot({x}, {x}, dims=([1, 2], [1, 2]))",
        )


@piece(3)
def own_operator(s: Sketch) -> None:
    if x := s.pick(_is_single):
        if s.maybe(0.2):
            if y := s.value(f"{x} * 1.0"):
                s.statement(f"halve_({y}.detach())" if s.maybe(0.5) else f"halve_({y})")
        else:
            s.one_of(f"Squash.apply({x}, 1.5)", f"StraightThrough.apply({x})", f"wave({x})")


@piece(3)
def cast(s: Sketch) -> None:
    if x := s.pick():
        s.one_of(f"{x}.float()", f"{x}.double()", f"{x}.bfloat16()", f"{x}.to(torch.float32)")


@piece(2)
def regions(s: Sketch) -> None:
    """Autocast and grad-mode regions, each with weights of its own."""
    if not (x := s.pick(lambda t: t.ndim >= 2 and t.shape[-1] <= 16 and t.dtype == torch.float32)):
        return
    width = s.values[x].shape[-1]
    layer = s.attribute(f"nn.Linear({width}, {width})")
    name = s._name("v")
    region = s.choose.choice(
        ("torch.autocast('cpu', torch.bfloat16)", "torch.no_grad()", "torch.autocast('cpu', enabled=False)")
    )
    s.statement(f"with {region}: {name} = {layer}({x})", (name,))


@piece(2)
def wrapped(s: Sketch) -> None:
    """Parametrizations and cells."""
    if not (x := s.pick(lambda t: t.ndim == 2 and t.shape[-1] <= 16 and t.dtype == torch.float32)):
        return
    width = s.values[x].shape[-1]
    kind = s.choose.choice(("weight_norm", "spectral_norm", "cell", "orthogonal", "bilinear"))
    if kind == "cell":
        cell = s.choose.choice(("nn.GRUCell", "nn.RNNCell"))
        s.layer(f"{cell}({width}, {width})", x)
    elif kind == "bilinear":
        layer = s.attribute(f"nn.Bilinear({width}, {width}, 4)")
        s.value(f"{layer}({x}, {x})")
    else:
        s.layer(f"nn.utils.parametrizations.{kind}(nn.Linear({width}, {width}))", x)


@piece(2)
def hooked(s: Sketch) -> None:
    # PyTorch crashes on hooks of some views that were written to.
    if (x := s.pick(lambda t: t.requires_grad and t._base is None)) and x.startswith("v"):
        s.statement(f"if {x}.requires_grad: {x}.register_hook(lambda g: g * 0.5)")
