"""Modules and parameters of a model, for what is done at every call: faster than `nn.Module`'s own walks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """A module and all below it, each once, in an order that stays while the modules do."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [root]
    for module in waiting:  # which grows meanwhile
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(module._modules.values())
    return list(found)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Parameters of these modules themselves; one that several modules share is there as often."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def global_hooks() -> tuple[Any, ...]:
    """Hooks that are registered for all modules; Dynamo has no guards on them."""
    module = torch.nn.modules.module
    hooks = (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    )
    return tuple(tuple(h.values()) for h in hooks) if any(hooks) else ()


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules has a forward or backward hook of its own."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return True
    return False
