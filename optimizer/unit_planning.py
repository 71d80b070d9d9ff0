"""From a model with units to a plan for each, under one budget: the procedure of `distributed.optimize_units`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import permutations
from typing import Any

from torch import nn

from placemat.graph.errors import BudgetTooSmall, ConstraintError, PlacematError, RanksDisagree, UnsupportedFeature
from placemat.installed import handle_of
from placemat.parallel_wrappers import is_unit_of_fsdp
from placemat.pipeline import Planner
from placemat.plan import Plan
from placemat.progress import shown
from placemat.ranks import Ranks, attempt
from placemat.schedule import Schedule
from placemat.unit_choice import Moment, UnitChoice, UnitSearch, UnitStep
from placemat.unit_curve import UnitPoint
from placemat.unit_plans import UnitFigures, UnitPlans
from placemat.unit_trial import Curves, TrialSteps, UnitTrial, read_moments, units_watched
from placemat.units import format_bytes

# Part of the time limit that one question to the solver about one unit may take.
_SHARE_OF_TIME = 0.1
# What is beside the units is looked at again under each choice; one that turns out not to fit is made once more.
_MOST_ROUNDS = 3


def find_units(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """Path -> module of the units: the outermost modules that match, or the innermost that `fully_shard` was called on.

    Raises:
        ConstraintError: a pattern matches no module, or modules inside each other.
        PlacematError: there are no patterns, and no module but the model itself is sharded; or a unit is optimized.
    """
    named = {path: module for path, module in model.named_modules() if path}
    if patterns is None:
        sharded = {path: m for path, m in named.items() if is_unit_of_fsdp(m)}
        units = {
            path: m
            for path, m in sharded.items()
            if not any(inner is not m and is_unit_of_fsdp(inner) for inner in m.modules())
        }
        if not units:
            raise PlacematError(
                "no units: no module inside of the model was sharded by fully_shard(). Remedy: name the modules to "
                'plan with units=["blocks.*"].'
            )
    else:
        matching = {path: m for path, m in named.items() if any(fnmatchcase(path, p) for p in patterns)}
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in named):
                raise ConstraintError(
                    f"units={pattern!r} matches no module. Remedy: the path of one, with * as a wildcard; there are, "
                    f"among others: {', '.join(list(named)[:8]) or 'none'}."
                )
        units = {path: m for path, m in matching.items() if not any(path.startswith(f"{o}.") for o in matching)}
    for (outer, module), (inner, other) in permutations(units.items(), 2):
        if other is not module and any(m is other for m in module.modules()):
            raise ConstraintError(f"the unit {inner} is inside the unit {outer}. Remedy: name the outer one alone.")
    for path, module in units.items():
        if handle_of(module) is not None:
            raise PlacematError(f"{path} is optimized already. Remedy: placemat.restore() on it first.")
    return units


@dataclass(frozen=True)
class _Chosen:
    """The answer for one unit, as `build_plan` takes it."""

    schedule: Schedule
    status: str
    family: str
    lower_bound_seconds: float
    solve_seconds: float


@dataclass
class UnitPlanning:
    """Plans the units of one model.

    Args:
        units: path -> module.
        planner: for the units, without a budget.
        trials: runs the whole step.
        budget_bytes: of the whole step.
        ranks: who plans together; None for a process alone.
    """

    units: Mapping[str, nn.Module]
    planner: Planner
    trials: TrialSteps
    budget_bytes: int
    ranks: Ranks | None

    def run(self) -> tuple[UnitPlans, list[UnitTrial]]:
        """Plans and the units that have them, of which none is installed yet.

        Raises:
            BudgetTooSmall, CaptureError, UnsupportedFeature, SolverFailed, RanksDisagree: see `optimize_units`.
        """
        of_unit = replace(self.planner, time_limit_s=_SHARE_OF_TIME * self.planner.time_limit_s, progress=None)
        curves: Curves = {}
        trials = [UnitTrial(path, m, of_unit, curves, self.trials.say_mark) for path, m in self.units.items()]
        with shown(self.planner.progress), units_watched(trials):
            self.planner.say("running trial steps")
            self.trials.run()
            ran = [trial for trial in trials if trial.key is not None]
            least = [curves[trial.key].least for trial in ran if trial.key is not None]
            twice = [self._look(ran, curves, least)[0] for _ in range(2)]
            return self._fitting(_most(twice), ran, curves), ran

    def _fitting(self, step: UnitStep, ran: Sequence[UnitTrial], curves: Curves) -> UnitPlans:
        """Choose, run steps with the choice, and choose again for what was seen, until it fits."""
        for _ in range(_MOST_ROUNDS):
            plans = self._agreed(step, ran, curves)
            for trial in ran:
                trial.handle = trial.make_handle(plans.plans[trial.path])
            self.planner.say("running steps with the plans")
            self.trials.run()
            taken = [_point(plans.figures[trial.path]) for trial in ran]
            seen, measured = self._look(ran, curves, taken)
            step = _most([step, seen])
            predicted, moment = step.peak(taken)
            if predicted <= self.budget_bytes:
                return replace(
                    plans,
                    predicted_peak_bytes=predicted,
                    peak_place=moment.place,
                    measured_peak_bytes=measured,
                    outside_bytes=max(m.outside_bytes for m in step.moments),
                )
        raise UnsupportedFeature(
            f"steps with the plans take up to {predicted} bytes ({format_bytes(predicted)}), more than the budget of "
            f"{self.budget_bytes}, in {moment.place}, and after {_MOST_ROUNDS} choices still more than steps before: "
            "what is beside the units changes from step to step. Remedy: "
            f"reserved_bytes={predicted - self.budget_bytes} or more, for what comes and goes."
        )

    def _look(self, ran: Sequence[UnitTrial], curves: Curves, taken: Sequence[UnitPoint]) -> tuple[UnitStep, int]:
        """Trace a step under schedules with these prices: what it has beside them, and its peak; on every rank the
        same, with the most that any of them has."""
        intervals, start_bytes = self.trials.traced()
        points = {trial.path: point for trial, point in zip(ran, taken, strict=True)}
        calls, moments = read_moments(intervals, start_bytes, points)
        number = {trial.path: i for i, trial in enumerate(ran)}
        order = list(curves)
        step = UnitStep(
            tuple(number[path] for path in calls),
            tuple(order.index(trial.key) for trial in ran if trial.key is not None),
            tuple(moments),
        )
        measured = start_bytes + max(interval.peak_bytes for interval in intervals)
        return self._of_all_ranks(step, measured, [repr(key) for key in order])

    def _of_all_ranks(self, step: UnitStep, measured: int, keys: Sequence[str]) -> tuple[UnitStep, int]:
        if self.ranks is None:
            return step, measured
        said = self.ranks.all_say((step, measured, keys))
        shapes = {
            rank: (s.unit_of_call, s.curve_of_unit, [(m.holding, m.running) for m in s.moments], k)
            for rank, (s, _, k) in said.items()
        }
        first = self.ranks.ranks[0]
        if others := [rank for rank, shape in shapes.items() if shape != shapes[first]]:
            raise RanksDisagree(
                f"the units of ranks {', '.join(map(str, others))} run in another order than those of rank {first}, or "
                "have other graphs. Remedy: build the same model, and pass inputs of the same shapes, on every rank."
            )
        return _most([s for s, _, _ in said.values()]), max(m for _, m, _ in said.values())

    def _agreed(self, step: UnitStep, ran: Sequence[UnitTrial], curves: Curves) -> UnitPlans:
        """The first rank's plans; of a process alone its own."""
        if self.ranks is None:
            return self._planned(step, ran, curves)
        answer: Any = None
        if self.ranks.is_first:
            made = attempt(lambda: self._planned(step, ran, curves))
            answer = made if isinstance(made, PlacematError) else _as_text(made)
        answer = self.ranks.first_says(answer)
        if isinstance(answer, PlacematError):
            raise answer
        plans, texts = answer
        own = {trial.path: trial.identity for trial in ran}
        read = {}
        for path, text in texts.items():
            plan = Plan.from_text(text, f"the plan of rank {self.ranks.ranks[0]} for {path}")
            identity = own[path]
            assert identity is not None
            read[path] = replace(plan, module_digest=identity.module_digest, input_digest=identity.input_digest)
        return replace(plans, plans=read)

    def _planned(self, step: UnitStep, ran: Sequence[UnitTrial], curves: Curves) -> UnitPlans:
        """Search, and build the plans."""
        self.planner.say(f"solving for {len(ran)} units, of {len(curves)} kinds")
        kinds = list(curves.values())
        search = UnitSearch(step, kinds, self.planner.time_limit_s, self.planner.gap, self.planner.say)
        choice = search.best(self.budget_bytes)
        if choice is None:
            raise self._too_small(*search.smallest())
        everything, _ = step.peak([kinds[kind].everything for kind in step.curve_of_unit])
        plans, figures = {}, {}
        for unit, (trial, point) in enumerate(zip(ran, choice.points, strict=True)):
            curve = kinds[step.curve_of_unit[unit]]
            assert point.schedule is not None
            bound = curve.least_seconds_of(point)
            status = "optimal" if choice.is_optimal else "feasible"
            chosen = _Chosen(point.schedule, status, curve.family, bound, choice.solve_seconds)
            plans[trial.path] = trial.plan(chosen, curve.stages)
            figures[trial.path] = _figures(point, curve.stages.costs.step_s, step.unit_of_call.count(unit))
        return self._result(plans, figures, choice, step, everything, kinds[0].family)

    def _result(
        self,
        plans: Mapping[str, Plan],
        figures: Mapping[str, UnitFigures],
        choice: UnitChoice,
        step: UnitStep,
        everything: int,
        family: str,
    ) -> UnitPlans:
        quiet = [path for path in self.units if path not in plans]
        notes = [f"{path} ran without gradients, and is left as it is" for path in quiet]
        notes += dict.fromkeys(note for plan in plans.values() for note in plan.notes)
        return UnitPlans(
            plans=plans,
            figures=figures,
            budget_bytes=self.budget_bytes,
            predicted_peak_bytes=choice.peak_bytes,
            peak_place=choice.peak_place,
            measured_peak_bytes=0,
            keep_everything_bytes=everything,
            outside_bytes=max(moment.outside_bytes for moment in step.moments),
            recompute_seconds=choice.recompute_seconds,
            lower_bound_seconds=choice.lower_bound_seconds,
            is_optimal=choice.is_optimal,
            family=family,
            solve_seconds=choice.solve_seconds,
            notes=tuple(notes),
        )

    def _too_small(self, least_bytes: int, moment: Moment) -> BudgetTooSmall:
        return BudgetTooSmall(
            f"budget {self.budget_bytes} bytes ({format_bytes(self.budget_bytes)}) is too small for this step: the "
            f"least that was found is {least_bytes} bytes ({format_bytes(least_bytes)}), in {moment.place}, where "
            f"{format_bytes(moment.outside_bytes)} are not the units'. Remedy: that many bytes, a smaller batch, or "
            "more of the model in units.",
            minimum_budget_bytes=least_bytes,
            budget_bytes=self.budget_bytes,
            breakdown={"outside of the units": moment.outside_bytes, "units": least_bytes - moment.outside_bytes},
            binding_op=moment.place,
            source=None,
        )


