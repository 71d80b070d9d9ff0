"""Factory: from "module:callable" to a model and one of its training calls."""

from __future__ import annotations

import importlib
import importlib.util
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placemat.graph.capture import user_frame
from placemat.graph.errors import PlacematError
from placemat.graph.sources import is_library_file, shown_file


class FactoryError(Exception):
    """What was named gives no model and call; the message says what was wanted."""


class FactoryFailed(Exception):
    """The user's code raised, while its module was imported or when it was called; the message says where."""


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
        FactoryFailed: the user's code raised something; from that exception.
        PlacematError: the user's code raised it.
    """
    factory = _users(name, lambda: _factory(name))
    call = _checked(name, _users(name, factory))
    if device is None:
        return call
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise FactoryError(f"--device {device!r} is no device: {str(error).splitlines()[0]}") from None
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(place), (call.args, call.kwargs))
    return Call(call.model.to(place), args, kwargs, call.loss_fn)


def _users(name: str, run: Callable[[], Any]) -> Any:
    """What the user's code returns. It may raise whatever it likes: nothing but its name and line are known of that."""
    try:
        return run()
    except (FactoryError, PlacematError):
        raise
    except Exception as error:
        raise FactoryFailed(f"{name} raised {type(error).__name__}: {error}. At {_users_line(error)}.") from error


def _users_line(error: Exception) -> str:
    """ "nets.py:12, in build: code" of the deepest frame in the user's own files; the line that does not compile."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{shown_file(error.filename)}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library_file(f.filename)]
    return user_frame([f for f in frames if f"{os.sep}site-packages{os.sep}" not in f.filename] or frames)


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
