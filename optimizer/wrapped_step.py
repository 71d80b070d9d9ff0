"""The step with some modules wrapped, written out as a problem and a schedule for the referee.

Every run of an op is an op of its own here, the recomputations too, since a tensor that is made again is a second one
beside the first, which something else may still hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placemat.eager_step import EagerStep
from placemat.module_regions import Region
from placemat.problem import Problem, ProblemOp, ProblemValue
from placemat.schedule import Compute, Free, Schedule, Step


@dataclass
class WrappedStep:
    """`problem` and `schedule` of a step in which the modules of `regions`, none inside another, are wrapped.

    `source` is, per op, the op of the original problem that it runs (a generator's state: the op that follows), and
    `again` the number of the region whose recomputation it belongs to, or None.
    """

    step: EagerStep
    regions: Sequence[Region]
    ops: list[ProblemOp] = field(default_factory=list)
    values: list[ProblemValue] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    again: list[int | None] = field(default_factory=list)
    origin: list[int | None] = field(default_factory=list)  # per value, the value of the original problem
    _resident: dict[tuple[int, int], int] = field(default_factory=dict)  # (storage, region or -1) -> value
    _ends: dict[int, list[int]] = field(default_factory=dict)  # position -> values that die there

    def __post_init__(self) -> None:
        starts = {region.first: region for region in self.regions}
        triggers: dict[int, list[int]] = {}
        for number, region in enumerate(self.regions):
            triggers.setdefault(region.trigger, []).append(number)
        for position in range(self.step.end + 1):
            if (starting := starts.get(position)) is not None and starting.state_bytes:
                self._save_state(starting)
            for number in triggers.get(position, ()):
                self._recompute(number)
            self._run(position)
            self._free(self._ends.pop(position, ()))

    @property
    def problem(self) -> Problem:
        return Problem(tuple(self.ops), tuple(self.values), None, self.step.static_bytes)

    @property
    def schedule(self) -> Schedule:
        return Schedule(tuple(self.steps))

    def end(self, storage: int) -> int:
        """Position up to which the original of a storage lives."""
        held = (h.end for h in self.step.holds[storage] if not any(region.covers(h.saver) for region in self.regions))
        given = (region.release for region in self.regions if storage in region.inputs)
        return max((*held, *given))

    def _run(self, position: int) -> None:
        if not self.step.is_real(position):
            return
        inputs = {self._source_of(position, v) for v in self.step.problem.ops[position].inputs}
        reads = sorted(inputs) if self.step.read_by(position) else []
        outputs = []
        for s in self.step.made_by(position):
            outputs.append(self._new_value(s, -1, self.step.num_bytes[s]))
            if (end := self.end(s)) < self.step.end:
                self._ends.setdefault(end, []).append(outputs[-1])
        self._compute(position, reads, outputs, self.step.workspace_bytes(position))

    def _source_of(self, position: int, v: int) -> int:
        """The tensor that an op reads: of a saved one, the copy that its saver's recomputation has made."""
        storage = self.step.storage_of[v]
        saver = self.step.saver(position, v) if position > self.step.border else None
        for number, region in enumerate(self.regions):
            if region.covers(saver) and storage in region.copies:
                return self._resident[storage, number]
        return self._resident[storage, -1]

    def _recompute(self, number: int) -> None:
        region = self.regions[number]
        for op in range(region.first, region.stop + 1):
            if not self.step.is_real(op):
                continue
            own = {s: self._resident.get((s, number)) for s in self.step.read_by(op)}
            reads = [self._resident[s, -1] if copy is None else copy for s, copy in own.items()]
            outputs = [
                self._new_value(s, number, self.step.num_bytes[s]) for s in self.step.made_again(op, op == region.stop)
            ]
            self._compute(op, reads, outputs, self.step.workspace_bytes(op) + region.state_bytes, number)
            self._drop(number, op)
        self._drop(number, self.step.end)
        for s, end in region.copies.items():
            self._ends.setdefault(end, []).append(self._resident[s, number])

    def _drop(self, number: int, op: int) -> None:
        """Free what a recomputation made that no node of backward wants and Python drops once `op` has run."""
        region = self.regions[number]
        for s, owner in [key for key in self._resident if key[1] == number]:
            if s not in region.copies and self.step.holds[s][0].end <= op:
                self._free([self._resident.pop((s, owner))])

    def _save_state(self, region: Region) -> None:
        self.values.append(ProblemValue("rng_state", region.state_bytes, len(self.ops)))
        self.origin.append(None)
        self._ends.setdefault(region.release, []).append(len(self.values) - 1)
        self._append(ProblemOp("rng_state", (), (len(self.values) - 1,), 0.0), region.first)

    def _new_value(self, storage: int, owner: int, num_bytes: int) -> int:
        name = self.step.problem.values[storage].name
        self.values.append(ProblemValue(name if owner < 0 else f"{name} again", num_bytes, len(self.ops)))
        self.origin.append(storage)
        self._resident[storage, owner] = len(self.values) - 1
        return len(self.values) - 1

    def _compute(
        self, op: int, reads: Sequence[int], outputs: Sequence[int], workspace_bytes: int, again: int | None = None
    ) -> None:
        original = self.step.problem.ops[op]
        seconds = original.first_s if again is None else original.recompute_s
        run = ProblemOp(original.name, tuple(sorted(reads)), tuple(outputs), seconds, workspace_bytes)
        self._append(run, op, again)

    def _append(self, op: ProblemOp, source: int, again: int | None = None) -> None:
        self.steps.append(Compute(len(self.ops)))
        self.ops.append(op)
        self.source.append(source)
        self.again.append(again)

    def _free(self, values: Sequence[int]) -> None:
        self.steps.extend(Free(v) for v in values)
