"""Table: one workload's results as rows of text, and the verdict on each point of a peer."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contest.results import Estimate, Point, Results
from benchmarks.peers import PEERS, PlacematPlans
from placemat.units import format_bytes

PEER_HEADER = (
    "setting",
    "peak",
    "overhead",
    "by op costs",
    "step beside eager's",
    "ours at this peak",
    "ours less theirs",
    "verdict",
)
OUR_HEADER = (
    "budget",
    "predicted",
    "measured",
    "overhead",
    "by op costs",
    "predicted overhead",
    "gap",
    "solved in",
    "planned in",
    "bits",
)
LESS, SAME, MORE = "ours costs less", "the same within noise", "OURS COSTS MORE"
BELOW, NONE, OVER = "BELOW OUR FLOOR", "NO PLAN OF OURS", "OURS IS OVER ITS BUDGET"
VERDICTS = (LESS, SAME, MORE, BELOW, NONE, OVER)


def verdict(results: Results, point: Point) -> str:
    """Whether our plan for a peer's measured peak costs no more than the peer; "" if either did not run."""
    if point.peak_bytes is None:
        return ""
    ours = results.ours_at(point.peak_bytes)
    if ours is None:
        return ""
    if ours.failure:
        return BELOW if ours.failure.startswith("BudgetTooSmall") else NONE
    if (results.twin(ours).peak_bytes or 0) > point.peak_bytes:
        return OVER
    difference = results.difference(ours, point)
    if difference is None:
        return ""
    if abs(difference.value) <= difference.margin:
        return SAME
    return LESS if difference.value < 0 else MORE


def outcome(point: Point) -> str:
    """How a step compares with eager's, in words."""
    if point.failure:
        return point.failure
    if point.comparison is None:
        return "not run"
    comparison = point.comparison
    parts = {
        "loss": comparison.loss,
        "gradients": comparison.gradients,
        "buffers": comparison.buffers,
        "random state": comparison.random_state,
    }
    error = f"(error {comparison.worst_error:.2g} of {comparison.worst_name})"
    wrong = [name for name, status in parts.items() if status == "wrong"]
    if wrong:
        return f"WRONG {', '.join(wrong)} {error}"
    return comparison.verdict if comparison.verdict == "bitwise" else f"close {error}"


def percent(estimate: Estimate | None) -> str:
    """+12.3 % ± 0.4, or nothing."""
    return "" if estimate is None else f"{100 * estimate.value:+.1f} % ± {100 * estimate.margin:.1f}"


def _exactly(overhead: float | None) -> str:
    return "" if overhead is None else f"{overhead:+.1%}"


def peer_rows(results: Results, peer: str) -> list[tuple[str, ...]]:
    """A row for each point of a peer, in the order of peaks, failures last; points that ran the same are one row."""
    groups: dict[str, list[Point]] = {}
    for point in results.of([peer]):
        groups.setdefault(results.twin(point).key, []).append(point)
    firsts = sorted((group[0] for group in groups.values()), key=lambda p: (p.peak_bytes is None, -(p.peak_bytes or 0)))
    rows: list[tuple[str, ...]] = []
    for first in firsts:
        ours = None if first.peak_bytes is None else results.ours_at(first.peak_bytes)
        rows.append(
            (
                "; ".join(point.label for point in groups[results.twin(first).key]),
                "" if first.peak_bytes is None else format_bytes(first.peak_bytes),
                percent(results.overhead(first)),
                _exactly(results.overhead_of_ops(first)),
                outcome(first),
                "" if ours is None or ours.failure else percent(results.overhead(ours)),
                "" if ours is None or ours.failure else percent(results.difference(ours, first)),
                verdict(results, first),
            )
        )
    return rows


def our_rows(results: Results) -> list[tuple[str, ...]]:
    """A row for each plan of ours, by falling budget."""
    plans = [point for point in results.of([PlacematPlans.name]) if point.plan is not None]
    rows: list[tuple[str, ...]] = []
    for point in sorted(plans, key=lambda p: -(p.plan.budget_bytes if p.plan else 0)):
        plan = point.plan
        assert plan is not None
        ran = results.twin(point)
        rows.append(
            (
                format_bytes(plan.budget_bytes),
                "original forward" if plan.runs_original else format_bytes(plan.predicted_peak_bytes),
                "" if ran.peak_bytes is None else format_bytes(ran.peak_bytes),
                percent(results.overhead(point)),
                _exactly(results.overhead_of_ops(point)),
                f"{plan.predicted_overhead:+.1%}",
                f"{plan.gap:.1%}",
                f"{plan.solve_seconds:.1f} s",
                f"{plan.planning_seconds:.1f} s",
                outcome(ran),
            )
        )
    return rows


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one to the left."""
    lines = [tuple(header), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if k else cell.ljust(w) for k, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def format_table(results: Results) -> str:
    """All of one workload, as text."""
    parts = [f"{results.workload}: {results.title}"]
    for peer in PEERS:
        if rows := peer_rows(results, peer):
            parts.append(f"{peer}\n{align(PEER_HEADER, rows)}")
    parts.append(f"{PlacematPlans.name}\n{align(OUR_HEADER, our_rows(results))}")
    return "\n\n".join(parts)
