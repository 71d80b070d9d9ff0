"""The main example runs as a user runs it, in a process of its own, at a size that takes seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "train_gpt2.py"
TINY = ["--layers=2", "--width=32", "--sequence=32", "--batch=4", "--steps=12"]


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600, check=False
    )


def cell(output: str, row: str) -> str:
    """Last cell of the row that starts with this name."""
    found = re.search(rf"^{re.escape(row)}\s{{2,}}.*?(\S(?: ?\S)*)$", output, re.MULTILINE)
    assert found is not None, f"no row {row!r} in:\n{output}"
    return found[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output of one run at the default budget, and the plan that it saved."""
    path = tmp_path_factory.mktemp("example") / "plan.json"
    done = run_example(*TINY, f"--save-plan={path}")
    assert done.returncode == 0, done.stderr
    return done.stdout, path


def test_loss_falls(finished: tuple[str, Path]) -> None:
    first, last = map(float, cell(finished[0], "loss, first and last step").split(" -> "))
    assert last < first


def test_measured_peak_is_the_predicted_one_and_below_eager(finished: tuple[str, Path]) -> None:
    output, _ = finished
    row = re.search(r"^measured peak\s+(\d+\.\d) KiB\s+(\d+\.\d) KiB$", output, re.MULTILINE)
    assert row is not None, output
    assert f"{row[2]} KiB" == cell(output, "predicted peak")
    assert float(row[2]) < float(row[1])


def test_gradients_are_bitwise_equal(finished: tuple[str, Path]) -> None:
    equal, compared = map(int, cell(finished[0], "gradients bitwise equal").split(" of "))
    assert equal == compared > 20
    assert cell(finished[0], "largest gradient difference") == "0"


def test_saved_plan_runs_in_a_new_process(finished: tuple[str, Path]) -> None:
    output, path = finished
    done = run_example(*TINY, f"--plan={path}")
    assert done.returncode == 0, done.stderr
    for row in ("predicted peak", "measured peak", "loss, first and last step"):
        assert cell(done.stdout, row) == cell(output, row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget=lots"], "'lots'"),
        (["--budget=1 KiB"], "error: "),
        (["--budget-fraction=nan"], "nan"),
        (["--budget-fraction=0.5", "--budget=1 GiB"], "not allowed with"),
        (["--width=30"], "not a multiple of --heads 4"),
        (["--steps=0"], "must be at least 1"),
        (["--plan=missing.json"], "no file missing.json"),
    ],
)
def test_bad_arguments_are_told_without_a_traceback(arguments: list[str], message: str) -> None:
    done = run_example(*TINY, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
