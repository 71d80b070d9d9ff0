"""The page of the side-by-side benchmark, from the results of `benchmarks.side_by_side`.

python -m benchmarks.report                                 # benchmarks/results/*.json to docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contest.figures import save_figure
from benchmarks.contest.results import Point, Results
from benchmarks.contest.table import OUR_HEADER, PEER_HEADER, VERDICTS, our_rows, peer_rows, percent, verdict
from benchmarks.peers import PEERS, PlacematPlans
from benchmarks.side_by_side import RESULTS
from benchmarks.work import WORKS
from placemat.units import format_bytes

_HEAD = """# Beside what people use today

Real training steps (forward, loss, backward) on one thread: what is measured here is what ran, nothing is estimated
unless it is called predicted. This page is written by `python -m benchmarks.report` from the results of

    python -m benchmarks.side_by_side                # all workloads; a workload's name runs that one
    python -m benchmarks.report

**How.** Every contender has a process of its own. Steps are timed in turns, in an order drawn for each round, one
process at a time and each step after another one of the same process, by the processor's clock, with malloc holding
freed memory as allocators of accelerators do. An overhead is the median over rounds of a step's time over that of
eager's step in the same round; ± is twice the standard error of that median, estimated from the median absolute
deviation. Two processes that run the same differ by up to 2 % of a step, and keep to that; of what was timed in three
batches or more, each with new processes for all, eager's too, ± is at least twice the standard error of the batches'
medians. Peaks are replayed from the allocator's events, for all in the same way, with parameters, buffers and inputs.
*By op costs* is what PyTorch dispatched in one step, each call at what one like it takes alone, as `Measured` costs it,
over the same of eager's step: free of noise, and blind to Python and caches.
Loss, gradients, buffers and the random state after a step from a fixed seed are compared with eager's: *bitwise*;
*close*, with an error (root mean square, as a part of the tensor's) under 0.01; or *WRONG*. The tensor with the largest
error is named; 1e+09 stands for counters that differ.

**Dominance.** For each peak that a peer reaches, placemat plans for that many bytes, and both are timed in the same
rounds. *Ours less theirs* is the median over rounds of the difference, as a part of eager's step; the verdict is *the
same within noise* if that is smaller than its margin. Where placemat loses, the verdict is in capitals. Pairs in which
it seemed to lose were timed again, up to four times as many rounds, and all their rounds count; so were ample budgets.

**Ample budgets** run the original forward, and still the step takes up to 3 % longer than in eager's process. A process
that has traced something, be it one linear layer through torch.compile, runs eager's own step that much slower (the
chain's: 1.4 % after the linear layer, 3.5 after a plan; with or without garbage collection): its heap is another.
In one process, taking turns, the chain's step through ours and eager's differ by 0.05 %.

**Peers.** `torch.utils.checkpoint` (non-reentrant) around every, every second and every fourth block, and around
segments of about sqrt(n) of n blocks (Chen et al. 2016) where blocks form a chain. *Selective checkpointing* with
`create_selective_checkpoint_contexts`: every block is wrapped; attention, convolutions and every, or every second,
matrix product is kept. *activation_memory_budget*: PyTorch's min-cut partitioner through torch.compile with backend
aot_eager, for each of its solvers, as it is and with random operators kept: below 1 it draws new random numbers when it
recomputes (pytorch issue 190758), so models with dropout train on wrong gradients. BatchNorm is decomposed for it; as
it is, backward would refuse to run. Both checkpoint peers run BatchNorm twice, and its running statistics move twice.

ckptplan, rockmate and the policy of xformers plan on CUDA devices only, and are not here.

**placemat.** Each plan is made from the start for its budget, with measured costs, a gap of 1 % and a limit of 20
seconds to solve unless `--time-limit` says otherwise; then `placemat.apply`.
"""


def render(listed: Sequence[Results], figures: str, note: str | None = None) -> str:
    """The page as Markdown; `figures` is the folder of the figures as seen from the page."""
    parts = [_HEAD, *([f"**These runs.** {note}\n"] if note else []), _machines(listed), _overview(listed)]
    parts += [_section(results, figures) for results in listed]
    return "\n".join(parts)


def _machines(listed: Sequence[Results]) -> str:
    by_machine: dict[str, list[str]] = {}
    for results in listed:
        words = ", ".join(f"{name} {value}" for name, value in results.machine.items())
        by_machine.setdefault(words, []).append(results.workload)
    lines = [
        f"- {words}" + (f": {', '.join(names)}" if len(by_machine) > 1 else "") for words, names in by_machine.items()
    ]
    return "**Machine.**\n\n" + "\n".join(lines) + "\n"


def _overview(listed: Sequence[Results]) -> str:
    header = [
        "workload",
        "eager peak",
        "step",
        "smallest peak of a peer with right gradients",
        "our floor",
        "ample budget",
    ]
    rows = []
    for results in listed:
        counts = Counter(verdict(results, point) for point in _distinct(results))
        rows.append(
            [
                f"[{results.workload}](#{results.workload})",
                *_eager(results),
                _peer_floor(results),
                _our_floor(results),
                percent(None if (ample := results.ample()) is None else results.overhead(ample)),
                *(str(counts[name] or "") for name in VERDICTS),
            ]
        )
    note = (
        "Counted are the distinct points of peers by verdict. *Ample budget*: what a step of ours costs over eager's "
        "when the budget is so large that the original forward runs.\n"
    )
    return f"## All workloads\n\n{note}\n{_markdown([*header, *VERDICTS], rows)}\n"


def _section(results: Results, figures: str) -> str:
    plans = [p.plan for p in results.of([PlacematPlans.name]) if p.plan is not None]
    parts = [f"## {results.workload}\n\n{results.title}. `python -m benchmarks.side_by_side {results.workload}`\n"]
    if plans:
        first = plans[0]
        parts.append(
            f"{first.ops} ops. The first plan took {first.planning_seconds:.1f} s: {first.capture_seconds:.1f} s to "
            f"capture, {first.solve_seconds:.1f} s to solve, the rest to measure operators, once for all plans.\n"
        )
    parts.append(f"![overhead over measured peak]({figures}/{results.workload}.png)\n")
    for peer in PEERS:
        if rows := peer_rows(results, peer):
            parts.append(f"**{peer}**\n\n{_markdown(PEER_HEADER, rows)}\n")
    parts.append(f"**{PlacematPlans.name}**\n\n{_markdown(OUR_HEADER, our_rows(results))}\n")
    failed = [p for p in results.of([PlacematPlans.name]) if p.failure]
    parts += [f"- {point.label}: {point.failure}" for point in failed]
    return "\n".join(parts) + "\n"


def _distinct(results: Results) -> list[Point]:
    return [point for point in results.of(PEERS) if results.twin(point) is point]


def _eager(results: Results) -> tuple[str, str]:
    peak_bytes = next((p.peak_bytes for p in results.of(["eager"])), None)
    seconds = results.eager_seconds()
    return "" if peak_bytes is None else format_bytes(peak_bytes), "" if seconds is None else f"{seconds:.3f} s"


def _peer_floor(results: Results) -> str:
    right = [p for p in results.of(PEERS) if p.peak_bytes and p.comparison and p.comparison.has_right_gradients]
    if not right:
        return "none"
    least = min(right, key=lambda p: p.peak_bytes or 0)
    return f"{format_bytes(least.peak_bytes or 0)} ({least.key})"


def _our_floor(results: Results) -> str:
    plan = next((p.plan for p in results.of([PlacematPlans.name]) if p.plan is not None), None)
    if plan is None:
        return "no plan"
    return format_bytes(plan.floor_bytes) + (" (proven)" if plan.floor_proven else "")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--note", metavar="TEXT", help="what to know of these runs")
    options = parser.parse_args(arguments)
    paths = sorted(options.results.glob("*.json"), key=lambda path: [*WORKS].index(path.stem))
    if not paths:
        parser.error(f"{options.results} has no results; run `python -m benchmarks.side_by_side` first")
    listed = [Results.load(path) for path in paths]
    folder = options.page.parent / "figures"
    for results in listed:
        save_figure(results, folder / f"{results.workload}.png")
    options.page.write_text(render(listed, os.path.relpath(folder, options.page.parent), options.note))


if __name__ == "__main__":
    main()
