"""Plan: a schedule with everything needed to apply it, to judge it and to explain it. Plain data, no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any, Protocol, get_origin, get_type_hints

from placemat import plan_file, summary
from placemat.cost_models.base import Costs
from placemat.decisions import Decision, decide
from placemat.graph.errors import PlacematError
from placemat.graph.ir import OpGraph, Value
from placemat.problem import Problem
from placemat.schedule import Compute, Free, Schedule
from placemat.simulate import Simulation, simulate
from placemat.units import format_bytes


class SolvedProblem(Protocol):
    """What a plan needs of a solver's answer: a `SolveResult` or a `FrontierPoint`; the fields are as in `Plan`."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def status(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def lower_bound_seconds(self) -> float: ...

    @property
    def solve_seconds(self) -> float: ...


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule for one training step of one module, and what is known of it.

    Attributes:
        budget_bytes: bound on the peak bytes of live tensor storage on the device during one training step, everything
            included: parameters, buffers, inputs, gradients, outputs, activations, temporaries and `reserved_bytes`.
        reserved_bytes: what the user declared beside the graph (optimizer state, communication buffers).
        static_bytes: category -> bytes that are alive during the whole step whatever the plan.
        floor_bytes, floor_proven: smallest peak that was found, and whether there is provably none below in its family.
        keep_everything_bytes: peak without any recomputation.
        predicted_peak_bytes, breakdown: peak of this plan, and its bytes by category, which add up to it.
        peak_op, peak_source: the op that runs when the peak is reached, and the user's source line of it.
        forward_backward_seconds: one step without recomputation.
        recompute_seconds, lower_bound_seconds: what this plan adds, and the least that any plan of `family` adds.
        status, family, solve_seconds: how the solver ended, which plans it chose from, how long it took.
        capture_seconds, cost_source, device, torch_version, placemat_version: where the figures come from.
        fingerprint, module_digest, input_digest: of the graph, the module and the inputs that the plan is for.
        runs_original: the budget is so ample that the module's original forward runs.
        eager_bound_bytes: upper bound of what a step with the original forward needs; None if it was not computed.
        schedule: the steps.
        decisions: what happens to each value, and why.
        notes: remarks of capture and planning.
        options: what the plan was asked for with, as JSON values (tuples become lists).
    """

    budget_bytes: int
    reserved_bytes: int
    static_bytes: dict[str, int]
    floor_bytes: int
    floor_proven: bool
    keep_everything_bytes: int
    predicted_peak_bytes: int
    breakdown: dict[str, int]
    peak_op: str
    peak_source: str | None
    forward_backward_seconds: float
    recompute_seconds: float
    lower_bound_seconds: float
    status: str
    family: str
    solve_seconds: float
    capture_seconds: float
    cost_source: str
    device: str
    torch_version: str
    placemat_version: str
    fingerprint: str
    module_digest: str
    input_digest: str
    runs_original: bool
    eager_bound_bytes: int | None
    schedule: Schedule
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    options: dict[str, Any]

    @property
    def overhead(self) -> float:
        """Recompute seconds divided by forward + backward seconds."""
        return _ratio(self.recompute_seconds, self.forward_backward_seconds)

    @property
    def lower_bound(self) -> float:
        """No plan of the solved family has a smaller overhead."""
        return _ratio(self.lower_bound_seconds, self.forward_backward_seconds)

    @property
    def gap(self) -> float:
        """(recompute seconds - their lower bound) / recompute seconds: 0 is proven optimal for the family."""
        return _ratio(self.recompute_seconds - self.lower_bound_seconds, self.recompute_seconds)

    def summary(self) -> str:
        """Budget, peak, what binds, cost and decisions, as text."""
        return summary.summarize(self)

    def explain(self, name: str) -> str:
        """What happens to the values of an op or a module (and the modules inside it), and why.

        Raises:
            PlacematError: no decision is about `name`.
        """
        return summary.explain(self, name)

    def __repr__(self) -> str:
        return (
            f"Plan(budget {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)}, "
            f"overhead {self.overhead:.2%}, {self.family}: {self.status}, {len(self.schedule.steps)} steps)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON (see `placemat.plan_file`); an existing file is replaced in one go.

        Raises:
            OSError: the file cannot be written.
        """
        plan_file.write(path, _to_json(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan, which equals the one that was saved. Executes nothing.

        Raises:
            PlanMismatch: a newer placemat wrote the file.
            PlacematError: the file is truncated, is something else, or was changed after it was written.
            OSError: the file cannot be read.
        """
        return _from_json(plan_file.read(path), str(path))


def build_plan(
    graph: OpGraph,
    costs: Costs,
    problem: Problem,
    result: SolvedProblem,
    *,
    budget_bytes: int,
    reserved_bytes: int,
    floor_bytes: int,
    floor_proven: bool,
    keep_everything_bytes: int,
    capture_seconds: float,
    module_digest: str,
    input_digest: str,
    runs_original: bool = False,
    eager_bound_bytes: int | None = None,
    options: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan for a solved problem; `problem` is `Problem.from_op_graph(graph, costs, reserved_bytes=...)`.

    `notes` come after those of the graph. The other arguments are as in `Plan`.
    """
    assert problem.static_bytes == graph.total_static_bytes + reserved_bytes
    simulation = simulate(problem, result.schedule)
    step = result.schedule.steps[simulation.peak_step]
    assert isinstance(step, Compute)
    peak_op = graph.ops[step.op]
    return Plan(
        budget_bytes=budget_bytes,
        reserved_bytes=reserved_bytes,
        static_bytes=dict(graph.static_bytes),
        floor_bytes=floor_bytes,
        floor_proven=floor_proven,
        keep_everything_bytes=keep_everything_bytes,
        predicted_peak_bytes=simulation.peak_bytes,
        breakdown=peak_breakdown(graph, simulation, reserved_bytes),
        peak_op=peak_op.name,
        peak_source=peak_op.source,
        forward_backward_seconds=math.fsum(costs.runtime_s),
        recompute_seconds=simulation.recompute_seconds,
        lower_bound_seconds=result.lower_bound_seconds,
        status=result.status,
        family=result.family,
        solve_seconds=result.solve_seconds,
        capture_seconds=capture_seconds,
        cost_source=costs.source,
        device=graph.device,
        torch_version=version("torch"),
        placemat_version=version("placemat"),
        fingerprint=graph.fingerprint,
        module_digest=module_digest,
        input_digest=input_digest,
        runs_original=runs_original,
        eager_bound_bytes=eager_bound_bytes,
        schedule=result.schedule,
        decisions=decide(graph, costs, result.schedule),
        notes=(*graph.notes, *notes),
        options={key: list(value) if isinstance(value, tuple) else value for key, value in (options or {}).items()},
    )


def peak_breakdown(graph: OpGraph, simulation: Simulation, reserved_bytes: int) -> dict[str, int]:
    """Category -> bytes at the peak of a simulated schedule; they add up to `simulation.peak_bytes`.

    `temporaries` are the outputs and the workspace of the op that runs, and what backward passes from op to op;
    `activations` include generator states; `outputs` include their gradients.
    """
    breakdown = {"parameters": 0, "buffers": 0, "inputs": 0, **graph.static_bytes}
    breakdown.update(dict.fromkeys(("gradients", "outputs", "mutations", "activations", "temporaries"), 0))
    breakdown["reserved"] = reserved_bytes
    for v in simulation.resident_at_peak:
        breakdown[_category(graph, graph.values[v])] += graph.values[v].bytes
    breakdown["temporaries"] += simulation.peak_bytes - sum(breakdown.values())
    return breakdown


def _category(graph: OpGraph, value: Value) -> str:
    if value.role == "activation":
        return "temporaries" if graph.ops[value.producer].phase == "backward" else "activations"
    return {
        "output": "outputs",
        "tangent": "outputs",
        "gradient": "gradients",
        "mutation": "mutations",
        "rng_state": "activations",
    }[value.role]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _to_json(plan: Plan) -> dict[str, Any]:
    """Compute(op) is written as op, Free(v) as -1 - v; decisions as rows below their column names."""
    content = {field.name: getattr(plan, field.name) for field in fields(plan)}
    content["schedule"] = [step.op if isinstance(step, Compute) else -1 - step.value for step in plan.schedule.steps]
    content["notes"] = list(plan.notes)
    content["decisions"] = {
        "columns": [field.name for field in fields(Decision)],
        "rows": [list(asdict(decision).values()) for decision in plan.decisions],
    }
    return content


def _from_json(content: dict[str, Any], path: str) -> Plan:
    hints = get_type_hints(Plan)
    wrong = sorted(content.keys() ^ hints.keys())
    if not wrong:
        content = dict(content)
        try:
            steps = tuple(Compute(code) if code >= 0 else Free(-1 - code) for code in content["schedule"])
            columns, rows = content["decisions"]["columns"], content["decisions"]["rows"]
            content["decisions"] = tuple(Decision(**dict(zip(columns, row, strict=True))) for row in rows)
            content["schedule"] = Schedule(steps)
            content["notes"] = tuple(content["notes"])
        except (KeyError, TypeError, ValueError) as error:
            raise PlacematError(f"{path} holds a plan that cannot be read: {error!r}. Plan again.") from None
        wrong = sorted(name for name, hint in hints.items() if not _fits(content[name], hint))
    if wrong:
        raise PlacematError(f"{path} holds a plan whose entries are not those of a plan: {wrong}. Plan again.")
    return Plan(**content)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value that JSON gave is of a field's type, as far as its outermost type goes."""
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    outer = get_origin(hint) if get_origin(hint) in (dict, tuple) else hint
    return isinstance(value, outer) and (not isinstance(value, bool) or hint is bool)
