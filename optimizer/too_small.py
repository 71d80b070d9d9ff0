"""The refusal of a budget below the floor."""

from __future__ import annotations

from placemat.constraints import Constraints
from placemat.floor import Floor
from placemat.graph.errors import BudgetTooSmall
from placemat.plan import peak_breakdown
from placemat.simulate import simulate
from placemat.stages import Stages
from placemat.units import format_bytes


def too_small(
    stages: Stages, floor: Floor, budget_bytes: int, *, reserved_bytes: int, constraints: Constraints
) -> BudgetTooSmall:
    """The floor's answer, with the decomposition at the binding step and the user's line."""
    graph = stages.lowering.graph
    simulation = simulate(stages.problem, floor.schedule)
    breakdown = peak_breakdown(graph, simulation, reserved_bytes)
    op = next(o for o in graph.ops if o.name == floor.binding_op)
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in breakdown.items() if size)
    where = f"{op.name} ({op.target}{', in ' + op.module_path if op.module_path else ''})"
    proven = (
        f"no plan needs less ({floor.family})"
        if floor.proven
        else f"no smaller one was found, and below {floor.lower_bound_bytes} bytes there is none"
    )
    return BudgetTooSmall(
        f"budget {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small: the smallest budget"
        f"{f' with {constraints}' if constraints else ''} is "
        f"{floor.minimum_bytes} bytes ({format_bytes(floor.minimum_bytes)}), {proven}. There the peak is at "
        f"{where}{', ' + op.source if op.source else ''}: {parts}. Remedy: budget_bytes={floor.minimum_bytes} or "
        f"more, a smaller batch, or fewer {'entries in keep=' if constraints.keep else 'outputs held by the caller'}.",
        minimum_budget_bytes=floor.minimum_bytes,
        budget_bytes=budget_bytes,
        breakdown=breakdown,
        binding_op=op.name,
        source=op.source,
    )
