"""What predictions are worth: peaks and overheads, predicted and measured, under measured and under roofline costs.

    python -m benchmarks.cost_models                                   # all models, from the root of the repository
    python -m benchmarks.cost_models gpt2 --rounds 9 --json gpt2.json

For each model: how long costing takes cold and from the cache, then one row per budget, at 0, 1/4, 1/2 and 3/4 of the
way from the floor to the keep-everything peak.

    predicted, peak    bytes of a whole step, static ones included; `off` is their difference in percent
    expected, real     overhead over the same generated code without recomputation, in percent: under measured costs,
                       and as median of ratios over interleaved rounds (of processor seconds on the CPU)
    fastest            the same by the fastest round of each
    roofline           the same two for the plan that roofline costs lead to at the same budget
    less roofline      by how much the first plan's step is slower than the second one's, in points: median over rounds,
                       and twice its standard error

Both kinds of costs have measured workspaces, so that plans differ by their seconds alone. One torch thread, and malloc
holds what is freed (`benchmarks/timing.py` says why). On a CUDA device (`--device cuda`) models and inputs are moved
there first.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import placemat
from benchmarks.contest.results import Estimate
from benchmarks.timing import hold_freed_memory, interleave
from placemat.cost_models import Measured, MeasuredWorkspaces, Roofline, cost_graph, device_spec, host_spec
from placemat.cost_models.base import CostModel
from placemat.graph.static import static_bytes
from placemat.pipeline import Identity, Planner
from tests import models
from tests.models import Workload

TIME_LIMIT_S = 60.0  # for one plan: the default of `optimize`
POINTS = 4  # budgets; one more keeps everything


def _bfloat16() -> Workload:
    """A transformer whose parameters, activations and inputs are bfloat16."""
    workload = models.transformer(layers=4, width=256, sequence=128, batch=8)
    args, kwargs = _moved((workload.args, workload.kwargs), torch.bfloat16)
    return workload._replace(model=workload.model.to(torch.bfloat16), args=args, kwargs=kwargs)


MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": models.gpt2,
    "gpt2_4": lambda: models.gpt2(layers=4),
    "transformer_bf16": _bfloat16,
    "unet": models.unet,
    "resnet50": models.resnet50,
}


def _moved(tree: Any, to: torch.dtype | torch.device) -> Any:
    def move(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(to) if floating or (isinstance(leaf, torch.Tensor) and isinstance(to, torch.device)) else leaf

    return pytree.tree_map(move, tree)


@dataclass(frozen=True)
class Costing:
    """Seconds that costing a step takes, without and with a cache, and what it was of."""

    model: str
    ops: int
    distinct: int
    cold_s: float
    cached_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One budget; overheads are ratios less one."""

    model: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    expected_overhead: float
    measured_overhead: float
    fastest_overhead: float
    roofline_expected_overhead: float
    roofline_measured_overhead: float
    less_roofline: Estimate

    @property
    def peak_error(self) -> float:
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    @property
    def holds(self) -> bool:
        """Peak within budget and half a percent, overhead within 15 % or 2 points."""
        off = abs(self.expected_overhead - self.measured_overhead)
        close = off <= max(0.02, 0.15 * self.measured_overhead)
        return self.measured_peak_bytes <= self.budget_bytes and abs(self.peak_error) <= 0.005 and close

    @property
    def verdict(self) -> str:
        is_slower = self.less_roofline.value > self.less_roofline.margin
        return ("holds" if self.holds else "DOES NOT HOLD") + (", SLOWER THAN ROOFLINE'S" if is_slower else "")


def costing(name: str, workload: Workload, device: str, cache_dir: str) -> Costing:
    """Fills the empty `cache_dir`."""
    planner = Planner(cost_model=roofline(device), loss_fn=workload.loss)
    graph = planner.stages(workload.model, workload.model.forward, workload.args, workload.kwargs).lowering.graph
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        costs = cost_graph(Measured(device, cache_dir=cache_dir), graph)
        seconds.append(time.perf_counter() - start)
    distinct = len({op.signature for op in graph.ops})
    return Costing(name, len(graph.ops), distinct, seconds[0], seconds[1], costs.notes)


def roofline(device: str) -> CostModel:
    if device == "cuda":
        return Roofline(device_spec(torch.cuda.get_device_name()))
    return MeasuredWorkspaces(Roofline(host_spec()))


