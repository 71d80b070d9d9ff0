"""Where a handle sits on its module, also when another library has wrapped the module's forward since.

Libraries that change how a forward runs (mixed precision in Accelerate, and so in `transformers.Trainer`) take the
function under `model.forward`, wrap it, and bind what they got to the model; a copy of the model binds it to the copy.
So a handle has such a function (`Handle.__func__`). It looks its handle up on whatever module it is called with: a
function that had the handle in it would train the model that a copy was made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from placemat.graph.errors import PlacematError

ATTRIBUTE = "_placemat_handle"  # beside "forward" in the module's __dict__


class Rebindable:
    """The function of a module and of its forward's arguments that calls the module's handle."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__name__ = "forward"  # a method is pickled by its name
        signature = inspect.signature(forward)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        handle = module.__dict__.get(ATTRIBUTE)
        if handle is None:
            raise PlacematError(
                f"this forward was taken from a {type(module).__name__} while that was optimized, which it no longer "
                "is. Remedy: take model.forward anew."
            )
        return handle(*args, **kwargs)


def handle_of(model: nn.Module) -> Any:
    """The handle that the module's forward leads to, through wrappers that say what they wrap; None without one."""
    handle = model.__dict__.get(ATTRIBUTE)
    present = model.__dict__.get("forward")
    while handle is not None and present is not None:
        if present is handle or isinstance(present, Rebindable):
            return handle
        present = getattr(present, "__wrapped__", None) or getattr(present, "__func__", None)
    return None


def unwrapped_handle_of(model: nn.Module) -> Any:
    """The same, for what replaces the handle or reads the forward under it.

    Raises:
        PlacematError: something is wrapped around the handle, which would be lost, or planned twice.
    """
    handle = handle_of(model)
    if handle is not None and not isinstance(getattr(model.__dict__["forward"], "__func__", None), Rebindable):
        raise PlacematError(
            f"the forward of this optimized {type(model).__name__} was wrapped by another library since (mixed "
            "precision in Accelerate and transformers.Trainer does that). Remedy: unwrap it first, there with "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
        )
    return handle


def forward_under(module: nn.Module, replaced: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a module runs without us: what its `__dict__` had under "forward" before, or its class's method."""
    if replaced is not None:
        return replaced
    forward: Callable[..., Any] = type(module).forward.__get__(module)
    return forward
