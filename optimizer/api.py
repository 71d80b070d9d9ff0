"""The public functions that take a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from placemat.calls import module_digest, the_device
from placemat.checkpointing import refuse_checkpointed, remove_checkpointing
from placemat.compilers import EAGER, check_compiler, compiler_for, refuse_compiled
from placemat.constraints import parse_constraints, parse_patterns
from placemat.cost_models import CostModel, default_cost_model
from placemat.cost_models.custom import CostModelLike, as_cost_model
from placemat.frontier import Frontier
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import PlacematError, PlanMismatch
from placemat.handle import Handle
from placemat.installed import ATTRIBUTE, unwrapped_handle_of
from placemat.parallel_wrappers import refuse_parallel
from placemat.pipeline import Planner
from placemat.plan import Plan
from placemat.progress import Progress, make_progress
from placemat.torch_compile import CompilerBackend
from placemat.units import parse_bytes, parse_fraction

Budget = int | str


def optimize(
    model: nn.Module,
    budget_bytes: Budget | None = None,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    budget_fraction: float | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    cost_model: CostModelLike | None = None,
    reserved_bytes: Budget = 0,
    accumulate_grad: bool = False,
    segments: int = 1,
    keep: Iterable[Any] = (),
    recompute: Iterable[Any] = (),
    keep_eager: Iterable[str] = (),
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    progress: bool | Progress | None = None,
    compiler: str = "eager",
) -> nn.Module:
    """Make training steps of `model` fit a budget at the least extra time, in place; returns the same module.

    The budget bounds the peak bytes of live tensor storage on the model's device during one training step (forward,
    loss, backward), everything included: parameters, buffers, inputs, gradients, activations, outputs and their
    gradients, temporaries and operator workspaces, and `reserved_bytes`.

    Args:
        model: trained as before. Its `forward` is replaced on the instance (see `restore`); `model.plan` is the plan.
        budget_bytes: an int, or text such as "8 GiB" or "300 MB".
        example_args, example_kwargs: one training call. Without them the first training call is planned when it comes.
        budget_fraction: instead of budget_bytes: 0 is the smallest budget, 1 the peak without recomputation.
        loss_fn: from the model's output to the loss, when the loss is outside the module: its memory is then planned
            for, and only outputs that it reaches get gradients.
        cost_model: seconds and workspace bytes of ops: `Measured`, `Roofline`, `Recorded`, a function from an op to
            both, or a table of them by operator. By default each distinct op is measured on the present device, alone,
            on synthetic inputs, and once: measurements are kept on disk.
        reserved_bytes: what the graph cannot see: optimizer state, communication buffers, allocator slack.
        accumulate_grad: gradients exist already when a step starts (gradient accumulation).
        segments: in how many parts the backward hands out gradients, at most. In one part they all arrive at its end.
            In more, those of late layers arrive while earlier layers are still to be computed: gradients that are
            accumulated, or used up by hooks, take less memory at once, and reductions overlap with the backward. Parts
            have about equal bytes of gradients.
        keep, recompute: module paths such as "encoder.layer.*.attention" (with the modules inside), operators such as
            "aten.native_dropout", or names of single ops in a plan; * is a wildcard. What matches `keep` never runs
            again: backward finds its results. The results of what matches `recompute` are not held from forward to
            backward, however large the budget. An operator that is not known to be pure counts as pure if `recompute`
            names it.
        keep_eager: paths of modules (* is a wildcard) that run inside the step as they are, with eager's autograd: for
            what cannot be captured. They are never recomputed, what they save is kept, and while planning a copy of
            each is run once, on zeros. Recurrent layers (nn.LSTM, GRU, RNN) are kept so without being named.
        time_limit_s, gap: when the solver may stop: after these seconds, or with an overhead proven this close to
            the least. Ctrl-C stops it too, with the best plan so far.
        progress: None shows a bar on standard error if that is a terminal and planning takes over two seconds; True
            prints a line per stage instead, a function gets the lines, False is silence. The lines also go to the
            logger "placemat", at level INFO.
        compiler: "eager" runs the plan op by op, with eager's kernels and bits. "inductor" has the planned forward and
            backward compiled by PyTorch's Inductor (on the CPU that takes a C++ compiler, and half a minute or more):
            what is handed from one to the other is what the plan keeps, random numbers are eager's, all else rounds as
            under `torch.compile`, and the peak inside of each is Inductor's affair: plans expect elementwise results
            that only elementwise operators read to take no memory, and cost such operators by the traffic that fusion
            leaves. Then no call that wants gradients runs the original forward.

    Raises:
        ConstraintError: an entry of `keep` or `recompute` matches nothing, contradicts another, or asks for what
            cannot be; names the op and its source line. An entry of `keep_eager` matches no module, or nested ones.
        BudgetTooSmall: with the smallest budget, its decomposition, the op that binds and its source line.
        CaptureError: the forward is not one graph; names the user's file and line.
        UnsupportedFeature, SolverFailed: see their messages.
        PlacematError: the budget or `segments` is no size, there is no such compiler, or `apply_checkpointing` wrapped
            something in the model.
    """
    planner = make_planner(
        model,
        example_args,
        example_kwargs,
        budget_bytes=budget_bytes,
        budget_fraction=budget_fraction,
        loss_fn=loss_fn,
        cost_model=cost_model,
        reserved_bytes=reserved_bytes,
        accumulate_grad=accumulate_grad,
        segments=segments,
        keep=keep,
        recompute=recompute,
        keep_eager=keep_eager,
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
        compiler=compiler,
    )
    refuse_checkpointed(model)
    handle = Handle(model, planner, compiler)
    if example_args is not None or example_kwargs is not None:
        args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
        handle.remember(planner.plan(model, original_forward(model), args, kwargs, handle.kept, known={}), args, kwargs)
    install(model, handle)
    return model


def backend(
    budget_bytes: Budget | None = None,
    *,
    budget_fraction: float | None = None,
    cost_model: CostModelLike | None = None,
    device: torch.device | str = "cpu",
    reserved_bytes: Budget = 0,
    accumulate_grad: bool = False,
    segments: int = 1,
    keep: Iterable[Any] = (),
    recompute: Iterable[Any] = (),
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    progress: bool | Progress | None = None,
    compiler: str = "eager",
) -> CompilerBackend:
    """A backend: `torch.compile(model, fullgraph=True, dynamic=False, backend=placemat.backend("8 GiB"))`.

    It plans the graph that is compiled, under the budget, and runs it by the plan; other shapes and modes are compiled
    and planned anew. `.plan` and `.plans` have the plans. What is counted is what the graph has: parameters, buffers
    and inputs that it reads, its outputs and a gradient for each, and the loss if the compiled function computes it. A
    loss outside, and tensors that the function does not read, are for `reserved_bytes`. Calls without gradients, and
    those for which the budget is ample, run what was traced, op by op.

    Args:
        device: on which the default cost model measures.
        budget_bytes, budget_fraction, cost_model, reserved_bytes, accumulate_grad, segments, keep, recompute,
            time_limit_s, gap, progress, compiler: as for `optimize`.

    Raises:
        PlacematError: an argument is none of what it may be. What a graph is refused for is raised when the compiled
            function is called, as for `optimize`; also without `fullgraph=True`, with dynamic shapes, and with `mode=`
            or `options=` of torch.compile.
    """
    _check_search(time_limit_s, gap, segments)
    planner = Planner(
        cost_model=_cost_model(cost_model, torch.device(device).type),
        **_budget(budget_bytes, budget_fraction),
        reserved_bytes=parse_bytes(reserved_bytes, "reserved_bytes", minimum=0),
        accumulate_grad=accumulate_grad,
        segments=segments,
        compiler=check_compiler(compiler, segments),
        constraints=parse_constraints(keep, recompute),
        time_limit_s=time_limit_s,
        gap=gap,
        progress=make_progress(progress),
    )
    return CompilerBackend(planner, compiler)


def plan(
    model: nn.Module,
    budget_bytes: Budget | None = None,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan that `optimize` would follow for this call. Never runs the model: single ops only, to measure them.

    Options and errors are those of `optimize`. Model and inputs may be on the meta device if a cost model is given.
    """
    if example_args is None and example_kwargs is None:
        raise PlacematError(
            "plan() needs example inputs: plan(model, budget_bytes, (x, y), {'mask': mask}). Remedy: pass the "
            "arguments of one "
            "training call; fake or meta tensors do."
        )
    planner = make_planner(model, example_args, example_kwargs, budget_bytes=budget_bytes, **options)
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    kept = KeptModules.find(model, planner.keep_eager)
    return planner.plan(model, original_forward(model), args, kwargs, kept, known={})


