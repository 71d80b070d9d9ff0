"""May an op run again, and would it do the same? Unknown means no: such an op's results are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placemat.graph.eager_ops import FORWARD
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.sources import user_line
from placemat.graph.storages import argument

# Namespaces whose ops are functional unless their schema or tags say otherwise. Custom libraries are not known to be.
KNOWN_NAMESPACES = frozenset({"aten", "prims", "placemat_ops"})
# Custom operators of libraries, pure by their source. The products of experts in transformers 5 (integrations/moe.py):
# one `mm` for each expert, into rows of a result of zeros.
KNOWN_PURE = frozenset({"transformers::grouped_mm_fallback"})


def schema_of(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def is_random(node: fx.Node) -> bool:
    """Whether an op draws from a generator.

    Attention ops carry the tag whatever their dropout; with probability 0 they draw nothing. So do recurrent layers.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is FORWARD and node.meta["kept"].may_run_again:
        return False
    return not ("scaled_dot_product" in target.name() and argument(node, "dropout_p", 0.0) == 0.0)


def owns_generator(node: fx.Node) -> bool:
    """Whether a random op draws from a generator of the user's instead of the device's default one."""
    return argument(node, "generator", None) is not None


def check_draw_order(node: fx.Node) -> None:
    """Refuse the one random op whose functional form draws in another order than what it stands for.

    `x.bernoulli_(p)`, and with it dropout in place without a gradient, goes through x in the order of its memory; the
    `aten.bernoulli.p` that it becomes in a graph makes a contiguous result (Distributions.cpp).

    Raises:
        UnsupportedFeature: with the user's line.
    """
    if node.target is not torch.ops.aten.bernoulli.p or node.args[0].meta["val"].is_contiguous():  # type: ignore[union-attr]
        return
    raise UnsupportedFeature(
        "the forward draws Bernoulli numbers (bernoulli_, or dropout in place) into a tensor that is not contiguous; "
        f"they would come in another order. At {user_line(node.meta.get('stack_trace')) or 'an unknown line'}. "
        "Remedy: .contiguous() before it, or dropout that is not in place."
    )


def declared_impurity(target: torch._ops.OpOverload) -> str | None:
    """Reason against a second run that an operator's schema or tags give, whoever wrote it."""
    if target._schema.is_mutable:
        return f"{target.name()} writes to its arguments"
    if torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags:
        return f"the shape or value of {target.name()} depends on data"
    return None


def why_not_recomputable(node: fx.Node, reads_mutated_input: str | None) -> str | None:
    """Reason that an op of the forward must run once only, or None if it may be run again."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return f"{getattr(target, '__name__', target)} is not an operator that is known to be pure"
    if target is FORWARD and not node.meta["kept"].may_run_again:
        return "its module is kept eager"
    if target.namespace not in KNOWN_NAMESPACES and target.name() not in KNOWN_PURE:
        return f"custom operator {target.name()} is not known to be pure"
    if (fact := declared_impurity(target)) is not None:
        return fact
    if owns_generator(node):
        return f"{target.name()} draws from a generator of its own"
    if reads_mutated_input is not None:
        return f"it reads {reads_mutated_input}, which the forward overwrites"
    return None
