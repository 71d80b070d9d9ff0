"""One budget for a step whose blocks are planned one by one: in one process, and sharded by FSDP2 over two."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import placemat
from placemat.graph.static import static_bytes
from placemat.installed import handle_of
from placemat.replay import may_be_dropped, replay
from placemat.training_state import rng_states
from placemat.unit_choice import Moment, UnitSearch, UnitStep
from placemat.unit_curve import UnitCurve
from placemat.unit_plans import UnitPlans
from tests.jobs import run_job, same, train
from tests.steps import FreeOfWorkspace, run_step

OPTIONS: dict[str, Any] = {"cost_model": FreeOfWorkspace(), "time_limit_s": 20.0, "progress": False}


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Watched(nn.Module):
    """Blocks between which Python looks at data, so that the whole is no single graph; the last block is another."""

    def __init__(self, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, (2 if i + 1 < depth else 3) * width) for i in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
            if not float(x.detach().abs().amax()) < 1e6:
                raise RuntimeError("diverged")
        return self.head(self.norm(x)).pow(2).mean()


def make() -> tuple[Watched, tuple[Tensor]]:
    torch.manual_seed(0)
    return Watched(), (torch.randn(64, 32),)


def optimize(model: nn.Module, budget: int | str, args: tuple[Any, ...], **options: Any) -> UnitPlans:
    return placemat.distributed.optimize_units(model, budget, args, units=["blocks.*"], **{**OPTIONS, **options})


def peak_of(model: nn.Module, args: tuple[Any, ...]) -> int:
    model.zero_grad()
    step = placemat.measure(lambda: model(*args).backward())
    model.zero_grad()
    return step.peak_bytes + sum(static_bytes(model, args, {}).values())


def test_the_whole_step_stays_in_one_budget_to_the_byte() -> None:
    model, args = make()
    eager = copy.deepcopy(model)
    with pytest.raises(placemat.CaptureError):
        placemat.plan(model, "1 GiB", args, **OPTIONS)
    before = rng_states(), [t.clone() for t in model.state_dict().values()]

    ample = optimize(model, "1 GiB", args)
    assert ample.recompute_seconds == 0
    assert ample.predicted_peak_bytes == ample.keep_everything_bytes == ample.measured_peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(before[1], model.state_dict().values(), strict=True))
    assert torch.equal(before[0]["cpu"], torch.get_rng_state())  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())
    for block in model.blocks:
        placemat.restore(block)

    budget = ample.keep_everything_bytes - ample.figures["blocks.0"].kept_bytes
    plans = optimize(model, budget, args)
    assert 0 < plans.recompute_seconds
    assert plans.is_optimal
    assert plans.predicted_peak_bytes <= budget
    assert run_step(model, args).same_as(run_step(eager, args))
    assert plans.predicted_peak_bytes == plans.measured_peak_bytes == peak_of(model, args)
    assert all(handle_of(block)._backend.runs > 0 for block in model.blocks)
    text = str(plans)
    assert "for the whole step" in text
    assert "Estimated: seconds" in text


@pytest.mark.slow
def test_the_least_that_is_told_is_enough() -> None:
    model, args = make()
    with pytest.raises(placemat.BudgetTooSmall) as caught:
        optimize(model, 1000, args)
    assert "not the units'" in str(caught.value)
    assert not any(handle_of(block) for block in model.blocks)
    plans = optimize(model, caught.value.minimum_budget_bytes, args)
    assert peak_of(model, args) <= caught.value.minimum_budget_bytes == plans.budget_bytes


def test_units_are_named_and_not_planned_twice() -> None:
    model, args = make()
    with pytest.raises(placemat.PlacematError, match="no module inside of the model was sharded"):
        placemat.distributed.optimize_units(model, "1 GiB", args, **OPTIONS)
    with pytest.raises(placemat.ConstraintError, match=r"units='layers.\*' matches no module"):
        placemat.distributed.optimize_units(model, "1 GiB", args, units=["layers.*"], **OPTIONS)
    placemat.optimize(model.blocks[0], "1 GiB", args, **OPTIONS)
    with pytest.raises(placemat.PlacematError, match=r"blocks\.0 is optimized already"):
        optimize(model, "1 GiB", args)


class Twice(nn.Module):
    """Calls one block twice, and has it in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.block = Block(32, 64)
        self.rest = nn.Sequential(nn.Linear(32, 32), self.block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.stem(x))
        if float(x.detach().sum()) == 0.0:
            raise RuntimeError("nothing there")
        return self.rest(x).pow(2).mean()


def test_a_unit_that_is_called_twice_keeps_twice_and_accumulates() -> None:
    torch.manual_seed(0)
    model, args = Twice(), (torch.randn(64, 32),)
    with pytest.raises(placemat.ConstraintError, match=r"the unit block is inside the unit rest"):
        placemat.distributed.optimize_units(model, "1 GiB", args, units=["rest", "block"], **OPTIONS)
    eager = copy.deepcopy(model)
    planning = {**OPTIONS, "units": ["block"], "accumulate_grad": True}
    with pytest.raises(placemat.BudgetTooSmall) as caught:
        placemat.distributed.optimize_units(model, 1000, args, **planning)
    plans = placemat.distributed.optimize_units(model, caught.value.minimum_budget_bytes, args, **planning)
    assert plans.figures["block"].num_calls == 2
    assert plans.recompute_seconds == 2 * plans.figures["block"].recompute_seconds > 0
    assert plans.measured_peak_bytes <= plans.predicted_peak_bytes <= plans.budget_bytes
    assert run_step(model, args).same_as(run_step(eager, args))


