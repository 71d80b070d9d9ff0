"""Timelines against the referee, and what the figures show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import placemat
from placemat.baselines import save_all
from placemat.frontier import Frontier, FrontierPoint
from placemat.plan import Plan
from placemat.plot_graph import neighborhood
from placemat.simulate import running_bytes, simulate
from placemat.timeline import Timeline, timeline
from placemat.units import format_bytes
from tests.steps import make_step
from tests.test_plan import keep_everything_plan, recomputing_plan


def timeline_of(plan: Plan) -> Timeline:
    static = {**plan.static_bytes, "reserved": plan.reserved_bytes}
    return timeline(plan.problem, plan.labels, plan.schedule, static)


@pytest.mark.parametrize("make", [recomputing_plan, keep_everything_plan])
def test_categories_add_up_to_what_the_referee_says_of_every_run(make: Any) -> None:
    plan = make()
    line = timeline_of(plan)
    assert list(line.total_bytes) == running_bytes(plan.schedule, simulate(plan.problem, plan.schedule))
    peak = line.total_bytes.index(plan.predicted_peak_bytes)
    assert {name: sizes[peak] for name, sizes in line.bytes_by_category.items()} == plan.breakdown
    assert line.ops == plan.schedule.computes
    assert sum(not first for first in line.are_first) == len(plan.schedule.recomputes)
    assert line.starts_s[-1] == pytest.approx(plan.forward_backward_seconds + plan.recompute_seconds)


def legend_texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_memory_figure(tmp_path: Path) -> None:
    plan = recomputing_plan()
    figure = plan.plot()
    (axes,) = figure.axes
    texts = legend_texts(figure)
    assert texts[:5] == ["parameters", "inputs", "reserved", "gradients", "outputs"]
    assert {"recomputation", "budget: 40.0 KiB", "peak: 37.9 KiB\nat back_1"} <= set(texts)
    everything = simulate(plan.problem, save_all(plan.problem)).peak_bytes
    assert f"keep everything: {format_bytes(everything)}" in texts
    assert axes.get_ylim()[1] > everything
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0 B", "10 KiB", "20 KiB", "30 KiB", "40 KiB"]
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # what a notebook shows
    figure.savefig(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_memory_figure_without_recomputation() -> None:
    assert "recomputation" not in legend_texts(keep_everything_plan().plot())


def test_graph_around_the_peak() -> None:
    plan = recomputing_plan()
    part = neighborhood(plan, max_ops=4)
    names = {plan.problem.ops[op].name for op in part}
    assert plan.problem.ops[part.graph["peak_op"]].name == plan.peak_op == "back_1"
    assert len(part) == 4
    assert names <= {"back_1", "back_2", "back_0", "drop_1"}  # what it reads and who reads it
    everything = neighborhood(plan, max_ops=100)
    fates = {plan.problem.ops[op].name: everything.nodes[op]["fate"] for op in everything}
    assert (fates["drop_2"], fates["drop_1"], fates["back_0"]) == ("recomputed", "kept", "backward")
    drop_1, back_1 = (next(i for i, op in enumerate(plan.problem.ops) if op.name == n) for n in ("drop_1", "back_1"))
    assert everything.edges[drop_1, back_1]["bytes"] == 5 * 1024


def test_graph_figure() -> None:
    figure = recomputing_plan().plot_graph()
    assert legend_texts(figure) == ["kept", "recomputed", "backward"]
    assert figure.axes[0].get_title() == "around the peak of 37.9 KiB, at back_1 (red)"
    assert {"drop_1\n5.0 KiB", "back_1\n7.0 KiB"} <= {text.get_text() for text in figure.axes[0].texts}


def test_frontier_figure() -> None:
    model, args = make_step("attention")
    curve = placemat.frontier(model, args, points=3, time_limit_s=5)
    figure = curve.plot(peers={"a peer": [(curve.points[1].budget_bytes, 0.5)]})
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels[:3] == ["not yet decided", "lower bound", "placemat"]
    assert {"recompute everything", "every sqrt(n)-th op (Chen et al.)", "a peer"} <= set(labels)
    line = next(line for line in figure.axes[0].lines if line.get_label() == "placemat")
    assert set(line.get_xdata()) == {point.peak_bytes for point in curve}  # of the plans, where peers have theirs


def test_frontier_lines_are_steps() -> None:
    """A plan serves budgets from its peak on, a bound holds for those below its budget."""
    plan = keep_everything_plan()
    made = [(100, 90, 0.5, 0.4), (200, 170, 0.2, 0.1), (300, 300, 0.0, 0.0)]
    points = tuple(
        FrontierPoint(budget, peak, overhead, 0.0, bound, 0.0, 0.0, "feasible", "", 0.0, plan.schedule)
        for budget, peak, overhead, bound in made
    )
    axes = Frontier(points, (plan,)).plot().axes[0]
    bound, cheapest = axes.lines[:2]
    assert [bound.get_drawstyle(), cheapest.get_drawstyle()] == ["steps-post"] * 2
    assert list(cheapest.get_xdata()) == list(bound.get_xdata()) == [90, 100, 170, 200, 300]
    assert list(cheapest.get_ydata()) == [50, 50, 20, 20, 0]
    assert list(bound.get_ydata()) == [40, 10, 10, 0, 0]


def test_figures_on_axes_of_ones_own() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    assert recomputing_plan().plot(axes=axes) is figure


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib" or name == "placemat.figure"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(placemat.MissingExtra, match=r'pip install "placemat\[plots\]"'):
        recomputing_plan().plot()


class Missing:
    """Import system without matplotlib."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