def minimum_budget(
    model: nn.Module,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> int:
    """Smallest budget, in bytes, for which `optimize` finds a plan for this call. Options and errors as for `plan`."""
    if example_args is None and example_kwargs is None:
        raise PlacematError("minimum_budget() needs example inputs. Remedy: pass the arguments of one training call.")
    planner = make_planner(model, example_args, example_kwargs, budget_fraction=0.0, **options)
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    return planner.minimum_budget(model, original_forward(model), args, kwargs)


def frontier(
    model: nn.Module,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    points: int = 12,
    **options: Any,
) -> Frontier:
    """What each budget costs: plans at `points` evenly spaced budgets, from the floor to the keep-everything peak.

    The call is captured and costed once, and the budgets share what the solver finds, so overhead never rises with the
    budget. `frontier(...).plan_at(budget_bytes)` gives a plan to `apply`.

    Args:
        model, example_args, example_kwargs: as for `plan`. Runs nothing.
        points: how many budgets, at least 2.
        options: those of `plan`, without a budget; `time_limit_s` is for the whole curve.

    Raises:
        CaptureError, UnsupportedFeature, ConstraintError, SolverFailed: as for `optimize`.
        PlacematError: `points` is no number from 2 on, or there are no example inputs.
    """
    if example_args is None and example_kwargs is None:
        raise PlacematError("frontier() needs example inputs. Remedy: pass the arguments of one training call.")
    if given := {"budget_bytes", "budget_fraction"}.intersection(options):
        raise PlacematError(f"frontier() is about all budgets and takes no {given.pop()}.")
    planner = make_planner(model, example_args, example_kwargs, budget_fraction=0.0, **options)
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    return planner.frontier(model, original_forward(model), args, kwargs, points)


def apply(model: nn.Module, plan: Plan, *, compiler: str | None = None) -> nn.Module:
    """Follow a plan that was made before, perhaps in another process; in place, returns the same module.

    Args:
        model: the module that the plan was made for.
        plan: from `plan`, `frontier` or `Plan.load`.
        compiler: what runs the planned steps, see `optimize`; None is the one that the plan was made for.

    Raises:
        PlacematError, UnsupportedFeature: there is no such compiler, or it cannot take this model or this plan; or
            `apply_checkpointing` wrapped something in the model.
        PlanMismatch: the module's parameters are not those that the plan is for. Whether the graph and the shapes are
            is seen at the first training call, which raises PlanMismatch too if they are not.
        UnsupportedFeature: the module is, or has in it, a wrapper for several devices or processes.
    """
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise PlacematError(f"apply(model, plan) got {type(model).__name__} and {type(plan).__name__}.")
    refuse_compiled(model)
    refuse_checkpointed(model)
    refuse_parallel(model, is_called=False)
    digest = module_digest(model)
    if digest != plan.module_digest:
        raise PlanMismatch(
            f"the plan is for a module with other parameters or buffers (digest {plan.module_digest[:12]}, this one "
            f"has {digest[:12]}). Remedy: build the model as it was when the plan was made, or plan() again."
        )
    handle = Handle(model, None, compiler_for(compiler, plan.options))
    handle.add_plan(plan)
    install(model, handle)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize`, `apply` or `apply_checkpointing`: the forwards are the original ones again. Returns the model.

    Raises:
        PlacematError: the module is not optimized and nothing in it is wrapped, or another library has wrapped its
            forward since.
    """
    handle = unwrapped_handle_of(model)
    if handle is not None:
        _uninstall(model, handle)
    elif not remove_checkpointing(model):
        raise PlacematError(f"{type(model).__name__} is not optimized, so there is nothing to restore.")
    return model


def original_forward(model: nn.Module) -> Callable[..., Any]:
    """The module's forward as it is without placemat.

    Raises:
        PlacematError: another library has wrapped it since it was optimized.
    """
    handle = unwrapped_handle_of(model)
    return handle.original if handle is not None else model.forward


def install(model: nn.Module, handle: Handle) -> None:
    """Let a handle stand in for the module's forward."""
    present = unwrapped_handle_of(model)
    if present is not None:  # optimized again: the new plan replaces the old one
        handle.replaced = present.replaced
    model.forward = handle
    model.__dict__[ATTRIBUTE] = handle


def _uninstall(model: nn.Module, handle: Handle) -> None:
    if isinstance(model.__dict__.get("plan"), Plan):
        del model.__dict__["plan"]
    del model.__dict__[ATTRIBUTE]
    if handle.replaced is None:
        del model.__dict__["forward"]
    else:
        model.forward = handle.replaced


def make_planner(
    model: nn.Module,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    budget_bytes: Budget | None = None,
    budget_fraction: float | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    cost_model: CostModelLike | None = None,
    reserved_bytes: Budget = 0,
    accumulate_grad: bool = False,
    segments: int = 1,
    keep: Iterable[Any] = (),
    recompute: Iterable[Any] = (),
    keep_eager: Iterable[str] = (),
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    progress: bool | Progress | None = None,
    compiler: str = EAGER,
) -> Planner:
    _check_arguments(model, example_args, example_kwargs, loss_fn)
    _check_search(time_limit_s, gap, segments)
    device = the_device(model, example_args, example_kwargs)
    return Planner(
        cost_model=_cost_model(cost_model, device.type),
        **_budget(budget_bytes, budget_fraction),
        loss_fn=loss_fn,
        reserved_bytes=parse_bytes(reserved_bytes, "reserved_bytes", minimum=0),
        accumulate_grad=accumulate_grad,
        segments=segments,
        compiler=check_compiler(compiler, segments),
        constraints=parse_constraints(keep, recompute),
        keep_eager=parse_patterns("keep_eager", keep_eager),
        time_limit_s=time_limit_s,
        gap=gap,
        progress=make_progress(progress),
    )


def _budget(budget_bytes: Budget | None, budget_fraction: float | None) -> dict[str, Any]:
    """The two arguments of a `Planner` that say what the budget is."""
    if (budget_bytes is None) == (budget_fraction is None):
        raise PlacematError(
            'give one of budget_bytes (an int, or text such as "8 GiB") and budget_fraction (0 to 1), and not both.'
        )
    return {
        "budget_bytes": None if budget_bytes is None else parse_bytes(budget_bytes),
        "budget_fraction": None if budget_fraction is None else parse_fraction(budget_fraction),
    }


def _check_search(time_limit_s: float, gap: float, segments: object) -> None:
    if not time_limit_s > 0 or not gap >= 0:
        raise PlacematError(f"time_limit_s must be positive and gap not negative, got {time_limit_s} and {gap}.")
    if isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise PlacematError(f"segments must be a whole number from 1 on, got {segments!r}.")


def _check_arguments(model: object, args: object, kwargs: object, loss_fn: object) -> None:
    """Refuse what is of the wrong kind, before anything is done with it."""
    if not isinstance(model, nn.Module):
        raise PlacematError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    refuse_compiled(model)
    refuse_parallel(model, is_called=False)
    if args is not None and not isinstance(args, (tuple, list)):
        raise PlacematError(
            f"example_args must be a tuple of positional arguments, got {type(args).__name__}: write (x,)."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise PlacematError(f"example_kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}.")
    if loss_fn is not None and not callable(loss_fn):
        raise PlacematError(f"loss_fn must map the model's output to the loss, got {type(loss_fn).__name__}.")
    if any(nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise PlacematError("the model has uninitialized (lazy) parameters. Remedy: run it once before planning.")


def _cost_model(given: CostModelLike | None, device: str) -> CostModel:
    return default_cost_model(device) if given is None else as_cost_model(given, lambda: default_cost_model(device))
