"""docs/benchmarks_solver.md from the JSON of the race and of the growth of planning.

python -m benchmarks.race --json race.json --plot docs/figures/solver_race.png
python -m benchmarks.growth --json growth.json --plot docs/figures/planning_growth.png
python -m benchmarks.solver_page --race race.json --growth growth.json > docs/benchmarks_solver.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import growth_page, race_page

HEAD = """# The solver beside others, and what planning costs

`benchmarks.solver_page` writes this page from what these measure:

    python -m benchmarks.race --json race.json --plot docs/figures/solver_race.png
    python -m benchmarks.growth --json growth.json --plot docs/figures/planning_growth.png
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--race", type=Path, metavar="FILE")
    parser.add_argument("--growth", type=Path, metavar="FILE")
    parser.add_argument("--note", metavar="TEXT", help="what to know of these runs")
    arguments = parser.parse_args(argv)
    parts = [HEAD] if arguments.note is None else [HEAD, f"**{arguments.note}**\n"]
    if arguments.race is not None:
        parts.append(race_page.section(json.loads(arguments.race.read_text())))
    if arguments.growth is not None:
        parts.append(growth_page.section(json.loads(arguments.growth.read_text())))
    print("\n".join(parts).rstrip())


if __name__ == "__main__":
    main()
