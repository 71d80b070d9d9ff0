"""Planning cost for readers: Markdown and a figure from the JSON of `benchmarks.growth`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placemat.plots import figure_of, new_axes
from placemat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = Mapping[str, Any]  # benchmarks.growth.Point, as JSON has it

STAGES = {
    "capture_s": "capture",
    "lowering_s": "lowering",
    "costing_s": "costing",
    "floor_s": "floor",
    "solving_s": "solving",
    "total_s": "total",
}
REASONS = """Why the slopes are what they are, by profiles (`--profile`):

- *Sequence and batch* change no graph: the same ops and values, other bytes and seconds. What differs is how hard the
  search is.
- *Capture* goes through the model op by op, in Python: half of it is Dynamo's symbolic execution, half AOTAutograd's
  trace of forward and backward with fake tensors. Every layer is traced anew, so it grows with their number, less a
  start that it shares; at 12 layers it is two thirds of planning.
- *Lowering* and *costing* go through ops and values a few times. Costing looks at each kind of op once, whatever the
  number of equal layers, and then hands every op its cost.
- *Floor* and the first plans of the search evaluate kept sets, each in time linear in the ops, and no more of them than
  400,000 ops' worth (`optimizer/greedy.py`): that part stops growing at some 800 ops. The other half makes schedules of
  the best sets, which goes through ops and values a few times for each.
- *Solving* grows with the memory rows that bind and with the values, not with their product (`docs/solver.md`).
- *Memory* is that of torch and transformers, and some 4 MiB a layer."""

_HEAD = ("axis", "value", "nodes", "ops", *STAGES.values(), "CPU", "process", "gap %", "recompute %")


def section(result: Mapping[str, Any]) -> str:
    """Markdown: the table, and the slope of every stage."""
    points = result["points"]
    return f"""## Planning cost as work grows

GPT-2 by layers, sequence length and batch (12 layers, 1,024 tokens, batch 4 where nothing else is said), on the meta
device, planned for half of the way from the lowest peak that is found at once to keep-everything, gap 1 %. Seconds; one
process a row, memory with torch itself. "slope" is the exponent of a power law through the first and the last row of an
axis: 0 does not grow, 1 grows with the work, 2 with its square.

{table(points)}

{slopes(points)}

![seconds of every stage](figures/planning_growth.png)

{REASONS}
"""


def table(points: Sequence[Point]) -> str:
    """Markdown, one line for each point."""
    return _markdown([_HEAD, ("---",) * len(_HEAD), *map(_cells, points)])


def slopes(points: Sequence[Point]) -> str:
    """Markdown: exponents by axis and stage."""
    head = ("slope by", *STAGES.values(), "process")
    lines: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for axis in dict.fromkeys(point["axis"] for point in points):
        own = sorted((point for point in points if point["axis"] == axis), key=lambda point: point["value"])
        if len(own) > 1:
            exponents = (slope(own[0], own[-1], stage) for stage in (*STAGES, "memory_bytes"))
            lines.append((axis, *(f"{exponent:.2f}" for exponent in exponents)))
    return _markdown(lines)


def slope(first: Point, last: Point, what: str) -> float:
    """log of the ratio of two amounts over log of the ratio of the work."""
    return math.log(max(last[what], 1e-9) / max(first[what], 1e-9)) / math.log(last["value"] / first["value"])


def plot(result: Mapping[str, Any]) -> Figure:
    """Seconds of every stage by the work, one panel for each axis, both logarithmic.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    axes = list(dict.fromkeys(point["axis"] for point in result["points"]))
    figure = figure_of(new_axes(4.5 * len(axes), 4.5))
    figure.clear()
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        own = [point for point in result["points"] if point["axis"] == axis]
        for stage, label in STAGES.items():
            panel.plot([p["value"] for p in own], [p[stage] for p in own], "o-", label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel(axis)
    panels[0].set_ylabel("seconds")
    panels[0].legend(fontsize="small")
    return figure


def _cells(point: Point) -> tuple[str, ...]:
    return (
        point["axis"],
        str(point["value"]),
        str(point["num_nodes"]),
        str(point["num_ops"]),
        *(f"{point[stage]:.2f}" for stage in STAGES),
        f"{point['cpu_s']:.2f}",
        format_bytes(point["memory_bytes"]),
        f"{100 * point['gap']:.2f}",
        f"{100 * point['recompute_share']:.2f}",
    )


def _markdown(lines: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
