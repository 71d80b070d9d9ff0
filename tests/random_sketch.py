"""Programs: small modules as text, and the sketch that one is drawn on while its lines run on real tensors.

A program is text, so what a fuzzer finds is a script that can be read, cut down line by line and pasted into a report.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
import types
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

_HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn

from tests.random_operators import Scores, Squash, StraightThrough, halve_, wave
"""
_MOST_ELEMENTS = 2048
_LARGEST = 1e4


@dataclass(frozen=True)
class Program:
    """A module, its call and its loss, as text.

    Attributes:
        attributes: lines of `__init__`.
        body: lines of `forward`, one statement each.
        result: the expression that `forward` returns.
        inputs: (name, expression that makes it); in the order of the forward's parameters.
        loss: "inside" (the result is the loss, or has it under "loss"), "loss_fn" or "outside".
        reached: the parts of the result ("out", "out[1]", "out['a']") that the loss reaches.
        autocast: whether the training loop calls the model under `torch.autocast("cpu", torch.bfloat16)`.
        fraction: budget fraction.
        recompute: patterns of `recompute=`.
        segments: parts in which the backward hands out gradients, at most.
    """

    attributes: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    inputs: tuple[tuple[str, str], ...]
    loss: str
    reached: tuple[str, ...]
    autocast: bool
    fraction: float
    recompute: tuple[str, ...]
    segments: int

    def without_line(self, index: int) -> Program:
        return replace(self, body=self.body[:index] + self.body[index + 1 :])._tidied()

    def _tidied(self) -> Program:
        """Without attributes that no line names."""
        used, kept = _attributes_in(" ".join((*self.body, self.result))), []
        for line in reversed(self.attributes):
            target = (
                line.split('"')[1] if line.startswith("self.register_buffer") else line[5:].split()[0].split(".")[0]
            )
            if target in used:
                kept.append(line)
                used |= _attributes_in(line)
        return replace(self, attributes=tuple(reversed(kept)))

    def source(self) -> str:
        """Python source that defines `Model`, `make_inputs` and `loss_fn`."""
        names = ", ".join(("self", *(name for name, _ in self.inputs)))
        made = ", ".join(expression for _, expression in self.inputs)
        loss = " + ".join(f"({part}.float() * 0.3).square().mean()" for part in self.reached)
        return "\n".join(
            (
                _HEADER,
                "",
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self.attributes),
                "",
                f"    def forward({names}):",
                *(f"        {line}" for line in self.body),
                f"        return {self.result}",
                "",
                "",
                "def make_inputs():",
                f"    return ({made},)",
                "",
                "",
                "def loss_fn(out):",
                f"    return {loss or 'out'}",
                "",
                f"# loss {self.loss} ({', '.join(self.reached)}), budget_fraction={self.fraction}, "
                f"recompute={list(self.recompute)}, segments={self.segments}, autocast={self.autocast}",
                "",
            )
        )

    def namespace(self) -> dict[str, Any]:
        """The source, executed; tracebacks and messages of PyTorch show its lines."""
        source = self.source()
        name = "tests.random_module"  # Dynamo imports the module that a function is of
        file = f"{name}_{zlib.crc32(source.encode()):x}.py"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        sys.modules[name] = module = types.ModuleType(name)
        exec(compile(source, file, "exec"), module.__dict__)
        return module.__dict__


def _attributes_in(text: str) -> set[str]:
    return set(re.findall(r"self\.(\w+)", text))


class Sketch:
    """A program that is being drawn, and what its lines made so far.

    `choose` is the only source of decisions. `values` has the tensors by name; `calls` the layers that can be used
    again: (attribute, shape, dtype).
    """

    def __init__(self, choose: random.Random, autocast: bool) -> None:
        self.choose = choose
        self.autocast = autocast
        self.attributes: list[str] = []
        self.body: list[str] = []
        self.inputs: list[tuple[str, str]] = []
        self.calls: list[tuple[str, torch.Size, torch.dtype]] = []
        self.module = nn.Module()
        self.scope: dict[str, Any] = {"self": self.module}
        exec(_HEADER, self.scope)
        self.values: dict[str, torch.Tensor] = {}
        self._count = 0

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def maybe(self, probability: float) -> bool:
        return self.choose.random() < probability

    def regional(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def input(self, expression: str) -> str:
        name = self._name("x")
        self.inputs.append((name, expression))
        self.values[name] = self.scope[name] = eval(expression, self.scope)
        return name

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """Name of a floating tensor that fits; recent ones more often, so that programs grow deep."""
        names = [n for n, t in self.values.items() if t.is_floating_point() and t.numel() and fits(t)]
        if not names:
            return None
        recent = names[-3:] if self.maybe(0.7) else names
        return self.choose.choice(recent)

    def attribute(self, expression: str, stem: str = "m") -> str:
        """Add `self.m1 = <expression>`; returns "self.m1"."""
        name = f"self.{self._name(stem)}"
        self.statement_of_init(f"{name} = {expression}")
        return name

    def statement_of_init(self, line: str) -> None:
        exec(line, self.scope)
        self.attributes.append(line)

    def buffer(self, expression: str) -> str:
        name = self._name("b")
        self.statement_of_init(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def layer(self, expression: str, x: str) -> str | None:
        """A new layer applied to a value; sometimes frozen, and offered for use a second time."""
        t = self.values[x]
        suffix = {torch.float64: ".double()", torch.bfloat16: ".bfloat16()"}.get(t.dtype, "")
        frozen = ".requires_grad_(False)" if self.maybe(0.1) else ""
        name = self.attribute(f"{expression}{'' if self.autocast else suffix}{frozen}")
        self.calls.append((name, t.shape, t.dtype))
        return self.value(f"{name}({x})")

    def value(self, expression: str) -> str | None:
        """Add `v1 = <expression>`, if it runs and its result is fit for further use; returns the name."""
        name = self._name("v")
        return name if self.statement(f"{name} = {expression}", (name,)) else None

    def one_of(self, *expressions: str) -> str | None:
        """`value` of one of them."""
        return self.value(self.choose.choice(expressions))

    def values_of(self, expression: str, count: int) -> tuple[str, ...]:
        names = tuple(self._name("v") for _ in range(count))
        return names if self.statement(f"{', '.join(names)} = {expression}", names) else ()

    def statement(self, line: str, names: Sequence[str] = ()) -> bool:
        """Add a line that makes these names; False if it does not run or its results are of no use."""
        try:
            with self.regional():
                exec(line, self.scope)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return False
        made = [self.scope[name] for name in names]
        if not all(isinstance(t, torch.Tensor) and _is_fit(t) for t in made):
            return False
        self.values.update(zip(names, made, strict=True))
        self.body.append(line)
        return True


def _is_fit(t: torch.Tensor) -> bool:
    if t.is_complex() or t.numel() > _MOST_ELEMENTS or t.ndim > 5:
        return False
    if not t.is_floating_point():
        return True
    t = t.detach()
    return bool(t.isfinite().all()) and (t.numel() == 0 or float(t.abs().max()) < _LARGEST)
