"""placemat beside its peers on real training steps: measured peak, measured overhead, and whether anything changed.

    python -m benchmarks.side_by_side                           # all workloads, from the root of the repository
    python -m benchmarks.side_by_side gpt2 --peers torch.utils.checkpoint
    python -m benchmarks.report                                 # docs/benchmarks.md and its figures from the results

Every contender runs in a process of its own with one thread. Steps are timed in turns, one process at a time, by the
processor's clock, and an overhead is the median over rounds of a step's time over that of eager's step in the same
round. Peaks are replayed from the allocator's events, for all in the same way (`placemat.measure`), with parameters,
buffers and inputs. Loss, gradients, buffers and the random state after a step from a fixed seed are compared with
eager's. For each peak that a peer reaches, placemat plans for that budget, and both are timed in the same rounds.

Results go to one JSON file for each workload, after each stage; what a file has is not run again, so a run that was
interrupted goes on where it was. `--again` starts anew.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contest.contest import Contest, Effort
from benchmarks.contest.results import Results, this_machine
from benchmarks.contest.table import format_table
from benchmarks.peers import PEERS
from benchmarks.work import WORKS
from placemat.cost_models.cache import CACHE_DIR_VARIABLE

RESULTS = Path("benchmarks/results")


def run(name: str, peers: Sequence[str], effort: Effort, folder: Path, again: bool) -> Results:
    """Run or complete one workload; costs of operators are measured anew for each."""
    path = folder / f"{name}.json"
    if again:
        path.unlink(missing_ok=True)
        shutil.rmtree(path.with_suffix(".plans"), ignore_errors=True)
    results = Results.load(path) if path.exists() else Results(name, WORKS[name].title, this_machine())
    if results.machine != this_machine():
        raise SystemExit(f"{path} is of another machine or version: {results.machine}. Remedy: --again, or --results.")
    os.environ[CACHE_DIR_VARIABLE] = str(path.with_suffix(".plans").resolve() / "costs")
    Contest(results, path, effort).run(peers)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKS)}; default: all but those for tests"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--together", type=int, default=Effort.together, help="contenders timed in turns beside eager")
    parser.add_argument("--points", type=int, default=Effort.frontier_points, help="plans of ours beside peers' peaks")
    parser.add_argument("--time-limit", type=float, default=Effort.time_limit_s, help="seconds to solve one plan")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument("--again", action="store_true", help="drop what the results have")
    options = parser.parse_args(arguments)
    names = options.workloads or [name for name in WORKS if not name.startswith("tiny")]
    if unknown := sorted(set(names) - WORKS.keys()):
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(WORKS)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("placemat").setLevel(logging.WARNING)
    effort = Effort(options.rounds, options.together, options.points, options.time_limit)
    for name in names:
        print(format_table(run(name, options.peers, effort, options.results, options.again)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
