"""The tests that depend on PyTorch, against a version of it in a virtual environment of its own.

    python -m tests.versions 2.11.0                 # several versions run one after the other
    python -m tests.versions 2.14.1 --tests tests/test_emit.py tests/test_optimize.py

Everything but torch has the version of constraints.txt, unless torch itself asks for another. The environment is
removed at the end. Only two of torch's builds are small: where an index has nothing else, it is the one for CUDA, with
its libraries about six gigabytes, hence the look at the free space first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_FREE_BYTES = 12 << 30  # while wheels are unpacked, they and what is in them are on the disk
# Whatever traces, lowers, emits, runs or measures; solvers and figures know nothing of torch.
CORE = [
    f"tests/test_{name}.py"
    for name in (
        "autocast batch_norm calls capture checkpointing checkpoint_modules compile_backend cost_models_measured "
        "cost_models_workspaces "
        "custom_ops distributed eager_bits emit emit_phases fuzz keep_eager kernel_strides library_models lower "
        "measure models optimize plan refusals segments supported unit_plans verify"
    ).split()
]
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "transformers")


def constraints_without_torch() -> str:
    """Without setuptools, too: some versions of torch want one below 82."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("torch==", "setuptools==")))


def install(version: str, folder: Path) -> Path:
    """A new environment with this version of torch, this repository, and what its tests need; its interpreter.

    Raises:
        subprocess.CalledProcessError: pip found no such version, or none that goes with the others.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text(constraints_without_torch())
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    subprocess.run([*command, "-c", str(constraints), f"torch=={version}", *TOOLS, "-e", str(ROOT)], check=True)
    return python


def run_tests(python: Path, tests: Sequence[str], workers: int) -> str:
    """pytest's output; failures are in its short summary."""
    options = ["-o", "addopts=", "-m", "not slow and not gpu", "-q", "--tb=short", f"-n{workers}", "--dist=worksteal"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, *tests], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout


def counts(output: str) -> dict[str, int]:
    """Passed, failed (errors among them) and skipped, from pytest's last line."""
    last = output.strip().splitlines()[-1] if output.strip() else ""
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    failed = found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0)
    return {"passed": found.get("passed", 0), "failed": failed, "skipped": found.get("skipped", 0)}


def try_version(version: str, tests: Sequence[str], workers: int) -> dict[str, int]:
    folder = Path(tempfile.mkdtemp(prefix=f"torch-{version}-"))
    try:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < LEAST_FREE_BYTES:
            sys.exit(f"{folder} has {free_bytes >> 30} GiB left, an environment may need {LEAST_FREE_BYTES >> 30} GiB.")
        output = run_tests(install(version, folder), tests, workers)
    finally:
        shutil.rmtree(folder)
    print(output)
    return counts(output)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="placemat's tests against other versions of torch")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.11.0")
    parser.add_argument("--tests", nargs="+", default=CORE, metavar="PATH", help="instead of all that depend on torch")
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist")
    options = parser.parse_args(arguments)
    results = {version: try_version(version, options.tests, options.workers) for version in options.versions}
    for version, found in results.items():
        print(f"torch {version}: " + ", ".join(f"{number} {word}" for word, number in found.items()))
    return 0 if all(r["passed"] and not r["failed"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
