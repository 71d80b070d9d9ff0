"""An OpGraph while it is made: ops and storages so far, and which node of the joint graph is what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from placemat.graph.ir import Op, OpSignature, Phase, Role, Value
from placemat.graph.joint import JointGraph
from placemat.graph.loss_region import LossRegion


@dataclass
class Builder:
    joint: JointGraph
    loss: LossRegion
    ops: list[Op] = field(default_factory=list)
    nodes: list[fx.Node | None] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    value_of_storage: dict[int, int | None] = field(default_factory=dict)  # None: static
    value_of_node: dict[fx.Node, int] = field(default_factory=dict)
    base_of_value: dict[int, fx.Node] = field(default_factory=dict)
    state_of_op: dict[int, int] = field(default_factory=dict)
    mutated_reads: dict[fx.Node, str] = field(default_factory=dict)  # node -> name of the overwritten input it shows


def append(build: Builder, op: Op, node: fx.Node | None) -> None:
    assert op.index == len(build.ops)
    build.ops.append(op)
    build.nodes.append(node)


def values_behind(value_of_node: Mapping[fx.Node, int], node: fx.Node) -> tuple[int, ...]:
    value = value_of_node.get(node)
    return () if value is None else (value,)


def new_value(
    build: Builder,
    name: str,
    nbytes: int,
    producer: int,
    role: Role,
    pinned: bool = False,
    tensor: torch.Tensor | None = None,
) -> int:
    shape = None if tensor is None else tuple(int(size) for size in tensor.shape)
    dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
    value = Value(len(build.values), name, nbytes, producer, role, pinned, shape, dtype)
    build.values.append(value)
    return value.index


def pseudo_op(
    build: Builder, name: str, phase: Phase, inputs: tuple[int, ...], outputs: tuple[int, ...], **extra: Any
) -> Op:
    return Op(
        index=len(build.ops),
        name=name,
        signature=OpSignature(f"placemat.{name}", (), (), ()),
        phase=phase,
        inputs=inputs,
        recompute_inputs=inputs,
        outputs=outputs,
        recomputable=False,
        why_not="it is no operator of the model",
        **extra,
    )