def _figures(point: UnitPoint, seconds: float, num_calls: int) -> UnitFigures:
    return UnitFigures(
        point.kept_bytes, point.forward_bytes, point.backward_bytes, point.recompute_seconds, seconds, num_calls
    )


def _point(figures: UnitFigures) -> UnitPoint:
    return UnitPoint(figures.kept_bytes, figures.forward_bytes, figures.backward_bytes, figures.recompute_seconds, None)


def _most(steps: Sequence[UnitStep]) -> UnitStep:
    """The same step with the most that was seen beside the units at each moment.

    Raises:
        UnsupportedFeature: the units of one ran in another order.
    """
    if len({(s.unit_of_call, tuple((m.holding, m.running) for m in s.moments)) for s in steps}) > 1:
        raise UnsupportedFeature(
            "the units run in another order from one step to the next. Remedy: inputs and a model whose forward "
            "does the same every time."
        )
    same = zip(*(s.moments for s in steps), strict=True)
    return replace(steps[0], moments=tuple(max(each, key=lambda moment: moment.outside_bytes) for each in same))


def _as_text(plans: UnitPlans) -> tuple[UnitPlans, dict[str, str]]:
    """What is sent to other ranks."""
    return replace(plans, plans={}), {path: plan.to_text() for path, plan in plans.plans.items()}


def parse_units(units: Iterable[str] | None) -> tuple[str, ...] | None:
    """The patterns of `units=`.

    Raises:
        ConstraintError: it is no list of texts.
    """
    if units is None:
        return None
    given = (units,) if isinstance(units, str) else tuple(units)
    if not given or not all(isinstance(unit, str) for unit in given):
        raise ConstraintError(f"units= takes paths of modules, with * as a wildcard; got {units!r}.")
    return given
