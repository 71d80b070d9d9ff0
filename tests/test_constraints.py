"""keep= and recompute=: what they match, what they refuse, and that plans, schedules and training steps obey them."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import placemat
from placemat import Compute, ConstraintError, Free, InvalidSchedule, Problem, Schedule
from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.replay import replay
from placemat.schedule import canonical
from placemat.simulate import simulate
from placemat.solve import solve
from tests.bruteforce import free_optimum
from tests.instances import random_problem, training_chain
from tests.models import transformer
from tests.steps import FreeOfWorkspace, make_step, run_step


def held_in_backward(plan: placemat.Plan) -> dict[str, bool]:
    """Value -> kept, of the forward values that a plan decides about."""
    return {d.value: d.kept for d in plan.decisions if d.phase == "forward"}


def droppable(problem: Problem) -> list[int]:
    assert problem.border is not None
    read = problem.ops[problem.border].inputs
    return [
        v
        for v, value in enumerate(problem.values)
        if value.producer < problem.border
        and not value.pinned
        and problem.ops[value.producer].recomputable
        and v not in read
    ]


def with_dropped(seed: int, num_ops: int = 8) -> Problem:
    """A random problem in which every second value that may be dropped must be."""
    problem = random_problem(seed, num_ops, has_border=True)
    return replace(problem, dropped=frozenset(droppable(problem)[::2]))


# --------------------------------------------------------------------------------------------------- the problem's rule


def test_the_referee_rejects_a_dropped_value_at_the_border() -> None:
    chain = training_chain(3)
    problem = replace(chain, dropped=frozenset({0}))
    assert problem.border == 3
    with pytest.raises(InvalidSchedule, match=r"value 0 \(layer0.0\) is resident at the border"):
        simulate(problem, save_all(chain))
    # Before the border it may be there, and again after it.
    assert simulate(problem, canonical(problem, [0, 1, 2, 3, 0, 4, 5])).recompute_seconds == 1.0
    lazy = [Compute(0), Compute(1), Compute(2), Compute(3), Free(0), Compute(0), Compute(4), Compute(5)]
    with pytest.raises(InvalidSchedule, match="resident at the border"):
        simulate(problem, Schedule(tuple(lazy)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropped": frozenset({99})}, "names value 99"),
        ({"border": None}, "`border` is None"),
        ({"border": 6}, "`border` is 6"),
        ({"border": 0}, "not before the border"),
        ({"dropped": frozenset({4})}, "at the border reads it"),
        ({"dropped": frozenset({6})}, "not before the border"),
    ],
)
def test_dropped_values_are_checked(change: dict[str, object], message: str) -> None:
    problem = replace(training_chain(3), dropped=frozenset({0}))
    with pytest.raises(ValueError, match=message):
        replace(problem, **change)


def test_dropped_values_must_be_recomputable_and_not_pinned() -> None:
    problem = training_chain(3)
    fixed = replace(problem, ops=(replace(problem.ops[0], recomputable=False), *problem.ops[1:]))
    with pytest.raises(ValueError, match="not recomputable"):
        replace(fixed, dropped=frozenset({0}))
    pinned = replace(problem, values=(replace(problem.values[0], pinned=True), *problem.values[1:]))
    with pytest.raises(ValueError, match="is pinned"):
        replace(pinned, dropped=frozenset({0}))


def test_save_all_recomputes_what_must_be_and_no_more() -> None:
    problem = replace(training_chain(6), dropped=frozenset({0, 1, 4}))
    assert save_all(problem).recomputes == (2, 0)


@pytest.mark.parametrize("seed", range(30))
def test_baselines_and_replays_obey(seed: int) -> None:
    problem = with_dropped(seed)
    assert problem.border is not None
    least = simulate(problem, save_all(problem)).recompute_seconds
    schedules = [recompute_all(problem), chen_sqrt_n(problem)]
    for cut in (problem.border - 1, problem.border, problem.border + 1):
        schedules += [replay(problem, range(len(problem.values)), cut), replay(problem, (), cut)]
    assert all(simulate(problem, schedule).recompute_seconds >= least for schedule in schedules)


@pytest.mark.parametrize("seed", range(30))
def test_solver_obeys_and_is_no_worse_than_the_baselines(seed: int) -> None:
    problem = with_dropped(seed)
    for baseline in (save_all, recompute_all):
        result = simulate(problem, baseline(problem))
        solved = solve(problem, result.peak_bytes, gap=0.0)
        assert solved.simulation == simulate(problem, solved.schedule)  # the referee's rule holds
        assert solved.objective_seconds <= result.recompute_seconds
    assert solved.objective_seconds >= simulate(problem, save_all(problem)).recompute_seconds


@pytest.mark.parametrize("seed", range(12))
def test_solver_lies_between_the_free_optimum_and_two_phases(seed: int) -> None:
    """Enumerated: every op at most once after the border, at any step."""
    problem = with_dropped(seed, 6)
    assert problem.border is not None
    again = [o for o in range(problem.border) if problem.ops[o].recomputable]
    costs: dict[int, float] = {}
    for steps in itertools.product([None, *range(problem.border + 1, problem.num_steps)], repeat=len(again)):
        computes: list[int] = []
        for t in range(problem.num_steps):
            computes += [*(o for o, step in zip(again, steps, strict=True) if step == t), t]
        try:
            result = simulate(problem, canonical(problem, computes))
        except InvalidSchedule:
            continue  # it holds what must be dropped
        costs[result.peak_bytes] = min(result.recompute_seconds, costs.get(result.peak_bytes, math.inf))
    for budget_bytes in sorted(costs):
        solved = solve(problem, budget_bytes, gap=0.0)
        assert solved.objective_seconds <= min(cost for peak, cost in costs.items() if peak <= budget_bytes) + 1e-9
        assert solved.objective_seconds >= free_optimum(problem, budget_bytes) - 1e-9
        assert solved.lower_bound_seconds <= solved.objective_seconds


def test_an_unconstrained_save_all_has_the_bound_as_its_cost() -> None:
    problem = replace(training_chain(6), dropped=frozenset({0, 1, 4}))
    solved = solve(problem, 10**6)
    assert solved.objective_seconds == solved.lower_bound_seconds == 2.0
    assert solved.status == "optimal"


# ------------------------------------------------------------------------------------------------------------- matching


def planned(name: str = "attention", fraction: float = 0.5, **options) -> placemat.Plan:
    model, args = make_step(name)
    return placemat.plan(
        model, None, args, budget_fraction=fraction, cost_model=FreeOfWorkspace(), time_limit_s=5, **options
    )


def test_keep_by_module_is_never_run_again() -> None:
    free = planned(fraction=0.0)
    assert any(d.recomputed for d in free.decisions if d.module_path == "norm")
    plan = planned(fraction=0.0, keep=["norm"])
    inside = [d for d in plan.decisions if d.module_path == "norm"]
    assert inside
    assert not any(d.recomputed for d in inside)
    assert any("keep='norm' was asked for" in d.why for d in inside)
    assert plan.predicted_peak_bytes >= free.predicted_peak_bytes


@pytest.mark.parametrize("entry", ["aten._softmax", "aten::_softmax", "aten._softmax.default", torch.ops.aten._softmax])
def test_recompute_by_operator_is_not_held_whatever_the_budget(entry) -> None:
    plan = planned(fraction=1.0, recompute=[entry])
    softmaxes = [d for d in plan.decisions if d.target == "aten._softmax.default"]
    assert len(softmaxes) == 2
    assert not any(d.kept for d in softmaxes)
    assert all(d.recomputed == 1 for d in softmaxes)
    assert all("recompute='aten._softmax" in d.why for d in softmaxes)
    assert [d.op for d in plan.decisions if d.recomputed] == [d.op for d in softmaxes]


def test_recompute_by_the_name_of_one_op() -> None:
    plan = planned(fraction=1.0, recompute=["_softmax_1"])
    assert [d.op for d in plan.decisions if d.recomputed] == ["_softmax_1"]


@pytest.mark.slow
def test_wildcards_and_modules_inside_modules() -> None:
    work = transformer(layers=3)
    options = {"loss_fn": work.loss_fn, "budget_fraction": 1.0, "time_limit_s": 5, "cost_model": FreeOfWorkspace()}
    plan = placemat.plan(work.model, None, work.args, recompute=["blocks.*.mlp"], **options)
    recomputed = {d.module_path for d in plan.decisions if d.recomputed}
    assert recomputed == {f"blocks.{i}.mlp.{j}" for i in range(3) for j in (0, 1)}
    # The last linear layer's result goes into a dropout, whose backward needs the mask alone.
    assert not any(d.kept for d in plan.decisions if d.module_path.startswith(("blocks.0.mlp", "blocks.2.mlp")))
    everything = placemat.plan(work.model, None, work.args, keep=["*"], **{**options, "budget_fraction": 0.0})
    assert everything.schedule.recomputes == ()


def test_a_module_pattern_leaves_out_what_the_caller_holds() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    plan = placemat.plan(model, "1 GiB", (torch.randn(4, 8),), recompute=["*"])
    assert [d.op for d in plan.decisions if d.recomputed] == ["addmm", "tanh"]
    assert not plan.runs_original  # the original forward would hold everything
    with pytest.raises(ConstraintError, match=r"recompute='3' asks for tanh_1 .*outputs of the model"):
        placemat.plan(model, "1 GiB", (torch.randn(4, 8),), recompute=["3"])


# ------------------------------------------------------------------------------------------------------------ refusals


def test_an_entry_that_matches_nothing_gets_suggestions() -> None:
    with pytest.raises(ConstraintError, match=r"keep='nrom' matches no op .* norm"):
        planned(keep=["nrom"])
    with pytest.raises(ConstraintError, match=r"recompute='aten.softmax' matches no op .*aten._softmax"):
        planned(recompute=["norm", "aten.softmax"])


def test_contradictions_name_the_op_and_both_entries() -> None:
    with pytest.raises(ConstraintError) as caught:
        planned(keep=["norm"], recompute=["aten.native_layer_norm"])
    for part in ("keep='norm'", "recompute='aten.native_layer_norm'", "native_layer_norm (", "in norm", "steps.py:"):
        assert part in str(caught.value)


@pytest.mark.parametrize("entries", ["norm", [3], [""], [None], 7])
def test_entries_that_are_no_names_are_refused(entries) -> None:
    with pytest.raises(ConstraintError, match="keep= "):
        planned(keep=entries)


def test_a_keep_that_leaves_too_little_room_is_named() -> None:
    model, args = make_step("attention")
    options = {"cost_model": FreeOfWorkspace(), "time_limit_s": 5}
    free = placemat.minimum_budget(model, args, **options)
    bound = placemat.minimum_budget(model, args, keep=["qkv"], **options)
    assert bound > free
    with pytest.raises(placemat.BudgetTooSmall, match=r"smallest budget with keep=\['qkv'\] is .*entries in keep="):
        placemat.plan(model, free, args, keep=["qkv"], **options)


@torch.library.custom_op("placemat_tests::shifted_sine", mutates_args=())
def shifted_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x + 1)


@shifted_sine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save_output(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    (output,) = ctx.saved_tensors
    return gradient * output


shifted_sine.register_autograd(_backward, setup_context=_save_output)


class Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = shifted_sine(self.count)
        self.count.add_(1)
        return (shifted_sine(self.body(x)) * y).pow(2).sum()


def test_an_operator_that_is_not_known_to_be_pure_is_recomputed_if_it_is_named() -> None:
    model, args = nn.Sequential(nn.Linear(16, 16), _Apply(shifted_sine), nn.Linear(16, 1)), (torch.randn(64, 16),)
    expected = run_step(model, args, loss_fn=torch.sum)
    plan = placemat.plan(
        model, None, args, budget_fraction=1.0, recompute=["placemat_tests::shifted_sine"], time_limit_s=5
    )
    (sine,) = [d for d in plan.decisions if "shifted_sine" in d.target]
    assert sine.recomputed == 1
    assert not sine.kept
    placemat.apply(model, plan)
    assert run_step(model, args, loss_fn=torch.sum).same_as(expected)
    with pytest.raises(ConstraintError, match="not known to be pure"):  # a module pattern declares nothing
        placemat.plan(placemat.restore(model), None, args, budget_fraction=1.0, recompute=["1"], time_limit_s=5)


class _Apply(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_an_operator_that_reads_what_the_forward_overwrites_is_refused_even_if_named() -> None:
    with pytest.raises(ConstraintError, match="reads input count, which the forward overwrites"):
        placemat.plan(Sines(), "1 GiB", (torch.randn(4, 16),), recompute=["placemat_tests::shifted_sine"])


def test_a_fact_about_an_operator_is_no_matter_of_opinion() -> None:
    model, args = make_step("convolutions")
    with pytest.raises(ConstraintError, match="num_batches_tracked, which the forward overwrites"):
        placemat.plan(model, "1 GiB", args, recompute=["aten.add.Tensor"])


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("fraction", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("branches", {"recompute": ["left"], "keep": ["right.*"]}),
        pytest.param(
            "attention", {"recompute": ["aten.native_dropout", "norm"], "keep": ["qkv"]}, marks=pytest.mark.slow
        ),
        pytest.param("attention", {"recompute": ["*"]}, marks=pytest.mark.slow),
        ("convolutions", {"recompute": ["down", "mid.1"]}),
    ],
)
def test_constrained_steps_train_as_before(name: str, options: dict[str, list[str]], fraction: float) -> None:
    model, args = make_step(name)
    expected = run_step(model, args)
    placemat.optimize(model, None, args, budget_fraction=fraction, **options)
    assert run_step(model, args).same_as(expected)
    assert model.plan.predicted_peak_bytes <= model.plan.budget_bytes
    assert model.plan.schedule.recomputes != ()


def test_constraints_travel_with_plans_and_modules(tmp_path) -> None:
    model, args = make_step("attention")
    expected = run_step(model, args)
    placemat.optimize(model, None, args, budget_fraction=1.0, time_limit_s=5, recompute=["norm"], keep=["qkv"])
    assert model.plan.options["recompute"] == ["norm"]
    assert "\nkeep         qkv\nrecompute    norm\n" in model.plan.summary()
    model.plan.save(tmp_path / "plan.json")
    loaded = placemat.Plan.load(tmp_path / "plan.json")
    assert loaded == model.plan
    other, _ = make_step("attention")
    assert run_step(placemat.apply(other, loaded), args).same_as(expected)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    run_step(twin, (args[0][:1],))  # planned again, for another shape
    assert twin.plan.fingerprint != model.plan.fingerprint
    of_the_shape = {"call": None}
    assert {**twin.plan.options, **of_the_shape} == {**model.plan.options, **of_the_shape}
    assert not any(kept for value, kept in held_in_backward(twin.plan).items() if value.startswith("native_layer_norm"))
