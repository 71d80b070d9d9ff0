"""One plan for all ranks of a job, and what data parallelism takes beside it: `placemat.distributed`.

`placemat.optimize`, `plan` and `apply` never communicate, whatever process group exists: they may be called on one rank
alone. The functions here do, and have to be called on every rank of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from placemat import api
from placemat.call_differences import call_difference
from placemat.calls import describe_call, module_digest
from placemat.checkpointing import refuse_checkpointed
from placemat.constraints import parse_patterns
from placemat.cost_models.custom import CostModelLike
from placemat.graph.allocator import GRANULARITY_BYTES, allocated_bytes
from placemat.graph.capture import capture
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import PlacematError, RanksDisagree
from placemat.parallel_wrappers import refuse_parallel
from placemat.plan import Plan
from placemat.progress import Progress
from placemat.ranks import Ranks, attempt, conversation
from placemat.unit_planning import UnitPlanning, find_units, parse_units
from placemat.unit_plans import UnitPlans
from placemat.unit_trial import TrialSteps
from placemat.units import parse_bytes

_MIB = 1 << 20


def plan(
    model: nn.Module,
    budget_bytes: int | str | None = None,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> Plan:
    """The plan of the group's first rank, on every rank; `placemat.apply(model, plan)` lets the model run it.

    Ranks measure different seconds, so plans made on each would differ. The first rank plans; the others capture their
    own call meanwhile, receive the text of the plan file, and say whether it fits. All return the same plan, or all
    raise: an error of the first rank's planning is raised on every rank with its type and attributes.

    Args:
        model, budget_bytes, example_args, example_kwargs, options: as for `placemat.plan`, the same on every rank; the
            model is the one inside of DistributedDataParallel.
        group: a group of torch.distributed; None is the default one.
        timeout_s: how long a rank waits for the others: longer than planning takes (`time_limit_s`, and measuring).

    Raises:
        RanksDisagree: model or call of a rank are not those of the first one, or a rank did not answer in time.
        PlacematError: as `placemat.plan`, on every rank; there is no process group.
    """
    mine: _Own | PlacematError | None
    made: str | PlacematError | None
    with conversation(group, timeout_s) as ranks:
        if ranks.is_first:
            mine = None
            made = attempt(lambda: api.plan(model, budget_bytes, example_args, example_kwargs, **options).to_text())
        else:
            keep_eager = options.get("keep_eager", ())
            mine = attempt(lambda: _Own(model, example_args or (), example_kwargs or {}, keep_eager))
            made = None
        answer = ranks.first_says(made)
        if isinstance(answer, PlacematError):
            raise answer if ranks.is_first else _from_first(answer, ranks)
        assert isinstance(answer, str)
        text = answer
        shared = attempt(lambda: Plan.from_text(text, f"the plan of rank {ranks.ranks[0]}"))
        complaints = ranks.all_say(_complaint(mine, shared))
        if any(complaints.values()):
            said = "; ".join(f"rank {rank}: {text}" for rank, text in complaints.items() if text)
            raise RanksDisagree(
                f"the plan of rank {ranks.ranks[0]} does not fit on every rank. {said}. Remedy: build the same model, "
                "and pass example inputs of the same shapes and modes, on every rank."
            )
        assert isinstance(shared, Plan), "a rank without a plan has complained"
        return shared


def optimize_units(
    model: nn.Module,
    budget_bytes: int | str,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    units: Iterable[str] | None = None,
    group: Any = None,
    timeout_s: float = 600.0,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    cost_model: CostModelLike | None = None,
    reserved_bytes: int | str = 0,
    accumulate_grad: bool = False,
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    progress: bool | Progress | None = None,
) -> UnitPlans:
    """Plan the units of a model under one budget for its whole step, in place: for models that are not one graph.

    Units are modules that the forward calls one after the other: those that `fully_shard` (FSDP2) was called on, or any
    that are named. Each gets a plan, and they are chosen together: so that the step's peak, with what all units keep,
    what each of them runs with and what is beside them, stays within the budget at the least recomputation in all.
    What is beside the units (other layers, sharded and gathered parameters, gradients, buffers of FSDP or DDP, what
    autograd holds between them) is not captured but measured: this function *runs* training steps, three with each unit
    at its smallest plan and two with the final plans, whose peak has to be within the budget; if it is not, the choice
    is made again for what was seen. Model, gradients and random state are as before afterwards.

    Parameters are gathered by FSDP's hooks around a unit, outside of what a plan runs, which never repeats it.

    Args:
        model: as it is trained: sharded, or wrapped in DistributedDataParallel, before.
        budget_bytes: for the whole step; an int, or text such as "8 GiB".
        example_args, example_kwargs: one training call, which is run.
        units: paths of modules, * is a wildcard; of those inside another that matches, the outer one counts. None: the
            innermost modules that `fully_shard` was called on.
        group, timeout_s: if there is a process group, all of its ranks make this call; the first one plans, for the
            most that any rank has beside its units. `timeout_s` is how long they wait for each other.
        loss_fn: from the model's output to the loss, when it is outside of the model.
        reserved_bytes: what exists beside the step: optimizer state, DDP's buckets (`ddp_bucket_bytes`). On CUDA, whose
            allocator counts, only what does not exist when this function is called.
        cost_model, accumulate_grad, time_limit_s, gap, progress: as for `placemat.optimize`; `time_limit_s` is for the
            choice, after the trial steps.

    Returns:
        The plans, and what is predicted, measured and proven of the step; `print` it. `placemat.restore` on a unit
        takes its plan away.

    Raises:
        BudgetTooSmall: with the least peak that was found, and where in the step it is.
        CaptureError, UnsupportedFeature: a unit cannot be captured; a unit runs inside another, or none does; a step
            with the plans took more than the budget.
        ConstraintError: `units` matches no module, or modules inside each other.
        RanksDisagree: ranks have other units, or one does not answer.
        PlacematError: there are no units, one of them is optimized, `apply_checkpointing` wrapped something in the
            model, or a profiler is running.
    """
    if not isinstance(model, nn.Module):
        raise PlacematError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    if example_args is None and example_kwargs is None:
        raise PlacematError("optimize_units() needs example inputs. Remedy: pass the arguments of one training call.")
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    found = find_units(model, parse_units(units))
    refuse_checkpointed(model)
    planner = api.make_planner(
        next(iter(found.values())),
        args,
        kwargs,
        budget_bytes=budget_bytes,
        cost_model=cost_model,
        accumulate_grad=accumulate_grad,
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
    )
    assert planner.budget_bytes is not None
    reserved = parse_bytes(reserved_bytes, "reserved_bytes", minimum=0)
    trials = TrialSteps(model, args, kwargs, loss_fn, accumulate_grad, reserved)
    has_group = dist.is_available() and dist.is_initialized()
    with conversation(group, timeout_s) if has_group else nullcontext() as ranks:
        plans, planned = UnitPlanning(found, planner, trials, planner.budget_bytes, ranks).run()
    for trial in planned:
        handle = trial.make_handle(plans.plans[trial.path])
        handle.add_plan(plans.plans[trial.path])
        api.install(trial.module, handle)
    return plans


def agree(plan: Plan, *, group: Any = None, timeout_s: float = 60.0) -> str:
    """Check that every rank of a group has the same plan, by `Plan.digest`; returns the digest.

    For plans that each rank loaded from a file, or made on its first training call (`model.plan`).

    Args:
        plan: of this rank.
        group, timeout_s: as for `plan`.

    Raises:
        RanksDisagree: on every rank, with who has which plan; or a rank did not answer in time.
        PlacematError: `plan` is none, or there is no process group.
    """
    with conversation(group, timeout_s) as ranks:
        words = ranks.all_say((plan.digest, repr(plan)) if isinstance(plan, Plan) else ("", repr(plan)))
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, (digest, _) in words.items():
        holders[digest].append(rank)
    if len(holders) > 1 or "" in holders:
        said = "; ".join(
            f"rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {digest[:12] or 'no plan'}, {words[r[0]][1]}"
            for digest, r in holders.items()
        )
        raise RanksDisagree(
            f"the ranks do not have one plan. {said}. Remedy: placemat.distributed.plan() on every rank, or load the "
            "same file on each."
        )
    return plan.digest


def ddp_bucket_bytes(
    model: nn.Module,
    *,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
) -> int:
    """Bytes that DistributedDataParallel holds beside the step, to be part of `reserved_bytes=`.

    Every gradient has a place in a bucket, a flat tensor of one dtype without gaps: sum of numel * itemsize over the
    parameters that require a gradient (`Reducer::initialize_buckets`, torch/csrc/distributed/c10d/reducer.cpp). How
    they are grouped, which changes after the first step, decides only how often an allocator rounds up: a bucket of a
    dtype is closed when it has 1 MiB, the next ones when they have `bucket_cap_mb`, or 25 MiB
    (`compute_bucket_assignment_by_size` in the same file, `_DEFAULT_FIRST_BUCKET_BYTES`), so that n bytes are in at
    most n // cap + 2 buckets. On the CPU nothing is rounded. To find unused parameters, and for a static graph,
    there is an int32 for each parameter on the host, and one on the device.

    It is the same with `gradient_as_bucket_view=True`: a planned backward makes all gradients before DDP copies the
    first one into its bucket. Not in it: what gloo or NCCL allocate for themselves, communication hooks, and the copy
    of the outputs that DDP makes with `find_unused_parameters=True` and in the first step of a static graph.

    Args:
        model: the module that is wrapped, or the wrapper.
        bucket_cap_mb, find_unused_parameters, static_graph: as for DistributedDataParallel.

    Raises:
        PlacematError: the cap is not positive.
    """
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise PlacematError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}.")
    cap_bytes = max(1, int((25 if bucket_cap_mb is None else bucket_cap_mb) * _MIB))
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes: dict[tuple[torch.dtype, str], list[int]] = defaultdict(list)
    for p in trained:
        sizes[p.dtype, p.device.type].append(p.numel() * p.element_size())
    total_bytes = 0
    for (_, device), of_parameters in sizes.items():
        nbytes = sum(of_parameters)
        most_buckets = min(len(of_parameters), nbytes // cap_bytes + 2)
        total_bytes += nbytes + most_buckets * (GRANULARITY_BYTES.get(device, 1) - 1)
    if trained and (find_unused_parameters or static_graph):
        device = trained[0].device.type
        map_bytes = 4 * len(trained)
        total_bytes += allocated_bytes(map_bytes, device) + (map_bytes if device == "cpu" else 0)
    return total_bytes


class _Own:
    """Model and call of a rank that does not plan."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], keep_eager: Any) -> None:
        refuse_parallel(model, is_called=True)
        forward = api.original_forward(model)
        args, kwargs = tuple(args), dict(kwargs)
        kept = KeptModules.find(model, parse_patterns("keep_eager", keep_eager))
        self.module_digest = module_digest(model)
        self.call = describe_call(model, forward, args, kwargs)
        self.fingerprint = capture(forward, args, kwargs, kept).fingerprint


def _complaint(mine: _Own | PlacematError | None, shared: Plan | PlacematError) -> str:
    """Why the plan does not fit here; "" if it does."""
    if isinstance(shared, PlacematError):
        return str(shared)
    if mine is None:
        return ""
    if isinstance(mine, PlacematError):
        return str(mine)
    if mine.module_digest != shared.module_digest:
        return "the model has other parameters or buffers"
    if mine.fingerprint != shared.fingerprint:
        return f"the forward is another graph. {call_difference([shared.options['call']], mine.call)}".rstrip(". ")
    return ""


def _from_first(error: PlacematError, ranks: Ranks) -> PlacematError:
    error.args = (f"on rank {ranks.ranks[0]}, which plans for all: {error}",)
    return error
