"""Figures of plans and frontiers. matplotlib is wanted only here: `pip install "placemat[plots]"`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from placemat.baselines import chen_sqrt_n, recompute_all, save_all
from placemat.colors import ALERT_COLOR, CURVE_COLOR, RECOMPUTED_COLOR, category_color
from placemat.graph.errors import MissingExtra
from placemat.labels import location
from placemat.problem import Problem
from placemat.schedule import Schedule
from placemat.simulate import simulate
from placemat.timeline import Timeline, timeline
from placemat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from placemat.frontier import Frontier
    from placemat.plan import Plan

Peers = Mapping[str, Sequence[tuple[int, float]]]
_BASELINES: dict[str, Callable[[Problem], Schedule]] = {
    "recompute everything": recompute_all,
    "every sqrt(n)-th op (Chen et al.)": chen_sqrt_n,
}


def new_axes(width: float = 10.0, height: float = 5.0) -> Axes:
    """Axes of a figure of its own.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from placemat.figure import PlanFigure
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise MissingExtra(
            'plots need matplotlib, which is not installed. Remedy: pip install "placemat[plots]", or read the same '
            "as text: print(plan), print(frontier)."
        ) from None
    return PlanFigure(figsize=(width, height), layout="constrained").add_subplot()


def figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def plot_memory(plan: Plan, axes: Axes | None = None) -> Figure:
    """The figure of `Plan.plot`."""
    axes = new_axes() if axes is None else axes
    # Categories of the plan's static bytes in its order; what the user reserved is none of the graph's.
    static = {**plan.static_bytes, "reserved": plan.reserved_bytes}
    planned = timeline(plan.problem, plan.labels, plan.schedule, static)
    everything = timeline(plan.problem, plan.labels, save_all(plan.problem), static)
    _stack(axes, planned)
    axes.step(
        _ms(everything),
        [*everything.total_bytes, everything.total_bytes[-1]],
        where="post",
        color="black",
        linewidth=0.9,
        label=f"keep everything: {format_bytes(max(everything.total_bytes))}",
    )
    _shade_recomputation(axes, planned)
    _mark_limits(axes, plan, planned)
    border = planned.ops.index(plan.problem.border) if plan.problem.border in planned.ops else None
    if border is not None:
        axes.axvline(planned.starts_s[border] * 1e3, color="black", linewidth=0.8, linestyle=":")
        axes.text(
            planned.starts_s[border] * 1e3, 1.005, "forward | backward", transform=axes.get_xaxis_transform(),
            ha="center", va="bottom", fontsize=8,
        )  # fmt: skip
    axes.set_xlim(0, max(planned.starts_s[-1], everything.starts_s[-1]) * 1e3)
    axes.set_ylim(0, 1.08 * max(max(everything.total_bytes), max(planned.total_bytes)))
    axes.set_xlabel("predicted time in the step (ms)")
    axes.set_title(
        f"one step: {format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)}, "
        f"{plan.overhead:.1%} recomputation",
        pad=18,
    )
    _bytes_ticks(axes.yaxis, axes.get_ylim())
    axes.grid(axis="y", alpha=0.25)
    figure_of(axes).legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return figure_of(axes)


def _stack(axes: Axes, line: Timeline) -> None:
    shown = {name: sizes for name, sizes in line.bytes_by_category.items() if any(sizes)}
    axes.stackplot(
        _ms(line),
        [[*sizes, sizes[-1]] for sizes in shown.values()],
        labels=list(shown),
        colors=[category_color(name) for name in shown],
        step="post",
        linewidth=0,
    )


def _shade_recomputation(axes: Axes, line: Timeline) -> None:
    """A strip along the top, where single short recomputations stay visible, and a veil over the stack below it."""
    if all(line.are_first):
        return
    again = [not first for first in line.are_first]
    for bottom, alpha, label in ((0.0, 0.18, None), (0.965, 1.0, "recomputation")):
        axes.fill_between(
            _ms(line), bottom, 1.0, where=[*again, False], step="post", transform=axes.get_xaxis_transform(),
            color=RECOMPUTED_COLOR, alpha=alpha, linewidth=0, label=label,
        )  # fmt: skip


