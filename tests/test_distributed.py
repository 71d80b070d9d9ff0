"""Data parallelism: one plan on all ranks, DDP and FSDP2 around planned modules, what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import placemat
from placemat.graph.errors import PlacematError
from placemat.graph.static import static_bytes
from placemat.installed import handle_of
from tests.jobs import run_job, same, train, use_loopback
from tests.steps import Branches, FreeOfWorkspace

PLANNING: dict[str, Any] = {"cost_model": FreeOfWorkspace(), "time_limit_s": 1.0, "progress": False}


class Heads(nn.Module):
    """A trunk and two heads, of which a caller may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))

    def forward(self, x: Tensor, which: int | None = None) -> Tensor | tuple[Tensor, ...]:
        y = self.trunk(x)
        return tuple(head(y) for head in self.heads) if which is None else self.heads[which](y)


def batches(count: int = 3) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [(torch.randn(48, 64, generator=generator),) for _ in range(count)]


def twins(make: Callable[[], nn.Module] = Branches) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    model = make()
    return model, copy.deepcopy(model)


def raises_on_every_rank(kind: type[PlacematError], call: Callable[[], object]) -> PlacematError:
    """The error that the call raises here; fails on all ranks unless all of them raise it."""
    with pytest.raises(kind) as caught:
        call()
    dist.barrier()
    return caught.value


# -- one plan, and DDP ---------------------------------------------------------------------------------------------


def ddp_job(rank: int) -> None:
    eager, planned = twins()
    data = batches()
    plan = placemat.distributed.plan(planned, None, data[0], budget_fraction=0.3, **PLANNING)
    assert plan.recompute_seconds > 0
    assert placemat.distributed.agree(plan) == plan.digest
    placemat.apply(planned, plan)
    # Buckets of some hundred bytes: Dynamo would split the forward at each, were it not told otherwise.
    wrapped = DistributedDataParallel(planned, bucket_cap_mb=0.0005)
    assert same(train(wrapped, planned, data), train(DistributedDataParallel(eager), eager, data))
    backend = handle_of(planned)._backend
    assert (backend.compilations, backend.runs) == (1, len(data))

    other = placemat.plan(eager, "1 GiB", data[0], **PLANNING) if rank else plan
    error = raises_on_every_rank(placemat.RanksDisagree, lambda: placemat.distributed.agree(other))
    assert "rank 0: " in str(error)
    assert "rank 1: " in str(error)

    small = raises_on_every_rank(
        placemat.BudgetTooSmall, lambda: placemat.distributed.plan(eager, 1000, data[0], **PLANNING)
    )
    assert 1000 < small.minimum_budget_bytes < plan.keep_everything_bytes
    assert ("on rank 0" in str(small)) == (rank == 1)

    longer = (data[0][0].repeat(1 + rank, 1),)
    error = raises_on_every_rank(
        placemat.RanksDisagree,
        lambda: placemat.distributed.plan(eager, None, longer, budget_fraction=0.3, **PLANNING),
    )
    assert "rank 1: the forward is another graph" in str(error)
    assert "argument x is float32 (96, 64)" in str(error)

    with pytest.raises(placemat.UnsupportedFeature, match=r"norm is a SyncBatchNorm"):
        placemat.optimize(nn.SyncBatchNorm.convert_sync_batchnorm(eager), "1 GiB")


@pytest.mark.slow
def test_ranks_share_a_plan_and_train_as_under_ddp_alone(tmp_path: Path) -> None:
    run_job(ddp_job, tmp_path)


def ddp_options_job(rank: int) -> None:
    data = batches(4)
    plan = placemat.distributed.plan(twins()[0], None, data[0], budget_fraction=0.2, **PLANNING)
    for options in (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False, "bucket_cap_mb": 0.01},
        {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": True},
    ):
        eager, planned = twins()
        reference = train(DistributedDataParallel(eager, **options), eager, data)
        assert same(train(DistributedDataParallel(placemat.apply(planned, plan), **options), planned, data), reference)
    _, late = twins()  # optimized after it was wrapped
    wrapped = DistributedDataParallel(late, **options)
    placemat.apply(wrapped.module, plan)
    assert same(train(wrapped, late, data), reference)


