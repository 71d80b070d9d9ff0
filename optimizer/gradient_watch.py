"""Gradients that exist during a step although the plan does not count them: told of, once per module."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from placemat.graph.errors import UndeclaredGradients
from placemat.graph.sources import users_stacklevel
from placemat.plan import Plan
from placemat.schedule import Compute
from placemat.simulate import simulate
from placemat.units import format_bytes

_MOST_LOOKED_AT = 32
_REMEDY = (
    "Remedy: accumulate_grad=True if gradients are accumulated over several backwards; otherwise "
    "optimizer.zero_grad(set_to_none=True) before each step"
)


class Watched(Protocol):
    """A handle, or what stands for one: a latest plan, and the parameters that it is for, each once or more often."""

    def parameters(self) -> Iterable[torch.Tensor]: ...

    @property
    def plan(self) -> Plan | None: ...

    @property
    def module(self) -> object: ...


class GradientWatch:
    """Looks at a module's gradients when a planned forward and when its backward begins.

    It does not hold the handle: Dynamo's cache, which holds the watch, would keep the module alive.
    """

    def __init__(self, handle: Watched) -> None:
        self._handle = weakref.ref(handle)
        self._forward_peaks: dict[str, int] = {}  # plan fingerprint -> bytes
        self._found_none = False  # when the last forward began, and no backward has begun since
        self.has_warned = False

    def before_forward(self) -> None:
        """Warn if the forward and the gradients of the step before do not fit together.

        Training loops that clear gradients between forward and backward have both at once; where backward takes more
        memory than forward by at least the gradients, that does no harm.
        """
        plan, existing_bytes = self._undeclared()
        self._found_none = existing_bytes == 0
        if plan is None or not existing_bytes:
            return
        if plan.fingerprint not in self._forward_peaks:
            self._forward_peaks[plan.fingerprint] = forward_peak_bytes(plan)
        peak_bytes = self._forward_peaks[plan.fingerprint]
        if peak_bytes + existing_bytes > plan.budget_bytes:
            self._warn(
                f"a forward of the optimized {self._name()} begins while its parameters have gradients of "
                f"{_size(existing_bytes)} already, which the plan was not told of: up to backward it takes "
                f"{peak_bytes} bytes without them, {_together(peak_bytes + existing_bytes, plan)}. {_REMEDY}, not "
                "between forward and backward (in a LightningModule: in on_train_batch_start)."
            )

    def before_backward(self) -> None:
        """Warn if there are gradients.

        If there were none when forward began, a few parameters tell whether another backward has run since: to look at
        all of them twice a step takes 0.4 ms for 514.
        """
        found_none, self._found_none = self._found_none, False
        if found_none and not self._has_some():
            return
        plan, existing_bytes = self._undeclared()
        if plan is not None and existing_bytes:
            self._warn(
                f"backward() through the optimized {self._name()} begins while its parameters have gradients of "
                f"{_size(existing_bytes)} already, which the plan was not told of: it predicts a peak of "
                f"{plan.predicted_peak_bytes} bytes without them, "
                f"{_together(plan.predicted_peak_bytes + existing_bytes, plan)}. {_REMEDY}."
            )

    def _has_some(self) -> bool:
        alive = self._handle()
        parameters = [] if alive is None else list(alive.parameters())
        return any(p.grad is not None for p in parameters[:: max(1, len(parameters) // _MOST_LOOKED_AT)])

    def _undeclared(self) -> tuple[Plan | None, int]:
        """The plan, unless it counts gradients or all was said, and the bytes of gradients that exist."""
        alive = self._handle()
        if alive is None or self.has_warned or alive.plan is None or alive.plan.options["accumulate_grad"]:
            return None, 0
        gradients = [g for p in alive.parameters() if (g := p.grad) is not None]
        by_identity = {id(g): g for g in gradients}  # parameters may come twice
        return alive.plan, sum(g.numel() * g.element_size() for g in by_identity.values())

    def _name(self) -> str:
        alive = self._handle()
        return type(alive.module).__name__ if alive is not None else "module"

    def _warn(self, message: str) -> None:
        self.has_warned = True
        warnings.warn(message, UndeclaredGradients, stacklevel=users_stacklevel())


def forward_peak_bytes(plan: Plan) -> int:
    """Peak of a plan from the step's beginning to the loss, the loss included."""
    bytes_by_step = simulate(plan.problem, plan.schedule).timeline
    steps = plan.schedule.steps
    end = next((i for i, s in enumerate(steps) if isinstance(s, Compute) and s.op == plan.problem.border), len(steps))
    return max(bytes_by_step[: end + 1], default=0)


def _together(total_bytes: int, plan: Plan) -> str:
    over = total_bytes - plan.budget_bytes
    fits = f"{over} more than the budget" if over > 0 else "still within the budget"
    return f"up to {total_bytes} with them, {fits} of {plan.budget_bytes}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"
