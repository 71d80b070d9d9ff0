"""The wheel, in a virtual environment of its own: it imports, plans and trains there, has types, and needs no extra."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "optimizer", "graph", "cost_models")
PACKAGES = {"placemat": "optimizer", "placemat/graph": "graph", "placemat/cost_models": "cost_models"}

TRAINS = """
    import sys

    import torch
    from torch import nn

    import placemat

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
    x = torch.randn(64, 32)
    torch.manual_seed(0)
    loss = model(x).pow(2).mean()
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    placemat.optimize(model, example_args=(x,), budget_fraction=0.2, time_limit_s=5)
    assert model.plan.recompute_seconds > 0
    torch.manual_seed(0)
    loss = model(x).pow(2).mean()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip([loss.detach(), *(p.grad for p in model.parameters())], expected))
    print(placemat.__file__, *{name.partition(".")[0] for name in sys.modules})
"""

TYPED = """
    import placemat

    def told(error: placemat.BudgetTooSmall) -> None:
        reveal_type(error.minimum_budget_bytes)

    reveal_type(placemat.plan)
    placemat.measure(no_such_argument=1)
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what a build reads, so that the repository stays as it is."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    done = run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and of the running one's packages all but placemat.

    Their folders are on its path, but the hooks in them do not run, the one of an editable install among them.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (packages / "packages_of_the_test.pth").write_text("\n".join(here))
    options = ("--no-deps", "--no-index", "--target", packages)
    done = run(sys.executable, "-m", "pip", "install", *options, wheel, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "python"


def test_wheel_has_every_module_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"{package}/{p.name}" for package, folder in PACKAGES.items() for p in (ROOT / folder).glob("*.py")}
    data = {name for name in names if ".dist-info/" not in name}
    assert data == modules | {"placemat/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_trains_and_imports_no_extra(installed, tmp_path):
    done = run(installed, "-c", textwrap.dedent(TRAINS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, *imported = done.stdout.split()
    assert Path(file).is_relative_to(installed.parents[1])
    needed = set(_closure(["placemat"], extras=()))
    optional = set(_closure(["placemat"], extras=_extras())) - needed
    assert {"matplotlib", "transformers", "hypothesis"} <= optional
    owners = importlib.metadata.packages_distributions()
    found = {_canonical(d) for name in imported for d in owners.get(name, ())}
    assert {"torch", "ortools"} <= found
    assert found.isdisjoint(optional)


def _extras() -> list[str]:
    return importlib.metadata.metadata("placemat").get_all("Provides-Extra") or []


def _closure(names: Sequence[str], extras: Sequence[str]) -> Iterator[str]:
    """Distributions that these need, directly or not; `extras` are those of placemat."""
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = _canonical(queue.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name
        for requirement in requirements:
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
            if extra is None or (name == "placemat" and extra[1] in extras):
                queue.append(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_type_checkers_see_the_types(installed, tmp_path):
    (tmp_path / "user.py").write_text(textwrap.dedent(TYPED))
    options = ("--python-executable", installed, "--cache-dir", tmp_path / "cache")
    done = run(sys.executable, "-m", "mypy", *options, "user.py", cwd=tmp_path)
    assert re.search(r'user.py:5: note: Revealed type is "(builtins\.)?int', done.stdout), done.stdout
    assert re.search(r'user.py:7: note: Revealed type is "def \(model: torch', done.stdout), done.stdout
    assert 'user.py:8: error: Unexpected keyword argument "no_such_argument"' in done.stdout
