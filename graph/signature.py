"""An FX call as a cost model sees it: target, shapes, strides, dtypes and plain arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placemat.graph.ir import OpSignature, TensorSpec
from placemat.graph.storages import tensors_of


def signature(node: fx.Node) -> OpSignature:
    """The call as a cost model sees it."""
    return OpSignature(
        target=str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", "?"),
        args=tuple(argument_spec(a) for a in node.args),
        kwargs=tuple(sorted((k, argument_spec(a)) for k, a in node.kwargs.items())),
        outputs=tuple(None if t is None else tensor_spec(t) for t in tensors_of(node)),
    )


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(int(s) for s in tensor.shape),
        strides=tuple(int(s) for s in tensor.stride()) if tensor.layout == torch.strided else (),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.type,
        itemsize=tensor.element_size(),
    )


def argument_spec(argument: Any) -> Any:
    """An argument of a call, be it traced or run, as `OpSignature` has it."""
    if isinstance(argument, torch.Tensor):
        return tensor_spec(argument)
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            return tensor_spec(value)
        if isinstance(value, (list, tuple)):
            return tuple(tensor_spec(v) if isinstance(v, torch.Tensor) else None for v in value)
        return str(value)
    if isinstance(argument, (list, tuple)):
        return tuple(argument_spec(a) for a in argument)
    if argument is None or isinstance(argument, (bool, int, float, complex, str)):
        return argument
    return str(argument).removeprefix("torch.")
