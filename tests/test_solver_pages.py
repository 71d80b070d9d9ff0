"""The pages of the solver benchmarks: what they say where ours is worse, and slopes."""

from __future__ import annotations

import os

import pytest

from benchmarks import growth_page, race_page
from benchmarks.isolated import run_isolated
from benchmarks.race import Race
from benchmarks.race_cases import Graph
from benchmarks.reference.solvers import OURS
from tests.instances import training_chain

LIMITS = {"time_limit_s": 60.0, "memory_limit_bytes": 8 * 10**9}


def row(
    solver: str, recompute_s: float | None, ours_at_peak_s: float | None = None, **other: object
) -> dict[str, object]:
    figures = {"graph": "g", "num_ops": 9, "step_s": 100.0, "budget": "0.9", "budget_bytes": 1000, "status": "feasible"}
    figures |= {
        "bound_s": None,
        "peak_bytes": 900,
        "seconds": 1.0,
        "cpu_seconds": None,
        "memory_bytes": None,
        "note": "",
    }
    return figures | {"solver": solver, "recompute_s": recompute_s, "ours_at_peak_s": ours_at_peak_s} | other


def test_a_race_says_where_ours_is_worse() -> None:
    rows = [row(OURS, 5.0), row("rotor", 4.0, 4.0), row("Chen sqrt(n)", 6.0, 7.0), row("Chen greedy", 5.0, None)]
    assert list(race_page.losses(rows)) == [
        "g at 0.9: rotor 4.000 %, ours 5.000 at the same budget",
        "g at 0.9: Chen sqrt(n) 6.000 %, ours 7.000 at its peak of 900 bytes",
        "g at 0.9: Chen greedy 5.000 %, ours no plan at its peak of 900 bytes",
    ]
    page = race_page.section({**LIMITS, "rows": rows})
    assert "**7.000, worse**" in page
    assert "Nowhere" not in page


def test_plans_over_the_budget_and_failures_are_none() -> None:
    over = row("rotor", 1.0, 9.0, peak_bytes=1001, status="over the budget")
    dead = row("Chen greedy", None, note="killed after 9 s", status="none", peak_bytes=None)
    page = race_page.section({**LIMITS, "rows": [row(OURS, 5.0), over, dead]})
    assert "Nowhere in this table" in page
    assert page.count("| no plan |") == 2
    assert "none: killed after 9 s" in page


def test_a_slope_is_the_exponent_of_the_work() -> None:
    stages = dict.fromkeys((*growth_page.STAGES, "cpu_s", "gap", "recompute_share"), 1.0)
    points = [
        {
            "axis": "layers",
            "value": n,
            "num_nodes": n,
            "num_ops": n,
            "memory_bytes": 7,
            **stages,
            "solving_s": 0.5 * n**2,
        }
        for n in (2, 4, 8)
    ]
    assert growth_page.slope(points[0], points[-1], "solving_s") == pytest.approx(2.0)
    assert "| layers | 0.00 | 0.00 | 0.00 | 0.00 | 2.00 | 0.00 | 0.00 |" in growth_page.section({"points": points})


def test_what_blows_up_alone_is_told() -> None:
    out_of_memory = run_isolated(bytearray, 10**11, time_limit_s=60.0, memory_limit_bytes=4 * 10**9)
    assert (out_of_memory.value, out_of_memory.failure) == (None, "out of memory; limit 4.0 GB")
    died = run_isolated(os._exit, 3, time_limit_s=60.0)
    assert died.failure == "died with exit code 3"


@pytest.mark.slow
def test_a_row_has_our_plan_at_the_peak_of_another() -> None:
    graph = Graph("chain", training_chain(12))
    (_, budget_bytes), _ = graph.budgets()
    made = Race(5.0, 4 * 10**9).row("Chen greedy", graph, "half", budget_bytes)
    assert made.status == "feasible"
    assert made.recompute_s is not None
    assert made.ours_at_peak_s is not None
    assert made.ours_at_peak_s <= made.recompute_s
