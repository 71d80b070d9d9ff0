"""Contender: a way to run a workload's training step, with the settings that it offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.work import Work
from tests.models import Workload

Value = str | int | float | bool


class NotApplicable(Exception):
    """A workload cannot run under a setting; the text says why."""


@dataclass(frozen=True)
class Setting:
    """One way to run a contender: a point of its curve.

    Attributes:
        label: what people read; no two settings of a contender share one.
        curve: points with the same curve are joined in figures.
        values: what the contender needs, plain data.
    """

    label: str
    curve: str
    values: dict[str, Value]


class Contender(Protocol):
    """A contender. It runs in a process of its own, in which it may change whatever is global there."""

    name: str

    def settings(self, work: Work) -> Sequence[Setting]:
        """What there is to run on this workload; [] where others decide that (a plan needs a budget)."""
        ...

    def prepare(self, work: Work, workload: Workload, setting: Setting) -> Callable[[], str]:
        """Change the workload's model in place so that its steps run under the setting.

        Returns:
            Called after the first steps: a text that identifies what is run, equal for settings that turned out to
            run the same; empty if nothing is known.

        Raises:
            NotApplicable: the workload cannot run under this setting.
        """
        ...


def nothing_known() -> str:
    """The answer of contenders whose settings all run something different."""
    return ""
