"""Random small modules: a strategy of programs, each with a call, a loss and a budget.

Layers and operators come from `random_pieces`. Not drawn are bilinear and bicubic interpolation and dropout on 16-bit
tensors (`test_eager_bits` has them), several calls of a module before one backward, and functions of a user's own with
several outputs; and, because they are known to differ by rounding or in zeros (README, Limits), losses that reach an
output that is an input or shares its storage with another output.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import torch

from tests.random_pieces import PIECES
from tests.random_sketch import Program, Sketch

_SHAPES = ("(4, 6)", "(2, 5, 8)", "(2, 4, 6, 6)", "(3, 4, 8)", "(2, 3, 8, 4)", "(6, 8)", "(1, 8)")


def _draw_inputs(sketch: Sketch) -> None:
    choose = sketch.choose
    for _ in range(choose.choice((1, 1, 2, 3))):
        shape = choose.choice(_SHAPES)
        dtype = choose.choice(("", "", "", "", ", dtype=torch.float64", ", dtype=torch.bfloat16"))
        grad = choose.choice(("", "", ", requires_grad=True"))
        sketch.input(f"torch.randn({shape}{dtype}{grad})")
    if sketch.maybe(0.15):
        sketch.input("torch.randn(6, 4).t()")
    if sketch.maybe(0.3):
        sketch.input("torch.randint(0, 7, (2, 5))")


def _draw_result(sketch: Sketch, loss: str) -> tuple[str, tuple[str, ...]]:
    """The returned expression, and the parts of it that the loss reaches."""
    choose = sketch.choose
    trained = [n for n, t in sketch.values.items() if t.requires_grad and t.is_floating_point() and t.numel()]
    inputs = {id(sketch.values[name]) for name, _ in sketch.inputs}
    made = [n for n in trained if id(sketch.values[n]) not in inputs]
    ends = list(dict.fromkeys([*made[-2:], *choose.sample(made, min(2, len(made)))]))
    if not ends:  # everything was overwritten, or is without a gradient
        return "None", ()
    if loss == "inside":
        text = " + ".join(f"{n}.float().square().mean()" for n in ends)
        if sketch.maybe(0.7):
            return text, ("out",)
        return f"{{'loss': {text}, 'logits': {ends[0]}.detach(), 'steps': 3}}", ("out['loss']",)
    parts = [*ends[: choose.choice((1, 2, 3))], *choose.sample(sorted(sketch.values), 1)]
    parts += choose.choice(([], [], ["None"], ["2.5"], [parts[0]], ["'text'"]))
    parts = [p for p in parts if p == parts[0] or not _shares_storage(sketch, p, parts[0])]
    form = choose.choice(("tensor", "tuple", "list", "dict", "class", "nested"))
    if form == "tensor":
        return parts[0], ("out",)
    if form == "dict":
        items, paths = [f"'k{i}': {p}" for i, p in enumerate(parts)], [f"out['k{i}']" for i in range(len(parts))]
        text = f"{{{', '.join(items)}}}"
    elif form == "class":
        text, paths = f"Scores({parts[0]}, {parts[-1]})", ["out.scores", "out.extra"]
        parts = [parts[0], parts[-1]]
    elif form == "nested":
        text, paths = f"({parts[0]}, [{', '.join(parts[1:])}])", ["out[0]"]
        paths += [f"out[1][{i}]" for i in range(len(parts) - 1)]
    else:
        text = f"[{', '.join(parts)}]" if form == "list" else f"({', '.join(parts)},)"
        paths = [f"out[{i}]" for i in range(len(parts))]
    lonely = [p for p in made if not any(p != q and _shares_storage(sketch, p, q) for q in parts)]
    usable = [path for path, part in zip(paths, parts, strict=True) if part in lonely]
    if not usable:  # whatever the loss could reach shares its storage with another output
        return text, ()
    return text, tuple(choose.sample(usable, choose.randint(1, len(usable))))


def _shares_storage(sketch: Sketch, first: str, second: str) -> bool:
    tensors = [sketch.values.get(name) for name in (first, second)]
    return len({t.untyped_storage().data_ptr() for t in tensors if t is not None}) == 1 and None not in tensors


def random_program(choose: random.Random) -> Program | None:
    """Draw a program; None if nothing in it can be trained."""
    with torch.random.fork_rng():
        torch.manual_seed(choose.randrange(1 << 16))
        sketch = Sketch(choose, autocast=choose.random() < 0.1)
        _draw_inputs(sketch)
        for _ in range(choose.choice((2, 4, 6, 8, 10, 14))):
            choose.choice(PIECES)(sketch)
        if not any(t.requires_grad for name, t in sketch.values.items() if name.startswith("v")):
            return None
        loss = choose.choice(("inside", "loss_fn", "outside"))
        result, reached = _draw_result(sketch, loss)
    if not reached:
        return None
    return Program(
        attributes=tuple(sketch.attributes),
        body=tuple(sketch.body),
        result=result,
        inputs=tuple(sketch.inputs),
        loss=loss,
        reached=reached,
        autocast=sketch.autocast,
        fraction=choose.choice((0.0, 0.0, 0.2, 0.5, 0.8, 1.0, round(choose.random(), 3))),
        recompute=choose.choice(((), (), ("aten.*",))),
        segments=choose.choice((1, 1, 2, 4)),
    )


def random_programs() -> st.SearchStrategy[Program]:
    """Strategy of programs. Shrinks towards the first of every choice, and towards fewer pieces."""
    drawn = st.randoms(use_true_random=False).map(random_program)
    return drawn.filter(lambda program: program is not None)
