"""Hooks that a forward registers and removes again: traced as the change of two dictionaries that they are.

`register_forward_pre_hook` and `register_forward_hook` return a handle that holds weak references, which Dynamo cannot
trace, and it takes the hook dictionaries of a module for constants. While placemat traces a step, the two methods put
the hook into the module's own dictionaries in a way that Dynamo follows. A hook that is still there when the forward
returns is refused: the next call would have one more, and another graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_Hooks = dict[int, Any]

_ORIGINAL_PRE = nn.Module.register_forward_pre_hook
_ORIGINAL = nn.Module.register_forward_hook

LEFT_BEHIND = "placemat: hooks left behind"
_registered: list[str] = []  # class names of modules with hooks of the forward that is being traced


class _TracedHandle:
    """What stands in for torch's RemovableHandle while a forward is traced; removes its hook once."""

    def __init__(self, hooks: _Hooks, flags: _Hooks, key: int, owner: str) -> None:
        self.hooks, self.flags, self.id, self.owner = hooks, flags, key, owner

    def remove(self) -> None:
        if self.id not in self.hooks:
            return
        del self.hooks[self.id]
        if self.id in self.flags:
            del self.flags[self.id]
        _registered.remove(self.owner)

    def __enter__(self) -> _TracedHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def _add(module: nn.Module, name: str, hook: Any, prepend: bool, with_kwargs: bool) -> _TracedHandle:
    """Put a hook into `module._forward_..._hooks`.

    The dictionaries are read from the module's `__dict__`, where Dynamo sees the object itself, and stored again, so
    that it looks there from now on. Keys are below those that PyTorch gives, which count up.
    """
    hooks, flags = module.__dict__[name], module.__dict__[f"{name}_with_kwargs"]
    setattr(module, name, hooks)
    setattr(module, f"{name}_with_kwargs", flags)
    key = min([0, *hooks]) - 1
    hooks[key] = hook
    if with_kwargs:
        flags[key] = True
    if prepend:
        hooks.move_to_end(key, last=False)
    owner = type(module).__name__
    _registered.append(owner)
    return _TracedHandle(hooks, flags, key, owner)


def _register_forward_pre_hook(self: nn.Module, hook: Any, *, prepend: bool = False, with_kwargs: bool = False) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        return _ORIGINAL_PRE(self, hook, prepend=prepend, with_kwargs=with_kwargs)
    return _add(self, "_forward_pre_hooks", hook, prepend, with_kwargs)


def _register_forward_hook(
    self: nn.Module, hook: Any, *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
) -> Any:
    if always_call or not torch.compiler.is_dynamo_compiling():
        return _ORIGINAL(self, hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)
    return _add(self, "_forward_hooks", hook, prepend, with_kwargs)


def check_removed() -> None:
    """Traced at the end of a forward: hooks that it registered are removed.

    Raises:
        RuntimeError: they are not, which ends the capture.
    """
    if _registered:
        raise RuntimeError(LEFT_BEHIND + " on " + ", ".join(_registered))


@contextlib.contextmanager
def traced_registration() -> Iterator[None]:
    """Let Dynamo trace a forward that registers hooks; what runs eagerly does what it always does.

    Methods that somebody else put into PyTorch's class stay.
    """
    replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "register_forward_pre_hook": (_ORIGINAL_PRE, _register_forward_pre_hook),
        "register_forward_hook": (_ORIGINAL, _register_forward_hook),
    }
    present = {name: getattr(nn.Module, name) for name in replaced}
    for name, (original, ours) in replaced.items():
        if present[name] is original:
            setattr(nn.Module, name, ours)
    try:
        yield
    finally:
        for name, method in present.items():
            setattr(nn.Module, name, method)