@pytest.mark.slow
def test_ddp_options(tmp_path: Path) -> None:
    run_job(ddp_options_job, tmp_path)


def accumulation_job(rank: int) -> None:
    for as_view in (False, True):
        results = []
        for optimized in (False, True):
            model, _ = twins()
            data = batches(6)
            if optimized:
                plan = placemat.distributed.plan(
                    model, None, data[0], budget_fraction=0.3, accumulate_grad=True, **PLANNING
                )
                placemat.apply(model, plan)
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            torch.manual_seed(rank)
            left = []
            for i, args in enumerate(data):
                if i % 3 == 0:
                    model.zero_grad(set_to_none=True)
                if i % 3 < 2:
                    with wrapped.no_sync():
                        wrapped(*args).backward()
                else:
                    wrapped(*args).backward()
                left.append([p.grad.clone() for p in model.parameters()])
            results.append(left)
        assert same(*results)


@pytest.mark.slow
def test_gradients_accumulate_under_no_sync(tmp_path: Path) -> None:
    run_job(accumulation_job, tmp_path)


def overlap_job(rank: int) -> None:
    """When each bucket's reduction starts, and when operators of the backward run: "op" and "reduce"."""
    data = batches(3)
    eager, planned = twins()
    options: dict[str, Any] = {"bucket_cap_mb": 0.01}
    reference = train(DistributedDataParallel(eager, **options), eager, data)
    plan = placemat.distributed.plan(planned, None, data[0], budget_fraction=0.2, segments=3, **PLANNING)
    wrapped = DistributedDataParallel(placemat.apply(planned, plan), **options)
    assert same(train(wrapped, planned, data), reference)

    orders = []
    for segments in (1, 3):
        _, model = twins()
        placemat.optimize(model, None, data[0], budget_fraction=0.2, segments=segments, **PLANNING)
        wrapped = DistributedDataParallel(model, **options)
        wrapped(*data[0]).backward()  # compiles, and makes the buckets anew
        model.zero_grad()
        order: list[str] = []

        def reduce(state, bucket):  # DDP looks at annotations, and does not take them as text
            state.append("reduce")
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        wrapped.register_comm_hook(order, reduce)
        loss = wrapped(*data[0])
        with Products(order):
            loss.backward()
        orders.append(order)
    last_product = [len(order) - 1 - order[::-1].index("product") for order in orders]
    early = ["reduce" in order[:last] for order, last in zip(orders, last_product, strict=True)]
    assert early == [False, True], orders


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.order.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_reductions_of_segments_start_before_backward_ends(tmp_path: Path) -> None:
    run_job(overlap_job, tmp_path)


def unused_job(rank: int) -> None:
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank))
    options: dict[str, Any] = {"budget_fraction": 0.3, **PLANNING}
    # Each rank uses another head; then both return two, of which the loss uses one.
    for args, loss_of in (((x, rank), torch.sum), ((x,), lambda output: output[1].pow(2).sum())):
        eager, planned = twins(Heads)
        reference = DistributedDataParallel(eager, find_unused_parameters=True)
        wrapped = DistributedDataParallel(
            placemat.optimize(planned, None, args, **options), find_unused_parameters=True
        )
        ours = train(wrapped, planned, [args] * 3, loss_of)
        assert same(ours, train(reference, eager, [args] * 3, loss_of))


@pytest.mark.slow
def test_unused_parameters_are_found(tmp_path: Path) -> None:
    run_job(unused_job, tmp_path)


def silent_rank_job(rank: int) -> None:
    plan = placemat.plan(twins()[0], None, batches()[0], budget_fraction=0.3, **PLANNING)
    if rank == 0:
        with pytest.raises(placemat.RanksDisagree, match=r"rank 0 got no answer from rank 1 within 2 s"):
            placemat.distributed.agree(plan, timeout_s=2.0)
    dist.barrier()
    if rank == 1:  # comes too late, and is not given an answer that was meant for nobody any more
        with pytest.raises(placemat.RanksDisagree, match=r"rank 1 got no answer from rank 0: an error ended the call"):
            placemat.distributed.agree(plan)
    assert placemat.distributed.agree(plan) == plan.digest


