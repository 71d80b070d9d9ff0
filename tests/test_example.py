"""The main example runs as a user runs it, in a process of its own, at a size that takes seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_gpt2
from placemat.units import parse_bytes

SCRIPT = Path(train_gpt2.__file__)
TINY = ["--layers=2", "--width=32", "--sequence=32", "--batch=4", "--steps=12"]


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600, check=False
    )


def table_of(output: str) -> str:
    """What is printed below the final table's title."""
    parts = re.split(r"^ +original +placemat$", output, flags=re.MULTILINE)
    assert len(parts) == 2, output
    return parts[1]


def cell(table: str, row: str) -> str:
    """Last cell of the row that starts with this name."""
    found = re.search(rf"^{re.escape(row)}\s{{2,}}.*?(\S(?: ?\S)*)$", table, re.MULTILINE)
    assert found is not None, f"no row {row!r} in:\n{table}"
    return found[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Final table of one run at the default budget, and the plan that it saved."""
    path = tmp_path_factory.mktemp("example") / "plan.json"
    done = run_example(*TINY, f"--save-plan={path}")
    assert done.returncode == 0, done.stderr
    return table_of(done.stdout), path


def test_loss_falls(finished: tuple[str, Path]) -> None:
    first, last = map(float, cell(finished[0], "loss, first and last step").split(" -> "))
    assert last < first


def test_measured_peak_is_the_predicted_one_and_below_eager(finished: tuple[str, Path]) -> None:
    table, _ = finished
    row = re.search(r"^measured peak\s+(\d+\.\d \w+)\s+(\d+\.\d \w+)$", table, re.MULTILINE)
    assert row is not None, table
    assert row[2] == cell(table, "predicted peak")
    assert parse_bytes(row[2]) < parse_bytes(row[1])


def test_gradients_are_bitwise_equal(finished: tuple[str, Path]) -> None:
    equal, compared = map(int, cell(finished[0], "gradients bitwise equal").split(" of "))
    assert equal == compared > 20
    assert cell(finished[0], "largest gradient difference") == "0"


def test_saved_plan_runs_in_a_new_process(finished: tuple[str, Path]) -> None:
    table, path = finished
    done = run_example(*TINY, f"--plan={path}")
    assert done.returncode == 0, done.stderr
    again = table_of(done.stdout)
    for row in ("predicted peak", "measured peak", "loss, first and last step"):
        assert cell(again, row) == cell(table, row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget=lots"], "'lots'"),
        (["--budget-fraction=nan"], "nan"),
        (["--budget-fraction=0.5", "--budget=1 GiB"], "not allowed with"),
        (["--width=30"], "not a multiple of --heads 4"),
        (["--steps=0"], "must be at least 1"),
        (["--plan=missing.json"], "no file missing.json"),
    ],
)
def test_bad_arguments_are_told_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status: object
    try:
        status = train_gpt2.main([*TINY, "--layers=1", *arguments])
    except SystemExit as stop:  # from argparse
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
