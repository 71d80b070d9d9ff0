"""The solver race for readers: Markdown and a figure from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.reference.solvers import GAP, OURS, SOLVERS
from placemat.plots import figure_of, new_axes
from placemat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # benchmarks.race.Row, as JSON has it

_HEAD = (
    "graph",
    "ops",
    "budget",
    "solver",
    "recompute %",
    "bound %",
    "s",
    "CPU s",
    "memory",
    "peak",
    "ours at its peak %",
    "",
)
_ORDER = {name: i for i, name in enumerate(SOLVERS)}


def is_worse(ours_s: float | None, theirs_s: float, step_s: float) -> bool:
    """Whether ours costs more, beyond the gap that we solve to and a millionth of the step."""
    return ours_s is None or ours_s > (1 + GAP) * theirs_s + 1e-6 * step_s


def section(result: Mapping[str, Any]) -> str:
    """Markdown: what was run, where we lose, and the table."""
    lost = list(losses(result["rows"]))
    verdict = "\n".join(f"- {line}" for line in lost) if lost else "Nowhere in this table."
    return f"""## Solver race

Every solver on the same graph and budget, {result["time_limit_s"]:g} s and
{result["memory_limit_bytes"] / 1e9:g} GB each, in a process of its own; all but ours are written here from the papers
(`benchmarks/reference/`). "recompute" and "bound" are shares of the step's seconds, as sums of op costs; a bound holds
for the solver's own family of plans (CP-SAT: at most two runs of an op; Checkmate: each op once a stage). "ours at its
peak" is what our plan costs at the simulated peak of the other one's, without being shown it. Budgets of
layered DAGs are shares of the keep-everything peak, those of networks shares of the way to it from the lowest peak that
is found at once.

**Where ours is worse** (at the same budget, or at a plan's own peak):

{verdict}

![cost of every solver's plans](figures/solver_race.png)

{table(result["rows"])}
"""


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """One line per plan of others that ours does not match."""
    ours = {(row["graph"], row["budget"]): row["recompute_s"] for row in rows if row["solver"] == OURS}
    for row in rows:
        if row["solver"] == OURS or not _fits(row):
            continue
        what = f"{row['graph']} at {row['budget']}: {row['solver']} {_percent(row, row['recompute_s'])} %"
        case = (row["graph"], row["budget"])
        if case in ours and is_worse(ours[case], row["recompute_s"], row["step_s"]):
            yield f"{what}, ours {_percent(row, ours[case]) or 'no plan'} at the same budget"
        if is_worse(row["ours_at_peak_s"], row["recompute_s"], row["step_s"]):
            at_peak = _percent(row, row["ours_at_peak_s"]) or "no plan"
            yield f"{what}, ours {at_peak} at its peak of {row['peak_bytes']:,} bytes"


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line for each row."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(result: Mapping[str, Any]) -> Figure:
    """Recompute share by solver, above, and seconds, below, one group for each graph and budget.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    rows = result["rows"]
    cases = list(dict.fromkeys((row["graph"], row["budget"]) for row in rows))
    figure = figure_of(new_axes(max(8.0, 1.1 * len(cases)), 8.0))
    figure.clear()
    shares, seconds = figure.subplots(2, 1, sharex=True)
    solvers = sorted({row["solver"] for row in rows}, key=_ORDER.__getitem__)
    for i, solver in enumerate(solvers):
        own = [row for row in rows if row["solver"] == solver]
        at = [cases.index((row["graph"], row["budget"])) + 0.8 * ((i + 0.5) / len(solvers) - 0.5) for row in own]
        is_there = [_fits(row) for row in own]
        shares.plot(
            [x for x, there in zip(at, is_there, strict=True) if there],
            [100 * row["recompute_s"] / row["step_s"] for row, there in zip(own, is_there, strict=True) if there],
            *("o",),
            label=solver,
        )
        seconds.plot(at, [max(row["seconds"], 1e-2) for row in own], "o", label=solver)
    shares.set_yscale("symlog", linthresh=1.0)  # from nothing to a hundred times the step
    shares.set_ylim(bottom=0.0)
    shares.set_ylabel("recompute, % of the step\n(no marker: no plan)")
    seconds.set_ylabel("seconds")
    seconds.set_yscale("log")
    seconds.axhline(result["time_limit_s"], color="black", linewidth=0.8, linestyle=":")
    seconds.set_xticks(range(len(cases)), [f"{graph}\n{budget}" for graph, budget in cases], rotation=45, ha="right")
    shares.legend(ncols=4, fontsize="small")
    return figure


def _cells(row: Row) -> tuple[str, ...]:
    if row["solver"] == OURS or not _fits(row):
        at_peak = ""
    else:
        at_peak = _percent(row, row["ours_at_peak_s"]) or "no plan"
        if is_worse(row["ours_at_peak_s"], row["recompute_s"], row["step_s"]):
            at_peak = f"**{at_peak}, worse**"
    plan = _percent(row, row["recompute_s"]) if _fits(row) else "no plan"
    return (
        row["graph"],
        str(row["num_ops"]),
        row["budget"],
        row["solver"],
        plan,
        _percent(row, row["bound_s"]),
        f"{row['seconds']:.1f}",
        "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.1f}",
        "" if row["memory_bytes"] is None else format_bytes(row["memory_bytes"]),
        "" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
        at_peak,
        row["status"] if _fits(row) else f"{row['status']}: {row['note']}".removesuffix(": "),
    )


def _fits(row: Row) -> bool:
    return row["recompute_s"] is not None and row["peak_bytes"] <= row["budget_bytes"]


def _percent(row: Row, seconds: float | None) -> str:
    return "" if seconds is None else f"{100 * seconds / row['step_s']:.3f}"