def _mark_limits(axes: Axes, plan: Plan, line: Timeline) -> None:
    axes.axhline(
        plan.budget_bytes, color=ALERT_COLOR, linewidth=1.1, linestyle="--",
        label=f"budget: {format_bytes(plan.budget_bytes)}",
    )  # fmt: skip
    totals = line.total_bytes
    peak = totals.index(max(totals))
    at_ms = (line.starts_s[peak] + line.starts_s[peak + 1]) / 2 * 1e3
    source = "/".join(location(plan.peak_source).split("/")[-2:])
    axes.plot(
        [at_ms], [totals[peak]], marker="v", markersize=7, color=ALERT_COLOR, linestyle="none",
        label=f"peak: {format_bytes(totals[peak])}\nat {plan.peak_op}\n{source}".rstrip(),
    )  # fmt: skip


def plot_frontier(frontier: Frontier, peers: Peers | None = None, axes: Axes | None = None) -> Figure:
    """The figure of `Frontier.plot`."""
    axes = new_axes(8.0, 5.0) if axes is None else axes
    budgets = [point.budget_bytes for point in frontier.points]
    _curve(axes, frontier)
    others = {**_baselines(frontier), **{name: list(listed) for name, listed in (peers or {}).items()}}
    for number, (name, listed) in enumerate(others.items()):
        axes.plot(
            [size for size, _ in listed], [100 * overhead for _, overhead in listed], linestyle="none",
            marker="sD^vP*X"[number % 7], markersize=7, color=f"C{1 + number % 9}", label=name,
        )  # fmt: skip
    axes.axvline(budgets[0], color=ALERT_COLOR, linewidth=1, linestyle="--", label=f"floor: {format_bytes(budgets[0])}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak of a training step")
    axes.set_ylabel("overhead (% of forward + backward)")
    axes.set_title("what a smaller budget costs")
    _bytes_ticks(
        axes.xaxis, (budgets[0], max(budgets[-1], *(size for listed in others.values() for size, _ in listed)))
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return figure_of(axes)


def _curve(axes: Axes, frontier: Frontier) -> None:
    """Steps: a plan serves every budget from its peak on, a bound holds for every budget up to its own."""
    points = frontier.points
    plans = sorted({(point.peak_bytes, 100 * point.overhead) for point in points})
    sizes = sorted({size for size, _ in plans} | {point.budget_bytes for point in points})
    cheapest = [min(overhead for size, overhead in plans if size <= limit) for limit in sizes]
    bounds = [next(100 * point.lower_bound for point in points if point.budget_bytes >= size) for size in sizes]
    after = [*bounds[1:], bounds[-1]]  # from each size to the next
    axes.fill_between(
        sizes, after, cheapest, step="post", color=CURVE_COLOR, alpha=0.25, linewidth=0, label="not yet decided"
    )
    axes.step(sizes, after, where="post", color=CURVE_COLOR, linewidth=1, linestyle=":", label="lower bound")
    axes.step(sizes, cheapest, where="post", color=CURVE_COLOR, linewidth=1.2)
    axes.plot(
        *zip(*plans, strict=True), color=CURVE_COLOR, marker="o", markersize=5, linestyle="none", label="placemat"
    )


def _baselines(frontier: Frontier) -> dict[str, list[tuple[int, float]]]:
    """What people do by hand, priced by the same referee."""
    problem = frontier.plans[0].problem
    points = {}
    for name, baseline in _BASELINES.items():
        simulation = simulate(problem, baseline(problem))
        points[name] = [(simulation.peak_bytes, simulation.recompute_seconds / problem.runtime_s)]
    return points


def _ms(line: Timeline) -> list[float]:
    return [1e3 * seconds for seconds in line.starts_s]


def _bytes_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """About six ticks: 1, 2, 2.5 or 5 times a power of ten of B, KiB, MiB or GiB."""
    span = max(limits[1] - limits[0], 1)
    unit = 1024 ** max(0, math.floor(math.log(span, 1024)))
    rough = span / unit / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.ceil(limits[0] / step)
    axis.set_ticks([number * step for number in range(first, math.floor(limits[1] / step) + 1)])
    axis.set_major_formatter(lambda size, _: format_bytes(round(size)).replace(".0 ", " "))
