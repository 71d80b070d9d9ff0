"""Workspaces: bytes that an op's CPU kernel allocates beside its outputs and frees before it returns.

They never appear in the graph, but they are part of the allocator's peak: a dropout, for instance, casts its bool mask
into a tensor as large as its input. The formulas sit in `workspaces_*.py`, one family a file; each says where its bytes
come from and whether it is exact or an upper bound. "Peak" is the largest sum of live c10 allocations during the op,
"workspace" that peak minus the bytes of the outputs as their specs give them.

Only the CPU is covered: on CUDA the answer is 0 (cuBLAS and cuDNN workspaces, attention buffers and casts are not
counted), so leave room for them in `reserved_bytes`. Memory that oneDNN, MKL or OpenMP take from the operating system
instead of the allocator is not counted either.
"""

from __future__ import annotations

from placemat.cost_models.operands import REDUCED, base_target, device_type, input_tensors
from placemat.cost_models.workspaces_conv import FORMULAS as CONVOLUTION
from placemat.cost_models.workspaces_image import FORMULAS as IMAGE
from placemat.cost_models.workspaces_matmul import FORMULAS as MATMUL
from placemat.cost_models.workspaces_norm import FORMULAS as NORM
from placemat.cost_models.workspaces_pointwise import Formula, pointwise_formula
from placemat.cost_models.workspaces_reduction import FORMULAS as REDUCTION
from placemat.graph.ir import OpSignature

_FORMULAS: dict[str, Formula] = {**CONVOLUTION, **IMAGE, **MATMUL, **NORM, **REDUCTION}

# Metadata only: no memory is read or allocated.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in """view _unsafe_view reshape_alias _reshape_alias t transpose permute expand slice select squeeze
    unsqueeze split split_with_sizes unbind alias detach as_strided diagonal unfold view_as_real view_as_complex
    lift_fresh""".split()
)


def is_view(target: str) -> bool:
    """Whether the op only makes a new view of its first argument."""
    return base_target(target) in _VIEWS or target == "getitem"


def is_free(signature: OpSignature) -> bool:
    """Whether the op takes no time worth counting: views, and the pseudo-ops that the graph adds."""
    return is_view(signature.target) or signature.target.startswith("placemat.")


def _formula(target: str) -> Formula | None:
    return pointwise_formula(target) or _FORMULAS.get(base_target(target))


def is_known(target: str) -> bool:
    """Whether `workspace_bytes` has a formula for this op, or knows that it needs nothing.

    Those of modules that are kept eager come with the graph (`Op.known_workspace_bytes`).
    """
    return is_view(target) or target.startswith(("placemat.", "placemat_ops.eager_")) or _formula(target) is not None


def is_bound(signature: OpSignature) -> bool:
    """Whether the formula is an upper bound because a vendor library chooses how much to allocate: convolutions, and
    products and attention in 16-bit dtypes."""
    base = base_target(signature.target)
    if base in CONVOLUTION:
        return True
    return base in MATMUL and any(t.dtype in REDUCED for t in input_tensors(signature))


def workspace_bytes(signature: OpSignature, num_threads: int) -> int:
    """Workspace of one run on CPU with `num_threads` intra-op threads; 0 for unknown ops (`is_known`) and on CUDA."""
    if device_type(signature) != "cpu" or is_view(signature.target):
        return 0
    formula = _formula(signature.target)
    return max(0, formula(signature, num_threads)) if formula is not None else 0
