"""Plan: a schedule with everything needed to apply it, to judge it and to explain it. Plain data, no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

import torch

from placemat import (
    checkpoint_modules,
    diff,
    explain,
    notebook,
    op_table,
    plan_content,
    plan_file,
    plot_graph,
    plots,
    summary,
)
from placemat.cost_models.base import Costs
from placemat.decisions import Decision, decide
from placemat.graph.ir import OpGraph
from placemat.labels import Labels, category
from placemat.problem import Problem
from placemat.schedule import Compute, Schedule
from placemat.simulate import Simulation, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from placemat.checkpoint_modules import CheckpointModules

_MAX_PRINTED_ROWS = 60


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
        floor_bound_bytes: no plan of that family has a smaller peak.
        keep_everything_bytes: peak of planned code without any recomputation; eager's may be another.
        predicted_peak_bytes, breakdown: peak of this plan, and its bytes by category, which add up to it.
        peak_op, peak_source: the op that runs when the peak is reached, and the user's source line of it.
        forward_backward_seconds: one step without recomputation.
        recompute_seconds, lower_bound_seconds: what this plan adds, and the least that any plan of `family` adds.
        status, family, solve_seconds: how the solver ended, which plans it chose from, how long it took.
        capture_seconds, cost_source, device, torch_version, placemat_version: where the figures come from.
        fingerprint, module_digest, input_digest: of the graph, the module and the inputs that the plan is for.
        runs_original: the budget is so ample that the module's original forward runs.
        eager_bound_bytes: upper bound of what a step with the original forward needs; None if it was not computed.
        problem, labels: what the schedule schedules, and what people call its ops and values.
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
    floor_bound_bytes: int
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
    problem: Problem
    labels: Labels
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

    @property
    def digest(self) -> str:
        """sha256 over what a step depends on: graph, schedule, and options that change what is run.

        Equal for plans that run the same step; seconds and other figures, which differ between machines, are not in it.
        """
        return plan_content.step_digest(self)

    def summary(self) -> str:
        """Budget, peak, what binds, cost and decisions, as text."""
        return summary.summarize(self)

    def table(self, max_rows: int | None = None) -> str:
        """Every value that is kept or recomputed: op, shape, bytes, how often, milliseconds, module, source line.

        Layers that do the same are folded into one, totals come last; None shows all rows.
        """
        return op_table.op_table(self, max_rows)

    def explain(self, name: str) -> str:
        """What happens to the results of some ops, why, and what the other choice would cost in bytes and milliseconds.

        The cost is the referee's for this schedule with the other choice for one op, all else as it is; it says if the
        budget would be broken. For several ops the cost of all together comes first.

        Args:
            name: an op, a value, an operator ("aten.mm") or a module (with those inside), with the wildcards of `keep=`
                ("layers.*.attention"); or a source line ("net.py:12").

        Raises:
            PlacematError: no decision is about `name`.
        """
        return explain.explain(self, name)

    def diff(self, other: Plan) -> str:
        """Figures that differ between this plan and another one, and values that they treat differently, as text.

        Plans for different graphs are compared by their figures and module by module.
        """
        return diff.diff(self, other)

    def checkpoint_modules(self, *, time_limit_s: float = 60.0, gap: float = 0.0) -> CheckpointModules:
        """The submodules to wrap in `torch.utils.checkpoint(..., use_reentrant=False)` for the least extra time under
        the plan's budget, for those who need eager: give them to `apply_checkpointing`, in place of `apply`.

        A wrapped module's forward runs again, up to the last tensor that its backward needs, when backward enters it.
        The plan itself, which decides tensor by tensor, costs less and reaches smaller peaks. Runs nothing, and works
        for plans from files.

        Args:
            time_limit_s, gap: when the solver may stop, as for `plan`; it has to prove what it returns.

        Raises:
            BudgetTooSmall: no set of modules fits; with the smallest peak that one reaches.
            ConstraintError: what the plan's `recompute=` names can be dropped by wrapping no module.
            SolverFailed: nothing was proven in time.
        """
        return checkpoint_modules.choose_modules(self, time_limit_s, gap)

    def plot(self, axes: Axes | None = None) -> Figure:
        """Memory over the step's predicted time by category, with the budget, the peak, recomputations shaded, and the
        same step without recomputation as a line.

        Args:
            axes: matplotlib axes to draw on; None makes a figure.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        return plots.plot_memory(self, axes)

    def plot_graph(self, max_ops: int = 28, axes: Axes | None = None) -> Figure:
        """The ops around the peak, coloured by what happens to their results; arguments and errors as for `plot`."""
        return plot_graph.plot_graph(self, max_ops, axes)

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table(_MAX_PRINTED_ROWS)}"

    def __repr__(self) -> str:
        return f"Plan({notebook.headline(self)}, {len(self.schedule.steps)} steps)"

    def _repr_html_(self) -> str:
        return notebook.to_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON (see `placemat.plan_file`); an existing file is replaced in one go.

        Raises:
            OSError: the file cannot be written.
        """
        plan_file.write(path, plan_content.encode(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan, which equals the one that was saved. Executes nothing.

        Raises:
            PlanMismatch: another version of placemat wrote the file, in a format that this one does not read.
            PlacematError: the file is truncated, is something else, or was changed after it was written.
            OSError: the file cannot be read.
        """
        return cls._decoded(plan_file.read(path), str(path))

    def to_text(self) -> str:
        """The text that `save` writes."""
        return plan_file.to_text(plan_content.encode(self))

    @classmethod
    def from_text(cls, text: str, origin: str) -> Plan:
        """The plan that `to_text` wrote; `origin` is what errors call it, and they are those of `load`."""
        return cls._decoded(plan_file.from_text(text.encode("utf-8"), origin), origin)

    @classmethod
    def _decoded(cls, content: dict[str, Any], origin: str) -> Plan:
        return cls(**plan_content.decode(content, get_type_hints(cls), origin))


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
    floor_bound_bytes: int,
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
        floor_bound_bytes=floor_bound_bytes,
        keep_everything_bytes=keep_everything_bytes,
        predicted_peak_bytes=simulation.peak_bytes,
        breakdown=peak_breakdown(graph, simulation, reserved_bytes),
        peak_op=peak_op.name,
        peak_source=peak_op.source,
        forward_backward_seconds=costs.step_s,
        recompute_seconds=simulation.recompute_seconds,
        lower_bound_seconds=result.lower_bound_seconds,
        status=result.status,
        family=result.family,
        solve_seconds=result.solve_seconds,
        capture_seconds=capture_seconds,
        cost_source=costs.source,
        device=graph.device,
        torch_version=str(torch.__version__),  # as in fingerprints; the wheel's metadata leave "+cpu" or "+cu130" out
        placemat_version=version("placemat"),
        fingerprint=graph.fingerprint,
        module_digest=module_digest,
        input_digest=input_digest,
        runs_original=runs_original,
        eager_bound_bytes=eager_bound_bytes,
        problem=problem,
        labels=Labels.of(graph),
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
        breakdown[category(graph, graph.values[v])] += graph.values[v].bytes
    breakdown["temporaries"] += simulation.peak_bytes - sum(breakdown.values())
    return breakdown


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