@pytest.mark.slow
def test_a_rank_that_does_not_take_part_is_an_error_for_the_others(tmp_path: Path) -> None:
    run_job(silent_rank_job, tmp_path)


def broken_rank_job(rank: int) -> None:
    model, _ = twins()

    class Broken(FreeOfWorkspace):
        def op_cost(self, op: Any) -> Any:
            raise ZeroDivisionError("no error of placemat's")

    with pytest.raises(placemat.RanksDisagree if rank else ZeroDivisionError):
        placemat.distributed.plan(
            model, None, batches()[0], budget_fraction=0.3, cost_model=Broken(), timeout_s=30.0, progress=False
        )
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_fails_while_it_plans_is_an_error_for_the_others(tmp_path: Path) -> None:
    run_job(broken_rank_job, tmp_path)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.01}]
)
def test_bucket_bytes_are_what_ddp_allocates_and_the_step_fits_beside_them(options: dict[str, Any]) -> None:
    model, planned = twins(Stack)
    made: list[DistributedDataParallel] = []
    # Without the broadcast of the parameters, of which a thread of gloo's frees the buffer sooner or later.
    holds = placemat.measure(lambda: made.append(DistributedDataParallel(model, init_sync=False, **options)))
    asked = {name: value for name, value in options.items() if name != "gradient_as_bucket_view"}
    bucket_bytes = placemat.distributed.ddp_bucket_bytes(model, **asked)
    assert bucket_bytes <= holds.end_bytes <= bucket_bytes + 512

    data = batches(3)
    plan = placemat.plan(
        planned, None, data[0], budget_fraction=0.1, reserved_bytes=bucket_bytes, progress=False, time_limit_s=5
    )
    wrapped = DistributedDataParallel(placemat.apply(planned, plan), **options)
    for args in data[:2]:  # buckets are made anew in the second step
        wrapped(*args).backward()
        planned.zero_grad(set_to_none=True)
    step = placemat.measure(lambda: wrapped(*data[2]).backward())
    static = sum(static_bytes(planned, data[0], {}).values())
    assert static + bucket_bytes + step.peak_bytes <= plan.budget_bytes


def test_bucket_bytes() -> None:
    model = nn.Sequential(nn.Linear(1000, 999), nn.Linear(999, 1000, dtype=torch.float64))
    model[0].bias.requires_grad_(False)
    exact = 4 * 999_000 + 8 * (999_000 + 1000)
    assert placemat.distributed.ddp_bucket_bytes(model) == exact
    assert placemat.distributed.ddp_bucket_bytes(model, bucket_cap_mb=1) == exact
    assert placemat.distributed.ddp_bucket_bytes(model, static_graph=True) == exact + 2 * 4 * 3
    # As on a GPU, where a bucket takes a multiple of 512 bytes: one float32 bucket, at most two of float64.
    assert placemat.distributed.ddp_bucket_bytes(model.to("meta")) == exact + 3 * 511
    with pytest.raises(PlacematError, match="bucket_cap_mb must be positive"):
        placemat.distributed.ddp_bucket_bytes(model, bucket_cap_mb=0)


# -- FSDP ----------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks that are sharded one by one, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.Tanh())
            for _ in range(2)
        )
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).pow(2).mean()


def fsdp_job(rank: int, low_precision: bool) -> None:
    data = batches(2)
    example = (data[0][0].clone().requires_grad_(),)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if low_precision else {}
    eager: Any
    before: Any
    eager, before = twins(Stack)
    after: Any = twins(Stack)[1]
    for block in eager.blocks:
        fully_shard(block, **options)
    reference = train(fully_shard(eager, **options), eager, data)
    for block in before.blocks:  # planned, then sharded
        fully_shard(placemat.optimize(block, None, example, budget_fraction=0.2, **PLANNING), **options)
    assert same(train(fully_shard(before, **options), before, data), reference)
    for block in after.blocks:  # sharded, then planned on the first call; parameters stay whole until backward
        placemat.optimize(
            fully_shard(block, reshard_after_forward=False, **options), None, budget_fraction=0.2, **PLANNING
        )
    assert same(train(fully_shard(after, **options), after, data), reference)
    for block in (*before.blocks, *after.blocks):
        assert block.plan.recompute_seconds > 0
        assert handle_of(block)._backend.runs == len(data)


