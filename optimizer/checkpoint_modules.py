"""CheckpointModules: which submodules to wrap in `torch.utils.checkpoint`, for those who must stay with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placemat.compilers import EAGER, fuses
from placemat.eager_step import EagerStep
from placemat.graph.errors import BudgetTooSmall, UnsupportedFeature
from placemat.module_choice import Choice, ModuleChoice
from placemat.module_regions import find_regions
from placemat.schedule import Compute
from placemat.summary import next_block
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.plan import Plan


@dataclass(frozen=True)
class CheckpointModules:
    """Paths of submodules to wrap, none inside another; itself a sequence of them, as `apply_checkpointing` takes.

    Attributes:
        paths: in the order in which the forward calls them.
        budget_bytes: of the plan.
        predicted_peak_bytes: of an eager step with these wrapped, counted as the budget counts: an upper bound.
        unwrapped_peak_bytes: the same with none wrapped.
        recompute_seconds, forward_backward_seconds: what they run again, and the step without.
        lower_bound_seconds: no set of modules that fits the budget adds less.
        solve_seconds: how long it took.
        excluded: path and reason of each module that may not be wrapped.
        notes: what the prediction leaves out.
    """

    paths: tuple[str, ...]
    budget_bytes: int
    predicted_peak_bytes: int
    unwrapped_peak_bytes: int
    recompute_seconds: float
    forward_backward_seconds: float
    lower_bound_seconds: float
    solve_seconds: float
    excluded: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def overhead(self) -> float:
        """Recompute seconds divided by forward + backward seconds."""
        return self.recompute_seconds / self.forward_backward_seconds if self.forward_backward_seconds > 0 else 0.0

    @property
    def gap(self) -> float:
        """(recompute seconds - their lower bound) / recompute seconds: 0 is proven best."""
        if self.recompute_seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - self.lower_bound_seconds / self.recompute_seconds)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return self.paths[index]

    def __contains__(self, path: object) -> bool:
        return path in self.paths

    def __str__(self) -> str:
        wrapped = ", ".join(fold_paths(self.paths)) or "none: the step fits as it is"
        lines = [
            f"wrap            {wrapped}",
            f"predicted peak  {format_bytes(self.predicted_peak_bytes)} of {format_bytes(self.budget_bytes)}, at most; "
            f"{format_bytes(self.unwrapped_peak_bytes)} without",
            f"overhead        {self.overhead:.2%}, gap {self.gap:.2%}",
        ]
        if self.excluded:
            path, reason = self.excluded[0]
            lines.append(f"not wrapped     {len(self.excluded)} modules may not be: {path}, since {reason}; ...")
        return "\n".join([*lines, *(f"note            {note}" for note in self.notes)])


def fold_paths(paths: Sequence[str]) -> list[str]:
    """Runs of consecutively numbered paths as one: ["h.0", "h.1", "h.2", "head"] becomes ["h.0-h.2", "head"]."""
    runs: list[tuple[str, str]] = []
    for path in paths:
        if runs and path == _next(runs[-1][1], path):
            runs[-1] = runs[-1][0], path
        else:
            runs.append((path, path))
    return [first if first == last else f"{first}-{last}" for first, last in runs]


def _next(last: str, path: str) -> str | None:
    """`path` if it is `last` with one number in it counted on, so that "h.0.mlp" and "h.1.mlp" are neighbours."""
    before, after = last.split("."), path.split(".")
    different = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) != len(after) or len(different) != 1:
        return None
    return path if next_block(before[different[0]]) == after[different[0]] else None


def choose_modules(plan: Plan, time_limit_s: float, gap: float) -> CheckpointModules:
    """The answer of `Plan.checkpoint_modules`; arguments and errors are its."""
    if (segments := plan.options.get("segments", 1)) > 1:
        raise UnsupportedFeature(
            f"the plan has segments={segments}, in which its own code hands out gradients; the modules to wrap are for "
            "eager, which hands each out as it comes. Remedy: plan without segments for them."
        )
    if fuses(plan.options.get("compiler", EAGER)):
        raise UnsupportedFeature(
            "the plan is for fused kernels, and the modules to wrap are for eager, whose results all take memory. "
            "Remedy: plan without compiler= for them."
        )
    started = time.monotonic()
    step = EagerStep(plan.problem, plan.labels, plan.device, not plan.options.get("accumulate_grad", False))
    regions, excluded = find_regions(step)
    program = ModuleChoice(step, regions, started + time_limit_s)
    _, unwrapped = program.replay(())
    choice = program.cheapest(plan.budget_bytes, gap)
    if choice is None:
        raise _too_small(plan, program, excluded)
    return CheckpointModules(
        paths=tuple(region.path for region in sorted(choice.regions, key=lambda region: region.first)),
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=choice.peak_bytes,
        unwrapped_peak_bytes=unwrapped.peak_bytes,
        recompute_seconds=choice.seconds,
        forward_backward_seconds=plan.forward_backward_seconds,
        lower_bound_seconds=min(choice.bound, choice.seconds),
        solve_seconds=time.monotonic() - started,
        excluded=tuple(excluded.items()),
        notes=_notes(plan),
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    if plan.eager_bound_bytes is not None:
        return ()
    return ("the forward makes tensors that nothing reads: they are in no graph, so the peak may be higher.",)


def _too_small(plan: Plan, program: ModuleChoice, excluded: dict[str, str]) -> BudgetTooSmall:
    """The smallest peak that wrapping reaches, what it is made of, and the plan that needs less."""
    choice = program.smallest()
    numbers = [program.regions.index(region) for region in choice.regions]
    wrapped, simulation = program.replay(numbers)
    step = wrapped.schedule.steps[simulation.peak_step]
    assert isinstance(step, Compute)
    source = wrapped.source[step.op]
    name, line = plan.problem.ops[source].name, plan.labels.ops[source].source
    breakdown: dict[str, int] = {**plan.static_bytes, "reserved": plan.reserved_bytes}
    for v in simulation.resident_at_peak:
        origin = wrapped.origin[v]
        category = "activations" if origin is None else plan.labels.values[origin].category
        breakdown[category] = breakdown.get(category, 0) + wrapped.values[v].bytes
    breakdown["temporaries"] = breakdown.get("temporaries", 0) + choice.peak_bytes - sum(breakdown.values())
    examples = "; ".join(f"{path}: {reason}" for path, reason in list(excluded.items())[:2])
    why = f" {len(excluded)} modules may not be wrapped ({examples})." if excluded else ""
    return BudgetTooSmall(
        f"no set of modules to wrap in torch.utils.checkpoint fits {plan.budget_bytes} bytes "
        f"({format_bytes(plan.budget_bytes)}): the smallest peak that an eager step reaches so is {choice.peak_bytes} "
        f"bytes ({format_bytes(choice.peak_bytes)}), {_proof(choice)}, with {_listed(choice)} wrapped, at {name}"
        f"{', ' + line if line else ''}. The plan itself needs {plan.predicted_peak_bytes} bytes "
        f"({format_bytes(plan.predicted_peak_bytes)}).{why} Remedy: apply(model, plan); or plan() with "
        f"budget_bytes={choice.peak_bytes} or more; or smaller modules, of which more can be told apart.",
        minimum_budget_bytes=choice.peak_bytes,
        budget_bytes=plan.budget_bytes,
        breakdown=breakdown,
        binding_op=name,
        source=line,
    )


def _listed(choice: Choice) -> str:
    paths = [region.path for region in sorted(choice.regions, key=lambda region: region.first)]
    return ", ".join(fold_paths(paths)) or "none"


def _proof(choice: Choice) -> str:
    return "no set needs less" if choice.peak_bytes <= choice.bound * (1 + 2e-6) + 1 else "no smaller one was found"
