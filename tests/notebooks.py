"""The notebooks, run in a fresh kernel each.

    python -m tests.notebooks                # all
    python -m tests.notebooks 02_branched    # those of which the name contains one of the words

writes what came out into the files.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = tuple(sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb")))
TIME_LIMIT_S = 600
# One thread, so that a busy machine does not slow small kernels down; no model is fetched from anywhere; and PyTorch's
# profiler does not say on standard error that it began and ended, nor tqdm that it could have widgets.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
    "PYTHONWARNINGS": "ignore:IProgress not found",
}
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a new run, without what differs between machines beside them.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, an assert for example.
    """
    notebook = read(path)
    client = NotebookClient(
        notebook, timeout=TIME_LIMIT_S, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )  # fmt: skip
    client.execute(env={**os.environ, **_ENVIRONMENT})
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def main(words: list[str]) -> None:
    for path in NOTEBOOKS:
        if not words or any(word in path.stem for word in words):
            start = time.perf_counter()
            nbformat.write(execute(path), path)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