@pytest.mark.slow
@pytest.mark.parametrize("low_precision", [False, True])
def test_fsdp_units_are_planned_one_by_one(tmp_path: Path, low_precision: bool) -> None:
    run_job(fsdp_job, tmp_path, low_precision)


# -- refusals, in one process --------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    use_loopback()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_wrappers_are_refused_and_named() -> None:
    x = (torch.randn(4, 64),)
    for wrapped, match in (
        (
            DistributedDataParallel(Branches()),
            r"the model is a DistributedDataParallel.*placemat\.optimize\(model\.mod",
        ),
        (nn.Sequential(DistributedDataParallel(Branches())), r"0 is a DistributedDataParallel"),
        (nn.DataParallel(Branches()), "DataParallel, which runs copies"),
    ):
        for call in (
            lambda m: placemat.optimize(m, "1 GiB", x),
            lambda m: placemat.optimize(m, "1 GiB"),
            lambda m: placemat.minimum_budget(m, x),
            lambda m: placemat.apply(m, placemat.plan(Branches(), "1 GiB", x, **PLANNING)),
        ):
            with pytest.raises(placemat.UnsupportedFeature, match=match):
                call(wrapped)


@pytest.mark.usefixtures("group")
def test_modules_around_sharded_ones_are_refused() -> None:
    x = (torch.randn(4, 64),)
    sharded = Stack()
    for block in sharded.blocks:
        fully_shard(block)
    with pytest.raises(placemat.UnsupportedFeature, match=r"blocks\.0 is sharded by fully_shard\(\) on its own"):
        placemat.optimize(sharded, "1 GiB")
    with pytest.raises(placemat.UnsupportedFeature, match=r"0\.weight is sharded .* outside of a forward"):
        placemat.plan(sharded.blocks[0], "1 GiB", x, **PLANNING)

    late = placemat.optimize(Stack(), None, x, budget_fraction=0.2, **PLANNING)
    late(*x).backward()
    late.zero_grad()
    for block in late.blocks:
        fully_shard(block)
    with pytest.raises(placemat.UnsupportedFeature, match=r"blocks\.0 is sharded by fully_shard\(\) on its own"):
        fully_shard(late)(*x)


@pytest.mark.usefixtures("group")
def test_distributed_tensors_are_refused() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = Branches()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(placemat.UnsupportedFeature, match=r"head\.weight is a DTensor"):
        placemat.optimize(model, "1 GiB")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused(use_orig_params: bool) -> None:
    x = (torch.randn(4, 64),)
    wrap = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    with pytest.raises(placemat.UnsupportedFeature, match="FSDP1"):
        placemat.optimize(FullyShardedDataParallel(Branches(), **wrap), "1 GiB", x)
    inner = placemat.optimize(Branches(), None, x, budget_fraction=0.2, **PLANNING)
    wrapped = FullyShardedDataParallel(inner, **wrap)
    with pytest.raises(placemat.UnsupportedFeature, match="FSDP1"):
        wrapped(*x)


def test_mixed_precision_of_ddp_is_refused() -> None:
    model = Branches()
    model.head.weight._mp_param = torch.zeros_like(model.head.weight, dtype=torch.bfloat16)  # as DDP does on a GPU
    with pytest.raises(
        placemat.UnsupportedFeature, match=r"head is a Linear inside of a DistributedDataParallel\(mixed"
    ):
        placemat.optimize(model, "1 GiB")


def test_without_a_process_group_there_are_no_ranks() -> None:
    with pytest.raises(PlacematError, match="there is no process group"):
        placemat.distributed.agree(placemat.plan(Branches(), "1 GiB", (torch.randn(4, 64),), **PLANNING))


def test_errors_cross_processes() -> None:
    error = placemat.BudgetTooSmall(
        "too small", minimum_budget_bytes=7, budget_bytes=3, breakdown={"inputs": 7}, binding_op="mm", source=None
    )
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is placemat.BudgetTooSmall
    assert str(received) == "too small"
    assert vars(received) == vars(error)
