"""May an op that is not known to be pure be run again because the user says that it is? Facts still rule some out."""

from __future__ import annotations

import torch
from torch import fx

from placemat.graph.lower import Lowering
from placemat.graph.purity import KNOWN_NAMESPACES, declared_impurity, is_random

# Running a collective again on one rank waits for ranks that do not, so these namespaces stay out of reach.
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})


def why_not_even_if_asked(lowering: Lowering, index: int) -> str | None:
    """Reason that the forward op at `index` must run once only whatever the user says, or None if purity alone is open.

    The op is one that `purity.why_not_recomputable` did not let through.
    """
    op, node = lowering.graph.ops[index], lowering.node_of_op[index]
    if node is None:
        return op.why_not
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return f"{op.why_not}, and only operators can be declared to be"
    if target.namespace in KNOWN_NAMESPACES:
        return op.why_not  # PyTorch's own operators are known: the reason is a fact
    if target.namespace in _COLLECTIVE_NAMESPACES:
        return f"{target.name()} is a collective: ranks would wait for each other"
    if (fact := declared_impurity(target)) is not None:
        return fact
    if is_random(node):
        return f"{target.name()} is random, and the state of its generator is not saved"
    if (name := _overwritten_input(lowering, node)) is not None:
        return f"it reads input {name}, which the forward overwrites"
    return None


def _overwritten_input(lowering: Lowering, node: fx.Node) -> str | None:
    """Name of an overwritten graph input that a call reads, itself or through views of it."""
    joint = lowering.joint
    overwritten = {joint.primals[i]: joint.inputs[i].name for i in joint.mutated_inputs.values()}
    seen: set[fx.Node] = set()
    stack = [*node.all_input_nodes]
    while stack:
        source = stack.pop()
        if source in overwritten:
            return overwritten[source]
        # A node that lives in no value views an input; what lives in a value has a storage of its own.
        if source not in seen and source not in lowering.value_of_node:
            seen.add(source)
            stack.extend(source.all_input_nodes)
    return None
