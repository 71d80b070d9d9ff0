"""The reference: the module as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.peers.contender import Setting, nothing_known
from benchmarks.work import Work
from tests.models import Workload


class Eager:
    """Nothing is changed."""

    name = "eager"

    def settings(self, work: Work) -> Sequence[Setting]:
        return [Setting("as it is", self.name, {})]

    def prepare(self, work: Work, workload: Workload, setting: Setting) -> Callable[[], str]:
        return nothing_known
