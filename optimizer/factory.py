"""Factory: from "module:callable" to a model and one of its training calls."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class FactoryError(Exception):
    """What was named gives no model and call; the message says what was wanted."""


@dataclass(frozen=True)
class Call:
    """A model and the arguments of one training call; `loss_fn` is None if the model returns the loss itself."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Tensor] | None


def load_call(name: str, device: str | None = None) -> Call:
    """Import and call a factory, and move what it returns.

    Args:
        name: "package.module:callable"; the callable takes nothing and returns (model, args), (model, args, kwargs) or
            (model, args, kwargs, loss_fn).
        device: where model and tensors go, as `torch.device` takes it; None leaves them.

    Raises:
        FactoryError: there is no such callable, it returns something else, or there is no such device.
    """
    call = _checked(name, _factory(name)())
    if device is None:
        return call
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise FactoryError(f"--device {device!r} is no device: {str(error).splitlines()[0]}") from None
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(place), (call.args, call.kwargs))
    return Call(call.model.to(place), args, kwargs, call.loss_fn)


def _factory(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise FactoryError(f"{name!r} is no factory. Give module:callable, such as nets:build.")
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:  # a package on the way to it
        found = None
    if found is None:
        raise FactoryError(f"there is no module {module_name!r} on the path. Run from its folder, or set PYTHONPATH.")
    factory = getattr(importlib.import_module(module_name), attribute, None)
    if not callable(factory):
        raise FactoryError(f"module {module_name!r} has no callable {attribute!r}.")
    return factory


def _checked(name: str, made: Any) -> Call:
    parts: Sequence[Any] = made if isinstance(made, tuple) else ()
    model, args, kwargs, loss_fn = (*parts, *(None,) * (4 - len(parts))) if len(parts) <= 4 else (None,) * 4
    is_call = isinstance(model, nn.Module) and isinstance(args, (tuple, list)) and isinstance(kwargs or {}, Mapping)
    if not is_call or not (loss_fn is None or callable(loss_fn)):
        got = f"({', '.join(type(part).__name__ for part in parts)})" if parts else type(made).__name__
        raise FactoryError(f"{name} must return (model, args[, kwargs[, loss_fn]]), but returned {got}.")
    return Call(model, tuple(args), dict(kwargs or {}), loss_fn)
