"""The notebooks run, what they assert holds, and what is committed of them is what such a run shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.compilerop import CachingCompiler
from nbformat import NotebookNode

from placemat.graph.sources import shown_file, user_line
from tests.notebooks import NOTEBOOKS, execute, read

MAX_BYTES = 600_000
MACHINE = re.compile(r"site-packages|ipykernel_|(?<![\w./])/(?:tmp|home|root|Users|opt|var|usr|mnt)/[^\"']*")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: NotebookNode) -> list[object]:
    """What kinds of things a cell shows, figures and seconds left out: they differ from run to run."""
    return [output.name if output.output_type == "stream" else sorted(output.data) for output in cell.outputs]


def texts(notebook: NotebookNode) -> str:
    """All outputs but the pictures."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return json.dumps([{**o, "data": {**o.get("data", {}), "image/png": ""}} for o in outputs])


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_first_plan", "02_branched", "03_solver", "04_costs"]


def test_lines_of_cells_are_called_as_the_reader_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CachingCompiler()
    file = compiler.cache("x = 1", 3)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=compiler))
    assert user_line(f'File "{file}", line 2, in forward\n    y = x') == "In[3]:2, in forward: y = x"
    assert shown_file("net.py") == "net.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], "not run from top to bottom"
    assert [cell.source for cell in cells if not cell.outputs] == [], "cells without outputs"
    assert {output.output_type for cell in cells for output in cell.outputs} <= {
        "stream", "display_data", "execute_result",
    }  # fmt: skip
    assert "stderr" not in [name for cell in cells for name in shown(cell)]
    assert not any(cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert path.stat().st_size < MAX_BYTES
    assert MACHINE.findall(texts(notebook)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_is_committed(path: Path) -> None:
    again = execute(path)
    assert [shown(cell) for cell in code_cells(again)] == [shown(cell) for cell in code_cells(read(path))]
    assert MACHINE.findall(texts(again)) == []
