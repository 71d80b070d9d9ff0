"""Calls: what must hold of a module and its arguments before anything is captured, and how they are known again."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from placemat.graph.errors import UnsupportedFeature
from placemat.graph.static import devices_of, tensors_in
from placemat.training_state import named_leaves


def the_device(model: nn.Module, args: Any, kwargs: Any) -> torch.device:
    """The one device of model and inputs.

    Raises:
        UnsupportedFeature: there are several.
    """
    devices = devices_of(model, args, kwargs)
    if len(devices) > 1:
        raise UnsupportedFeature(
            f"model and inputs are on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}); a budget is "
            "about one. Remedy: move all of them to one device."
        )
    return devices.pop()


def is_trainable(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call can have a backward: a parameter or an input requires a gradient."""
    return any(t.requires_grad for t in (*model.parameters(), *tensors_in((args, kwargs))))


def check_trainable(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse a call that has no backward, before anything is captured."""
    if not is_trainable(model, args, kwargs):
        raise UnsupportedFeature(
            "nothing to train: no parameter of the model and no input requires a gradient, so there is no backward "
            "to plan for. Remedy: set requires_grad on what is trained."
        )


def module_digest(model: nn.Module) -> str:
    """sha256 over names, shapes and dtypes of the module's parameters and buffers."""
    rows = [f"{n}|{tuple(t.shape)}|{t.dtype}" for n, t in (*model.named_parameters(), *model.named_buffers())]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def input_digest(args: Any, kwargs: Any) -> str:
    """sha256 over shapes and dtypes of the tensor inputs."""
    rows = [f"{tuple(t.shape)}|{t.dtype}" for t in tensors_in((args, kwargs))]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def describe_call(
    model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """What tells a call of `forward` from others, by name: arguments, train flags, autocast, what is trained."""
    try:
        arguments = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or one that the call does not fit
        arguments = {"args": args, "kwargs": dict(kwargs)}
    leaves = (leaf for name, value in arguments.items() for leaf in named_leaves(value, f"argument {name}"))
    described = {name: _describe_leaf(leaf) for name, leaf in leaves}
    modules, parameters = list(model.modules()), list(model.parameters())
    described["modules in training"] = f"{sum(m.training for m in modules)} of {len(modules)}"
    described["parameters that require a gradient"] = f"{sum(p.requires_grad for p in parameters)} of {len(parameters)}"
    for device in ("cpu", "cuda"):
        is_on = torch.is_autocast_enabled(device)
        described[f"autocast on {device}"] = (
            str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_on else "off"
        )
    return described


def _describe_leaf(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        gradient = ", requires a gradient" if leaf.requires_grad else ""
        layout = "" if leaf.layout == torch.strided and leaf.is_contiguous() else ", not contiguous"
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)} on {leaf.device}{layout}{gradient}"
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device))
    return repr(leaf) if is_plain else type(leaf).__name__