def make_plans(workload: Workload, device: str, cache_dir: str) -> dict[str, placemat.Plan]:
    """Plans by contender: "measured 0" to "measured 3" from the floor on, "roofline 0" to 3, and "everything".

    Those of one number have one budget: the floor is the higher one of the two that were found.
    """
    call = workload.model, workload.model.forward, workload.args, workload.kwargs
    cost_models = {"measured": Measured(device, cache_dir=cache_dir), "roofline": roofline(device)}
    planners = {
        name: Planner(cost_model=model, loss_fn=workload.loss, time_limit_s=TIME_LIMIT_S)
        for name, model in cost_models.items()
    }
    stages = {name: planner.stages(*call) for name, planner in planners.items()}
    low = max(planners[name].floor(stages[name]).minimum_bytes for name in planners)
    high, identity = stages["measured"].keep_everything_bytes, Identity.of(*call)

    def plan(name: str, i: int) -> placemat.Plan:
        budget_bytes = low + i * (high - low) // POINTS
        return replace(planners[name], budget_bytes=budget_bytes).solved(stages[name], identity)

    plans = {f"{name} {i}": plan(name, i) for name in planners for i in range(POINTS)}
    return {**plans, "everything": replace(plan("measured", POINTS), runs_original=False)}


def step_of(planned: Workload) -> Callable[[], object]:
    def step() -> None:
        planned.model.zero_grad(set_to_none=True)
        output = planned.model(*planned.args, **planned.kwargs)  # held to the end, as plans assume
        planned.loss(output).backward()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return step


def peak_bytes(planned: Workload) -> int:
    """Peak of a step, static bytes included."""
    planned.model.zero_grad(set_to_none=True)
    always = sum(static_bytes(planned.model, planned.args, planned.kwargs).values())
    return always + placemat.measure(step_of(planned)).peak_bytes


def run(name: str, workload: Workload, device: str, rounds: int, cache_dir: str) -> list[Row]:
    """Plans with the costs that `cache_dir` has, for the machine's speed is not that of another day."""
    plans = make_plans(workload, device, cache_dir)
    planned = {
        contender: workload._replace(model=placemat.apply(copy.deepcopy(workload.model), plan))
        for contender, plan in plans.items()
    }
    steps = {contender: step_of(own) for contender, own in planned.items()}
    clock = time.process_time if device == "cpu" else time.perf_counter
    timings = interleave(steps, reference="everything", rounds=rounds, clock=clock)
    rows = []
    for i in range(POINTS):
        plan, other = plans[f"measured {i}"], plans[f"roofline {i}"]
        own, others = timings[f"measured {i}"], timings[f"roofline {i}"]
        rows.append(
            Row(
                model=name,
                budget_bytes=plan.budget_bytes,
                predicted_peak_bytes=plan.predicted_peak_bytes,
                measured_peak_bytes=peak_bytes(planned[f"measured {i}"]),
                expected_overhead=plan.overhead,
                measured_overhead=own.ratio - 1,
                fastest_overhead=own.fastest_ratio - 1,
                roofline_expected_overhead=other.overhead,
                roofline_measured_overhead=others.ratio - 1,
                less_roofline=Estimate.of([a - b for a, b in zip(own.ratios, others.ratios, strict=True)]),
            )
        )
    return rows


def format_rows(rows: Sequence[Row]) -> str:
    header = f"{'model':>18} {'budget':>12} {'predicted':>12} {'peak':>12} {'off':>7}"
    lines = [f"{header}  expected   real fastest  roofline   real  less roofline"]
    for r in rows:
        measured = (
            f"{100 * r.expected_overhead:>6.1f}% {100 * r.measured_overhead:>5.1f}% {100 * r.fastest_overhead:>6.1f}%"
        )
        other = f"{100 * r.roofline_expected_overhead:>6.1f}% {100 * r.roofline_measured_overhead:>5.1f}%"
        less = f"{100 * r.less_roofline.value:>+6.1f} ± {100 * r.less_roofline.margin:.1f}"
        lines.append(
            f"{r.model:>18} {r.budget_bytes:>12,} {r.predicted_peak_bytes:>12,} {r.measured_peak_bytes:>12,} "
            f"{100 * r.peak_error:>6.2f}%   {measured}   {other}  {less}  {r.verdict}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not hold_freed_memory():
        print("malloc gives memory back between steps: overheads come out too small")
    device = torch.device(arguments.device)
    found: list[dict[str, Any]] = []
    for name in arguments.models or list(MODELS):
        workload = MODELS[name]()
        args, kwargs = _moved((workload.args, workload.kwargs), device)
        workload = workload._replace(model=workload.model.to(device), args=args, kwargs=kwargs)
        with tempfile.TemporaryDirectory() as cache_dir:
            cost = costing(name, workload, device.type, cache_dir)
            print(
                f"{name}: {cost.ops} ops, {cost.distinct} distinct, costed in {cost.cold_s:.2f} s cold and "
                f"{cost.cached_s:.2f} s from the cache; {' '.join(cost.notes) or 'all of them by measurement'}",
                flush=True,
            )
            rows = run(name, workload, device.type, arguments.rounds, cache_dir)
        print(format_rows(rows), end="\n\n", flush=True)
        found.append({"costing": asdict(cost), "rows": [asdict(row) for row in rows]})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