def test_a_model_that_runs_no_unit_is_refused() -> None:
    model, args = make()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    with pytest.raises(placemat.UnsupportedFeature, match="no unit ran with gradients"):
        optimize(model, "1 GiB", args)


def curve_of() -> tuple[UnitCurve, list[Any]]:
    """The curve of a small block, and what every set of kept values costs in it."""
    torch.manual_seed(0)
    block, x = Block(8, 16), torch.randn(12, 8, requires_grad=True)
    planner = placemat.api.make_planner(block, (x,), {}, budget_fraction=0.5, **OPTIONS)
    stages = planner.stages(block, block.forward, (x,), {})
    curve = UnitCurve(stages, 10.0, 0.0)
    problem = stages.problem
    droppable = [
        v for v, value in enumerate(problem.values) if value.producer < problem.border and may_be_dropped(problem, v)
    ]
    schedules = (
        replay(problem, set(kept), problem.border)
        for size in range(len(droppable) + 1)
        for kept in itertools.combinations(droppable, size)
    )
    return curve, [curve.priced(schedule) for schedule in schedules]


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_choice_is_the_best_of_all_and_its_bound_holds(share: float) -> None:
    """Three equal units in a chain, against every set of kept values in each."""
    curve, priced = curve_of()
    best: list[Any] = []
    for point in sorted(priced, key=lambda p: (p.recompute_seconds, p.kept_bytes)):
        if not any(b.kept_bytes <= point.kept_bytes and b.backward_bytes <= point.backward_bytes for b in best):
            best.append(point)
    moments = [Moment(f"backward {i}", 1000 * (3 - i), tuple(range(i)), (i, "backward")) for i in range(3)]
    moments += [Moment(f"forward {i}", 500, tuple(range(i)), (i, "forward")) for i in range(3)]
    step = UnitStep((0, 1, 2), (0, 0, 0), tuple(moments))
    peaks = [step.peak([point] * 3)[0] for point in (curve.least, curve.everything)]
    budget = min(peaks) + int(share * (max(peaks) - min(peaks)))
    reference = min(step.seconds(taken) for taken in itertools.product(best, repeat=3) if step.peak(taken)[0] <= budget)
    choice = UnitSearch(step, [curve], 30.0, 0.0, lambda line: None).best(budget)
    assert choice is not None
    assert choice.peak_bytes <= budget
    assert choice.recompute_seconds == pytest.approx(reference)
    assert choice.lower_bound_seconds <= reference + 1e-6
    assert choice.is_optimal


# -- FSDP2, two processes ------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(64, 128) for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


def sharded(**options: Any) -> Any:
    torch.manual_seed(5)
    model: Any = Sharded()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def gathers(step: Callable[[], object]) -> int:
    """How often parameters are gathered while `step` runs."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key == "fsdp::all_gather_copy_in")


def fsdp_units_job(rank: int, low_precision: bool) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    data = [(torch.randn(256, 64, generator=generator),) for _ in range(2)]
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if low_precision else {}
    # Products of 16-bit numbers have workspaces on the CPU, which are measured.
    planning = {**OPTIONS, "cost_model": None if low_precision else FreeOfWorkspace()}
    # A thread of gloo's frees the buffers of a collective sooner or later: room for two of a block.
    planning["reserved_bytes"] = 2 * 4 * sum(p.numel() for p in Block(64, 128).parameters())
    eager, planned = sharded(**options), sharded(**options)

    least: list[int] = []
    try:
        placemat.distributed.optimize_units(planned, 1000, data[0], **planning)
    except placemat.BudgetTooSmall as error:
        least.append(error.minimum_budget_bytes)
    everything = placemat.distributed.optimize_units(planned, "1 GiB", data[0], **planning).keep_everything_bytes
    for block in planned.blocks:
        placemat.restore(block)
    budget = least[0] + (everything - least[0]) // 3
    plans = placemat.distributed.optimize_units(planned, budget, data[0], **planning)
    assert list(plans.plans) == ["blocks.0", "blocks.1", "blocks.2"]
    assert plans.recompute_seconds > 0
    assert plans.measured_peak_bytes <= plans.predicted_peak_bytes <= budget
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, [plan.digest for plan in plans.plans.values()])
    assert digests[0] == digests[1]

    reference = train(eager, eager, data)
    assert same(train(planned, planned, data), reference)
    for block in planned.blocks:
        assert handle_of(block)._backend.runs == len(data)
    of_eager = gathers(lambda: eager(*data[0]).backward())
    assert gathers(lambda: planned(*data[0]).backward()) == of_eager > 0

    planned.zero_grad()
    step = placemat.measure(lambda: planned(*data[0]).backward())
    assert step.peak_bytes + sum(static_bytes(planned, data[0], {}).values()) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("low_precision", [False, True])
def test_fsdp_units_share_a_budget_and_gather_as_often_as_eager(tmp_path: Path, low_precision: bool) -> None:
    run_job(fsdp_units_job, tmp_path, low_precision)
