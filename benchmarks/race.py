"""Solvers on the same graphs, budgets and time limit: ours, Checkmate, CP-SAT intervals, rotor, Chen, min-cut.

    python -m benchmarks.race --json race.json --plot race.png          # from the root of the repository
    python -m benchmarks.race layered_100 unet --time-limit 20 --solver placemat --solver rotor

Each solver runs in a process of its own under a time and a memory limit. All plans are priced by the referee: the sum
of the seconds of what runs again, and the peak. "ours at its peak" is a second solve of ours, without a warm start
and under the same time limit, at the peak that the other one's plan has: it should cost no more.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.isolated import Outcome, run_isolated
from benchmarks.race_cases import GRAPHS, Graph, make
from benchmarks.race_page import plot, table
from benchmarks.reference.answer import Answer
from benchmarks.reference.solvers import MIN_CUT, OURS, SOLVERS, run
from placemat.baselines import save_all
from placemat.simulate import simulate

MAKING_LIMIT_S = 600.0
GRACE = 2.0  # a solver is killed after so many times its limit, and GRACE_S
GRACE_S = 60.0


@dataclass(frozen=True)
class Row:
    """One solver at one budget. Seconds of plans are sums of op costs; None where there is no such figure.

    Attributes:
        bound_s: no plan of the solver's family recomputes less, by the solver.
        seconds: wall clock of the solver, writing down its model included; `cpu_seconds` are those of all its threads.
        memory_bytes: highest resident memory of its process.
        ours_at_peak_s: recompute seconds of our plan for `peak_bytes`.
    """

    graph: str
    num_ops: int
    step_s: float
    keep_everything_bytes: int
    budget: str
    budget_bytes: int
    solver: str
    status: str
    recompute_s: float | None
    bound_s: float | None
    peak_bytes: int | None
    seconds: float
    cpu_seconds: float | None
    memory_bytes: int | None
    note: str
    ours_at_peak_s: float | None = None


@dataclass(frozen=True)
class Race:
    """Limits of every run."""

    time_limit_s: float
    memory_limit_bytes: int

    def solve(self, solver: str, graph: Graph, budget_bytes: int) -> Outcome:
        """An `Answer`, or why there is none."""
        return run_isolated(
            run,
            *(solver, graph.problem, budget_bytes, self.time_limit_s, graph.saved if solver == MIN_CUT else ()),
            time_limit_s=GRACE * self.time_limit_s + GRACE_S,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def row(self, solver: str, graph: Graph, budget: str, budget_bytes: int) -> Row:
        """Run a solver and price what it found."""
        problem = graph.problem
        outcome = self.solve(solver, graph, budget_bytes)
        answer = outcome.value or Answer(None, "none", None, outcome.failure or "")
        recompute_s = peak_bytes = ours_at_peak_s = None
        status = answer.status
        if answer.schedule is not None:
            simulation = simulate(problem, answer.schedule)
            recompute_s, peak_bytes = simulation.recompute_seconds, simulation.peak_bytes
            if peak_bytes > budget_bytes:
                status = "over the budget"
            if solver != OURS:
                ours_at_peak_s = self.ours_at(graph, peak_bytes)
        is_bounded = answer.lower_bound_seconds is not None and answer.lower_bound_seconds < float("inf")
        return Row(
            graph=graph.name,
            num_ops=problem.num_steps,
            step_s=problem.runtime_s,
            keep_everything_bytes=simulate(problem, save_all(problem)).peak_bytes,
            budget=budget,
            budget_bytes=budget_bytes,
            solver=solver,
            status=status,
            recompute_s=recompute_s,
            bound_s=answer.lower_bound_seconds if is_bounded else None,
            peak_bytes=peak_bytes,
            seconds=outcome.seconds,
            cpu_seconds=outcome.cpu_seconds,
            memory_bytes=outcome.memory_bytes,
            note=answer.note,
            ours_at_peak_s=ours_at_peak_s,
        )

    def ours_at(self, graph: Graph, peak_bytes: int) -> float | None:
        """Recompute seconds of our plan for another one's peak; None if we find none."""
        outcome = self.solve(OURS, graph, peak_bytes)
        if outcome.value is None or outcome.value.schedule is None:
            return None
        return simulate(graph.problem, outcome.value.schedule).recompute_seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=f"of {', '.join(GRAPHS)}; default: all")
    parser.add_argument("--solver", action="append", choices=list(SOLVERS), help="may be repeated; default: all")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="of a solver; default 60")
    parser.add_argument("--memory-limit", type=float, default=8.0, metavar="GB", help="of a solver; default 8")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, after each one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument("--pickle", type=Path, metavar="DIRECTORY", help="write the graphs there")
    arguments = parser.parse_args(argv)
    race = Race(arguments.time_limit, int(arguments.memory_limit * 1e9))
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "time_limit_s": race.time_limit_s,
        "memory_limit_bytes": race.memory_limit_bytes,
        "rows": [],
    }
    for name in arguments.graphs or list(GRAPHS):
        made = run_isolated(make, name, time_limit_s=MAKING_LIMIT_S)
        if made.value is None:
            print(f"{name}: {made.failure}", flush=True)
            continue
        graph: Graph = made.value
        if arguments.pickle is not None:
            arguments.pickle.mkdir(parents=True, exist_ok=True)
            (arguments.pickle / f"{name}.pkl").write_bytes(pickle.dumps(graph.problem))
        for budget, budget_bytes in graph.budgets():
            for solver in arguments.solver or list(SOLVERS):
                if solver == MIN_CUT and not graph.saved:
                    continue
                row = race.row(solver, graph, budget, budget_bytes)
                result["rows"].append(asdict(row))
                print(table([asdict(row)]).splitlines()[-1], flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot is not None:
        plot(result).savefig(arguments.plot, dpi=120)


if __name__ == "__main__":
    main()
