"""The command line: what it prints, what it writes and how it exits."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placemat import cli
from placemat.graph.errors import PlacematError
from placemat.plan import Plan

NETS = """
import torch
from torch import nn

def total(out):
    return out.sum()

def build():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)]
    return nn.Sequential(*layers), (torch.randn(64, 16),), {}, total

def wider():
    return nn.Sequential(nn.Linear(32, 32)), (torch.randn(64, 32),)

def wrong():
    return nn.Linear(2, 2), torch.randn(2, 2)

def loud():
    import ctypes, os
    print("from Python")
    os.write(1, b"from a library\\n")
    ctypes.CDLL(None).puts(b"from a buffer of C")
    return build()

def its_loss(out):
    return out.sum() / (1 // 0)

def fails():
    return (*build()[:3], its_loss)

def broken():
    raise KeyError("its own")
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cli_nets", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    command = ["plan", "cli_nets:build", "--budget-fraction", "0.3", "--out", "plan.json", "--time-limit", "5"]
    assert cli.main(command) == cli.DONE
    capsys.readouterr()
    return tmp_path / "plan.json"


def output(capsys: pytest.CaptureFixture[str], *command: str, code: int = cli.DONE) -> Any:
    """JSON that a command printed."""
    assert cli.main([*command, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_plan_and_show(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load(planned)
    assert cli.main(["show", "plan.json"]) == cli.DONE
    assert capsys.readouterr().out == f"{plan}\n"
    shown = output(capsys, "show", "plan.json")
    assert shown["predicted_peak_bytes"] == plan.predicted_peak_bytes
    assert shown["breakdown"] == plan.breakdown
    assert cli.main(["show", "plan.json", "--explain", "2", "--diff", "plan.json"]) == cli.DONE
    assert capsys.readouterr().out == f"{plan.explain('2')}\n\n{plan.diff(plan)}\n"
    Plan.save(dataclasses.replace(plan, budget_bytes=2**30), "ample.json")
    assert cli.main(["show", "ample.json", "--checkpoint-modules"]) == cli.DONE
    assert "none: the step fits as it is" in capsys.readouterr().out


def test_images(planned: Path) -> None:
    assert cli.main(["show", "plan.json", "--plot", "memory.png", "--plot-graph", "graph.svg"]) == cli.DONE
    assert (planned.parent / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (planned.parent / "graph.svg").read_text()


def test_budgets_are_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    ample = output(capsys, "plan", "cli_nets:build", "--budget", "8 GiB", "--reserved", "1 KiB")
    assert (ample["budget_bytes"], ample["reserved_bytes"], ample["runs_original"]) == (8 * 2**30, 1024, True)


def test_planning_for_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "cli_nets:build", "--budget", "1 GiB", "--device", "meta", "--cost-device", "H100 SXM"]
    assert "H100" in output(capsys, *command)["cost_source"]


def test_check(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = output(capsys, "check", "plan.json", "cli_nets:build")
    assert checked["ok"]
    assert checked["different"] == []
    assert checked["measured_peak_bytes"] == checked["predicted_peak_bytes"] <= checked["budget_bytes"]


def test_a_broken_budget_fails_the_check(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load(planned)
    replace(plan, budget_bytes=plan.predicted_peak_bytes - 1).save(planned)
    assert not output(capsys, "check", "plan.json", "cli_nets:build", code=cli.CHECK_FAILED)["fits"]


def test_frontier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["frontier", "cli_nets:build", "--points", "3", "--time-limit", "5", "--plot", "curve.png"]
    points = output(capsys, *command)["points"]
    assert [point["overhead"] for point in points] == sorted((p["overhead"] for p in points), reverse=True)
    assert points[-1]["overhead"] == 0.0
    assert (tmp_path / "curve.png").exists()


def test_exit_codes_of_refusals(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = output(capsys, "plan", "cli_nets:build", "--budget", "1 KiB", code=cli.BUDGET_TOO_SMALL)
    assert small["error"] == "BudgetTooSmall"
    assert small["minimum_budget_bytes"] > 1024
    assert output(capsys, "check", "plan.json", "cli_nets:wider", code=cli.REFUSED)["error"] == "PlanMismatch"
    assert (
        output(capsys, "plan", "cli_nets:build", "--budget", "8 apples", code=cli.REFUSED)["error"] == "PlacematError"
    )
    planned.write_text("{}")
    assert cli.main(["show", "plan.json"]) == cli.REFUSED
    assert capsys.readouterr().err.startswith("PlacematError: plan.json is JSON but no plan file")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["show", "none.json"], "No such file"),
        (["plan", "cli_nets", "--budget", "1"], "Give module:callable"),
        (["plan", "no_nets:build", "--budget", "1"], "no module 'no_nets'"),
        (["plan", "no.nets:build", "--budget", "1"], "no module 'no.nets'"),
        (["plan", "cli_nets:none", "--budget", "1"], "no callable 'none'"),
        (
            ["plan", "cli_nets:wrong", "--budget", "1"],
            "must return (model, args[, kwargs[, loss_fn]]), but returned (Lin",
        ),
        (["plan", "cli_nets:build", "--budget", "1", "--device", "abacus"], "is no device"),
    ],
)
def test_wrong_usage(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == cli.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (
            "cli_nets:broken",
            r"cli_nets:broken raised KeyError: .its own.\. At .*cli_nets\.py:\d+, in broken: ",
        ),
        ("no_import:build", r"no_import:build raised ModuleNotFoundError: .*'nowhere'\. At .*no_import\.py:1, in "),
        ("no_syntax:build", r"no_syntax:build raised SyntaxError: .* At .*no_syntax\.py:2\."),
    ],
)
def test_an_error_of_the_users_code_is_named(
    factory: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_import.py").write_text("import nowhere\n")
    (tmp_path / "no_syntax.py").write_text("\nlambda = 1\n")
    refused = output(capsys, "plan", factory, "--budget", "1", code=cli.USERS_ERROR)
    assert (refused["error"], refused["exit_code"]) == ("FactoryFailed", 5)
    assert re.match(said, refused["message"])


def test_an_error_of_the_users_model_does_not_look_like_a_failed_check(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "plan.json", "cli_nets:fails"]) == cli.USERS_ERROR
    assert "in its_loss" in (told := capsys.readouterr().err)  # with the traceback
    assert told.endswith("by zero\n")


def test_argparse_uses_the_same_code_for_wrong_usage() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "cli_nets:build"])
    assert stopped.value.code == cli.USAGE
    assert not issubclass(cli.FactoryError, PlacematError)


def run_module(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "placemat", *command], capture_output=True, text=True, timeout=300, check=False
    )


def test_as_a_module_of_its_own() -> None:
    done = run_module("show", "none.json")
    assert done.returncode == cli.USAGE
    assert done.stdout == ""
    assert "No such file" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="the net looks C's library up as POSIX does")
def test_standard_output_is_the_answer_alone() -> None:
    done = run_module("plan", "cli_nets:loud", "--budget", "1 GiB", "--json")
    assert done.returncode == cli.DONE, done.stderr
    assert json.loads(done.stdout)["budget_bytes"] == 2**30
    for text in ("from Python", "from a library", "from a buffer of C"):
        assert text in done.stderr
