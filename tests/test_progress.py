"""Progress: bars on terminals only and only when it takes long, lines to functions and to the log."""

from __future__ import annotations

import io
import logging
import threading
import time

import pytest
import torch
from torch import nn

import placemat
from placemat.progress import Bar, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    """Until it is drawn; a bar that never is fails the test."""
    for _ in range(200):
        if text in stream.getvalue():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} was not drawn: {stream.getvalue()!r}")


def test_a_bar_shows_the_latest_line_and_is_erased() -> None:
    stream = Terminal()
    bar = Bar(stream, patience_s=0.0)
    with bar.shown():
        bar("capturing")
        wait_for(stream, "capturing")
        assert "placemat 00:0" in stream.getvalue()
        bar.search_begins(1e-3)
        bar("solving")
        wait_for(stream, "|####################| solving")
    assert stream.getvalue().endswith("\r")
    assert not [thread for thread in threading.enumerate() if thread.name == "placemat-progress"]


def test_no_bar_for_what_is_soon_over() -> None:
    stream = Terminal()
    with Bar(stream, patience_s=600.0).shown():
        pass
    assert stream.getvalue() == ""


def test_no_bar_without_a_terminal() -> None:
    stream = io.StringIO()
    with Bar(stream, patience_s=0.0).shown():
        assert not [thread for thread in threading.enumerate() if thread.name == "placemat-progress"]
    assert stream.getvalue() == ""


def test_a_bar_ends_with_an_error() -> None:
    with pytest.raises(KeyError), Bar(Terminal(), patience_s=600.0).shown():
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "placemat-progress"]


def test_arguments() -> None:
    lines: list[str] = []
    assert isinstance(make_progress(None), Bar)
    assert make_progress(False) is None
    assert make_progress(lines.append) == lines.append


def plan_a_small_model(**options: object) -> placemat.Plan:
    return placemat.plan(nn.Linear(4, 4), "1 GiB", (torch.randn(2, 4),), **options)


def test_the_log_has_the_lines_that_a_function_gets(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    with caplog.at_level(logging.INFO, "placemat"):
        plan_a_small_model(progress=lines.append)
    assert lines[0] == "capturing the model"
    assert [record.getMessage() for record in caplog.records if record.name == "placemat"] == lines
    assert capsys.readouterr() == ("", "")


def test_quiet_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    plan_a_small_model()
    assert capfd.readouterr() == ("", "")


def test_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    plan_a_small_model(progress=True)
    captured = capsys.readouterr()
    assert captured.err.startswith("placemat: capturing the model\n")
    assert captured.out == ""
