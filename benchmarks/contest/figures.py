"""Figures: overhead over measured peak, as timed and by costs of operators, a curve for each way of each contender."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contest.results import Estimate, Point, Results
from benchmarks.peers import PEERS, PlacematPlans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20


def save_figure(results: Results, path: Path) -> None:
    """Draw one workload's contenders and write the figure; the format is that of the file's ending.

    Points with wrong gradients are crosses; bars are the margins of noise; the line of dots is what we predicted.
    """
    from matplotlib.figure import Figure  # not needed by what only measures

    figure = Figure(figsize=(13.0, 5.0), layout="constrained")
    timed, summed = figure.subplots(1, 2, sharey=True)
    ours = [p for p in results.of([PlacematPlans.name]) if p.plan is not None and not p.plan.runs_original]
    for axes, overhead in ((timed, results.overhead), (summed, _by_op_costs(results))):
        for number, (name, points) in enumerate(_curves(results).items()):
            _draw(axes, results, overhead, points, name, f"C{1 + number % 9}", "sD^vP*Xph"[number % 9])
        _draw(axes, results, overhead, ours, PlacematPlans.name, "black", "o")
        axes.axhline(0.0, color="gray", linewidth=0.8)
        axes.set_xlabel("measured peak of a training step (MiB)")
        axes.grid(alpha=0.25)
    predicted = sorted((p.plan.predicted_peak_bytes / _MIB, 100 * p.plan.predicted_overhead) for p in ours if p.plan)
    if predicted:
        timed.plot(*zip(*predicted, strict=True), ":", color="black", linewidth=1, label="placemat, predicted")
    timed.set_ylabel("overhead over eager (% of its step)")
    timed.set_title(f"{results.title}: as timed", fontsize=10)
    summed.set_title("by what operators cost alone, summed", fontsize=10)
    timed.legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _by_op_costs(results: Results) -> Callable[[Point], Estimate | None]:
    def overhead(point: Point) -> Estimate | None:
        value = results.overhead_of_ops(point)
        return None if value is None else Estimate(value, 0.0, 1)

    return overhead


def _curves(results: Results) -> dict[str, list[Point]]:
    """Points of the peers by the curve that joins them."""
    curves: dict[str, list[Point]] = {}
    for point in results.of(PEERS):
        name = point.contender if point.contender == point.curve else f"{point.contender}: {point.curve}"
        curves.setdefault(name, []).append(point)
    return curves


def _draw(
    axes: Axes,
    results: Results,
    overhead: Callable[[Point], Estimate | None],
    points: list[Point],
    name: str,
    color: str,
    marker: str,
) -> None:
    timed = [(results.twin(p), overhead(p)) for p in points]
    drawn = sorted(
        {
            (p.peak_bytes / _MIB, 100 * o.value, 100 * o.margin, p.has_wrong_gradients)
            for p, o in timed
            if o and p.peak_bytes
        }
    )
    if not drawn:
        return
    x, y, margins, _ = zip(*drawn, strict=True)
    axes.errorbar(x, y, yerr=margins, color=color, linewidth=1, capsize=2, label=name)
    for is_wrong, shape in ((False, marker), (True, "x")):
        chosen = [(x, y) for x, y, _, wrong in drawn if wrong == is_wrong]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), linestyle="none", marker=shape, color=color, markersize=6)
