"""The snippets of the user guide run, one after the other, as it says."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import placemat

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"


@pytest.mark.slow
def test_snippets_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) > 5
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", placemat.UndeclaredGradients)
        for snippet in snippets:
            exec(compile(snippet, str(GUIDE), "exec"), names)
    assert names["model"].plan.predicted_peak_bytes <= names["model"].plan.budget_bytes
    assert placemat.Plan.load("plan.json") == names["model"].plan
