"""Compare optimized random modules with eager ones, bit by bit: `python -m tests.fuzz --models 2000 --seed 0`.

Each model takes two training steps with an update in between, a third one that is measured, and a call in eval mode
without gradients. It is refused by name, or everything that the steps leave behind is eager's: anything else is a
fault, which is printed as a script, cut down to the lines that it takes.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import placemat
from placemat.cost_models import present_roofline
from placemat.training_state import named_leaves, named_tensors, same_bits
from tests.random_modules import random_program
from tests.random_sketch import Program

# A plan that is not the best one is right all the same, and small modules rarely take as long.
_TIME_LIMIT_S = 2.0
_STEPS = 2
_MOST_CUTS = 60


class Invalid(Exception):
    """The program does not train eagerly, so there is nothing to compare with."""


@dataclass(frozen=True)
class Verdict:
    """What came of a program: "bitwise", "refused", "invalid" or "fault", and of which kind."""

    outcome: str
    kind: str = ""
    detail: str = ""


class _Run:
    """One model of a program, made from fixed random numbers, and the steps that it takes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scope = program.namespace()
        torch.manual_seed(0)
        self.model: nn.Module = self.scope["Model"]()
        self.plan: placemat.Plan | None = None
        self.measured_bytes = 0

    def optimize(self) -> None:
        loss_fn = self.scope["loss_fn"] if self.program.loss == "loss_fn" else None
        with self._autocast():
            placemat.optimize(
                self.model,
                example_args=self._inputs(0),
                budget_fraction=self.program.fraction,
                recompute=self.program.recompute,
                segments=self.program.segments,
                loss_fn=loss_fn,
                cost_model=present_roofline("cpu"),  # sooner than measuring the ops of a thousand models
                time_limit_s=_TIME_LIMIT_S,
            )
        self.plan = self.model.forward.plan  # type: ignore[union-attr]

    def steps(self, *, measured: bool) -> Iterator[dict[str, Any]]:
        """What each step leaves behind, by name."""
        for index in range(_STEPS):
            args = self._inputs(index)
            made: dict[str, Any] = {}
            self._train(args, made)
            yield {f"step {index + 1} {name}": value for name, value in self._left(args, made["out"]).items()}
            self._update()
        args, made = self._inputs(0), {}
        tangents = self._tangents(made, args)
        if measured:
            self.measured_bytes = placemat.measure(lambda: self._train(args, made, tangents)).peak_bytes
        else:
            self._train(args, made, tangents)
        self._update()
        self.model.eval()
        args = self._inputs(_STEPS)
        with torch.no_grad(), self._autocast():
            out = self.model(*args)
        yield {f"eval {name}": value for name, value in self._left(args, out).items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.program.autocast else nullcontext()

    def _inputs(self, index: int) -> tuple[Any, ...]:
        torch.manual_seed(100 + index)
        return self.scope["make_inputs"]()

    def _train(self, args: Any, made: dict[str, Any], tangents: list[Tensor] | None = None) -> None:
        with self._autocast():
            made["out"] = out = self.model(*args)
            if self.program.loss != "outside":
                (self.scope["loss_fn"](out) if self.program.loss == "loss_fn" else self._reached(out)[0]).backward()
                return
        reached = self._reached(out)
        torch.autograd.backward(reached, tangents or [_tangent(t) for t in reached])

    def _tangents(self, made: dict[str, Any], args: Any) -> list[Tensor] | None:
        """Gradients for a loss outside, made before the measured step; from a step that is thrown away."""
        if self.program.loss != "outside":
            return None
        self._train(args, made)
        tangents = [_tangent(t) for t in self._reached(made.pop("out"))]
        self._update()
        return tangents

    def _reached(self, out: Any) -> list[Tensor]:
        return [eval(part, {"out": out}) for part in self.program.reached]

    def _update(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
                p.grad = None

    def _left(self, args: Any, out: Any) -> dict[str, Any]:
        """Outputs, gradients, buffers, inputs and the random state, and how outputs and inputs share storage."""
        left: dict[str, Any] = {"random state": torch.get_rng_state()}
        for name, leaf in named_leaves(out, "out"):
            left[name] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            if isinstance(leaf, Tensor):
                left[f"{name} form"] = (leaf.requires_grad, leaf.is_leaf)
            left[f"{name} type"] = type(leaf)
        left["out type"] = type(out).__qualname__
        for name, p in self.model.named_parameters():
            left[f"{name} gradient"] = None if p.grad is None else p.grad.clone()
        for name, b in self.model.named_buffers():
            left[name] = b.clone()
        for name, t in named_tensors(args, "input"):
            left[f"{name} after"] = t.detach().clone()
            if t.requires_grad:
                left[f"{name} gradient"] = None if t.grad is None else t.grad.clone()
        left["sharing"] = self._sharing(args, out)
        return left

    def _sharing(self, args: Any, out: Any) -> list[int]:
        """For each output and input, the first of them that has the same storage."""
        tensors = [t for _, t in named_tensors((out, args), "") if t.layout == torch.strided]
        storages = [t.untyped_storage().data_ptr() for t in tensors]
        return [storages.index(s) for s in storages]


def _tangent(output: Tensor) -> Tensor:
    """A gradient for an output: in its memory format, contiguous, permuted or expanded, by its number of elements."""
    numbers = torch.cos(0.7 * torch.arange(output.numel(), dtype=torch.float32)).reshape(output.shape)
    layouts = (
        torch.empty_like(output),
        torch.empty(output.shape),
        torch.empty(output.shape[::-1]).permute(_back(output)),
    )
    kind = output.numel() // 2 % 4
    if kind == len(layouts):
        return numbers.flatten()[-1].to(output.dtype).expand(output.shape)
    return layouts[kind].to(output.dtype).copy_(numbers)


def _back(output: Tensor) -> list[int]:
    return list(range(output.ndim))[::-1]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and a == b


def judge(program: Program) -> Verdict:
    """Run a program eagerly and optimized."""
    try:
        eager = [left for left in _Run(program).steps(measured=False)]
    except Exception as error:
        return Verdict("invalid", f"{type(error).__name__}: {error}"[:80])
    run = _Run(program)
    try:
        run.optimize()
        planned = [left for left in run.steps(measured=True)]
    except placemat.PlacematError as error:
        if "AssertionError" in str(error):  # one of placemat's own, wrapped by PyTorch's compiler
            return Verdict("fault", _gist(str(error)), traceback.format_exc())
        return Verdict("refused", f"{type(error).__name__}: {_gist(str(error))}", str(error))
    except Exception as error:
        return Verdict("fault", f"{type(error).__name__}: {_gist(str(error))}", traceback.format_exc())
    finally:
        torch._dynamo.reset()
    return _compared(eager, planned) or _peaks(run) or Verdict("bitwise")


def _compared(eager: list[dict[str, Any]], planned: list[dict[str, Any]]) -> Verdict | None:
    for expected, found in zip(eager, planned, strict=True):
        names = list(dict.fromkeys((*expected, *found)))
        wrong = [n for n in names if n not in expected or n not in found or not _same(expected[n], found[n])]
        if wrong:
            kinds = sorted({re.sub(r"\d+", "N", n) for n in wrong})
            shown = "\n".join(f"{n}: eager {expected.get(n)}, optimized {found.get(n)}" for n in wrong[:3])
            return Verdict("fault", f"differs: {', '.join(kinds)[:120]}", shown)
    return None


def _peaks(run: _Run) -> Verdict | None:
    plan = run.plan
    assert plan is not None
    measured_bytes = sum(plan.static_bytes.values()) + run.measured_bytes
    compiles_again = any(line.startswith("self.n") for line in run.program.body)  # a Python counter, at every step
    if compiles_again or any("not known" in note for note in plan.notes):
        return None
    limit_bytes = plan.budget_bytes if plan.runs_original else plan.predicted_peak_bytes
    if measured_bytes > limit_bytes:
        text = f"measured {measured_bytes}, predicted {plan.predicted_peak_bytes}, budget {plan.budget_bytes}"
        return Verdict("fault", "peak above the prediction", text)
    return None


def _gist(message: str) -> str:
    """The start of a message without what is of one model only."""
    return re.sub(r"\d+", "N", message)[:110].replace("\n", " ")


def cut_down(program: Program, verdict: Verdict, again: Callable[[Program], Verdict] = judge) -> Program:
    """The program without the lines that its fault does not need."""
    cuts, index = 0, len(program.body) - 1
    while index >= 0 and cuts < _MOST_CUTS:
        smaller = program.without_line(index)
        cuts += 1
        found = again(smaller)
        if found.outcome == verdict.outcome and found.kind[:12] == verdict.kind[:12]:
            program = smaller
        index -= 1
    return program


def draw(seed: int, index: int) -> Program:
    """The `index`-th program of a seed; does not depend on those before it."""
    attempt = 0
    while True:
        program = random_program(random.Random(f"{seed} {index} {attempt}"))
        if program is not None:
            return program
        attempt += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--whole", action="store_true", help="print faulty programs as drawn, not cut down")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[tuple[str, str]] = collections.Counter()
    started = time.monotonic()
    for index in range(options.first, options.first + options.models):
        program = draw(options.seed, index)
        verdict = judge(program)
        outcomes[verdict.outcome] += 1
        kinds[verdict.outcome, verdict.kind] += 1
        if verdict.outcome == "fault":
            shown = program if options.whole else cut_down(program, verdict)
            print(f"FAULT in model {index}: {verdict.kind}\n{shown.source()}\n{judge(shown).detail}\n", flush=True)
        if (index + 1) % 50 == 0:
            print(f"{index + 1}: {dict(outcomes)}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"tried {options.models} (seed {options.seed}) in {time.monotonic() - started:.0f} s: {dict(outcomes)}")
    for (outcome, kind), count in sorted(kinds.items(), key=lambda item: (item[0][0], -item[1])):
        if outcome != "bitwise":
            print(f"{count:6d}  {outcome}  {kind}")


if __name__ == "__main__":
    main()
