"""Regions: the submodules that `torch.utils.checkpoint` may wrap, and what wrapping one of them does to a step.

When backward comes to the first autograd node of a wrapped module, the forward of the module runs again, up to the op
at which the last saved tensor is there (`early_stop`); each of these is held until the node that saved it has run. The
arguments are held from the call to the module's last node; nothing else from inside is held between.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from placemat.eager_step import EagerStep, forward_labels, is_inside

# torch.get_rng_state() of the CPU generator, a tensor in host memory (torch 2.9 to 2.14).
_RNG_STATE_BYTES = 5056
_DRAWN_AFTER_SAVING = "aten.rrelu"


@dataclass(frozen=True)
class Region:
    """One submodule's ops, `first` to `last`, and its recomputation, `first` to `stop`.

    Attributes:
        path: of the module.
        trigger: backward op before which it runs again.
        release: backward op after which its arguments are let go.
        inputs: storages that it is given.
        copies: storages that the recomputation makes for backward -> the position up to which each is held.
        seconds: of the recomputation.
        state_bytes: of the generator's state that is saved for it.
        local_peak_bytes: most that the recomputation holds beside what lives when it starts.
    """

    path: str
    first: int
    last: int
    stop: int
    trigger: int
    release: int
    inputs: tuple[int, ...]
    copies: dict[int, int]
    seconds: float
    state_bytes: int
    local_peak_bytes: int

    def covers(self, op: int | None) -> bool:
        return op is not None and self.first <= op <= self.last


def find_regions(step: EagerStep) -> tuple[list[Region], dict[str, str]]:
    """Submodules that may be wrapped, and for the others the reason against it.

    Modules that save nothing inside, and those with the ops of another one, are in neither.
    """
    regions: list[Region] = []
    excluded: dict[str, str] = {}
    spans: set[tuple[int, int]] = set()
    paths = {module.path: module.why_not for module in step.labels.modules if module.path}
    for path, why_not in paths.items():
        ops = [op for op, label in forward_labels(step) if is_inside(label.module_path, path)]
        if not ops:
            continue
        reason = why_not or _why_not(step, ops)
        if reason is not None:
            excluded[path] = reason
            continue
        region = _region(step, path, ops[0], ops[-1])
        if region is not None and (ops[0], ops[-1]) not in spans:
            spans.add((ops[0], ops[-1]))
            regions.append(region)
    return regions, excluded


def _why_not(step: EagerStep, ops: Collection[int]) -> str | None:
    foreign = next((op for op in range(min(ops), max(ops) + 1) if step.is_real(op) and op not in ops), None)
    if foreign is not None:
        return f"{step.problem.ops[foreign].name} of another module runs in the middle of it"
    for op in ops:
        if step.labels.ops[op].target.startswith(_DRAWN_AFTER_SAVING):
            return "rrelu saves its noise before it is drawn, so that torch.utils.checkpoint would stop too early"
        if (reason := step.labels.ops[op].why_not) is not None and not all(map(step.goes_to_buffer, step.made_by(op))):
            return f"{step.problem.ops[op].name} may not run again: {reason}"
    return None


def _region(step: EagerStep, path: str, first: int, last: int) -> Region | None:
    """None if the module has nothing of its own to save."""
    copies: dict[int, int] = {}
    stop, nodes = first - 1, []
    for number, (forward, backward) in step.groups.items():
        for op in backward:
            for v in step.problem.ops[op].inputs:
                saver = step.saver(op, v)
                if saver is None or not first <= saver <= last:
                    continue
                nodes.append(number)
                storage = step.storage_of[v]
                if step.birth(storage) >= first:
                    copies[storage] = max(copies.get(storage, 0), step.group_end(op))
                stop = max(stop, saver if v in step.problem.ops[saver].outputs else saver - 1)
            if step.labels.ops[op].reads_static and forward and first <= forward[0] <= last:
                nodes.append(number)
                stop = max(stop, forward[0] - 1)
    if not any(step.num_bytes[s] for s in copies):
        return None
    for op in range(first, stop + 1):
        # BatchNorm saves its running statistics, which the second run clones (`checkpointing`).
        end = max((step.group_end(b) for b in step.backward_of(op)), default=0)
        copies.update((s, end) for s in step.made_by(op) if end and step.goes_to_buffer(s))
    backward_ops = [op for number in nodes for op in step.groups[number][1]]
    again = [op for op in range(first, stop + 1) if step.is_real(op)]
    read = {s for op in range(first, last + 1) for s in step.read_by(op) if step.birth(s) < first}
    state_bytes = _RNG_STATE_BYTES if step.device == "cpu" else 0
    return Region(
        path=path,
        first=first,
        last=last,
        stop=stop,
        trigger=min(backward_ops),
        release=max(backward_ops),
        inputs=tuple(sorted(read)),
        copies=copies,
        seconds=sum(step.problem.ops[op].recompute_s for op in again),
        state_bytes=state_bytes,
        local_peak_bytes=_local_peak_bytes(step, again, copies) + state_bytes,
    )


def _local_peak_bytes(step: EagerStep, again: list[int], copies: dict[int, int]) -> int:
    live: dict[int, int] = {}
    peak = 0
    for op in again:
        live.update((s, step.num_bytes[s]) for s in step.made_again(op, op == again[-1]))
        peak = max(peak, sum(live.values()) + step.workspace_bytes(op))
        for s in [s for s in live if s not in copies and step.holds[s][0].end <= op]:
            del live[s]
    return peak
