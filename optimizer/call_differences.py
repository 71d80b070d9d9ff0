"""How a call differs from those that were planned, and what to do about that."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

import torch

from placemat.graph.errors import CaptureError, PlanMismatch
from placemat.plan import Plan

# A tensor as `describe_call` writes it: dtype, shape, the rest.
_TENSOR = re.compile(r"(\w+) (\([\d, ]*\)) on (.*)")
_MOST_LETTERS = 240  # of an error that is not the point
_PLAN_AGAIN = (
    "plan() again for this call; or placemat.optimize(model, budget), which plans for each kind of call, where "
    "apply() holds to one plan"
)
_SAME = (
    "Its arguments and modes are those of a call that was planned: Python state outside of them changed what the "
    "forward does."
)
_REMEDIES = {
    "modules in training": "model.train() or model.eval(), as when the plan was made (evaluation under "
    "torch.no_grad() needs no plan)",
    "parameters that require a gradient": "requires_grad as when the plan was made",
    "autocast on cpu": "the torch.autocast that the plan was made under",
    "autocast on cuda": "the torch.autocast that the plan was made under",
}


def call_difference(planned: Iterable[Mapping[str, str]], call: Mapping[str, str]) -> str:
    """How a call differs from the one of the planned calls that is most like it; "" if nothing is planned.

    Args:
        planned, call: as `describe_call` gives them.
    """
    nearest = min((_differences(each, call) for each in planned), key=len, default=None)
    if nearest is None:
        return ""
    return _told(nearest) if nearest else _SAME


def foreign_graph(plan: Plan, call: Mapping[str, str], fingerprint: str) -> PlanMismatch:
    """The refusal of a call that gives another graph than that of the one plan that was applied."""
    if differences := _differences(plan.options["call"], call):
        return PlanMismatch(f"{_told(differences)}{_versions(plan)} Remedy: {_remedies(plan, call)}.")
    return PlanMismatch(
        f"{_versions(plan).strip() or _SAME} The plan was made for graph {plan.fingerprint[:12]}, and this model with "
        f"these inputs gives graph {fingerprint[:12]}. Remedy: {_PLAN_AGAIN}."
    )


def foreign_call(plan: Plan, call: Mapping[str, str], error: CaptureError) -> PlanMismatch | None:
    """The same for a call that gives no graph at all; None if it is the planned one."""
    if not (differences := _differences(plan.options["call"], call)):
        return None
    why = textwrap.shorten(str(error), _MOST_LETTERS, placeholder=" ...")
    return PlanMismatch(
        f"{_told(differences)}{_versions(plan)} Remedy: {_remedies(plan, call)}. (The call is no graph either: {why})"
    )


def _told(differences: Mapping[str, str]) -> str:
    listed = "; ".join(f"{name} {text}" for name, text in differences.items())
    return f"This call is not one that was planned; from the nearest of those it differs in: {listed}."


def _versions(plan: Plan) -> str:
    if plan.torch_version == torch.__version__:
        return ""
    return f" The plan was made with torch {plan.torch_version}, and this is torch {torch.__version__}."


def _differences(planned: Mapping[str, str], call: Mapping[str, str]) -> dict[str, str]:
    """What differs, by its name in `describe_call`."""
    gone = {name: f"is not given (planned: {text})" for name, text in planned.items() if name not in call}
    extra = {name: f"is extra ({text})" for name, text in call.items() if name not in planned}
    changed = {
        name: f"is {text} (planned: {planned[name]})"
        for name, text in call.items()
        if name in planned and planned[name] != text
    }
    return {**gone, **extra, **changed}


def _remedies(plan: Plan, call: Mapping[str, str]) -> str:
    """What fits the differences, and what always does; each once."""
    planned = plan.options["call"]
    fitting = [
        remedy
        for name in _differences(planned, call)
        if (remedy := _REMEDIES.get(name) or _tensor_remedy(name, planned.get(name, ""), call.get(name, "")))
    ]
    return "; ".join(dict.fromkeys([*fitting, _PLAN_AGAIN]))


def _tensor_remedy(name: str, planned: str, given: str) -> str | None:
    was, present = _TENSOR.fullmatch(planned), _TENSOR.fullmatch(given)
    if was is None or present is None:
        return None
    if was[1] != present[1]:
        return f"give {name} as torch.{was[1]}"
    if was[2] == present[2]:
        return None
    sizes, others = ([int(size) for size in re.findall(r"\d+", text)] for text in (was[2], present[2]))
    if sizes[1:] == others[1:] and others[:1] < sizes[:1]:
        return "a DataLoader's last, smaller batch goes away with drop_last=True"
    return f"give {name} the planned shape, as padding to one length does"
