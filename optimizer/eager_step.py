"""EagerStep: how long each storage lives when the original forward runs under eager autograd. Plain integers.

The plan's own schedule frees a value after its last reader. Eager holds it longer, and this file says until when:

- *Python*: what a module's forward makes or gets from a child is taken to be held until that call returns, as a local
  variable is; what no variable has, and what an `nn.Sequential` hands on, until it is used: by a child, until that
  returns; what an operator makes for itself, until it returns;
- *autograd*: what a node saved is held until that node has run in backward (docs of `torch.autograd.graph`), and what a
  node of backward reads or makes until the node returns;
- what is written in place has one storage; CPU dropout saves its noise in the input's dtype (Dropout.cpp), where the
  captured step has a mask of bytes.

Positions are indices of `Problem.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from placemat.labels import Labels, OpLabel
from placemat.problem import Problem

_DROPOUT = "aten.native_dropout.default"
_DROPOUT_BACKWARD = "aten.native_dropout_backward.default"  # eager multiplies by the noise
_PRODUCTS = ("aten.mul.Tensor", "aten.div.Tensor")
_NUMBER_BYTES = 8
_CAST = "aten._to_copy.default"
_PSEUDO = ("placemat.rng_state", "placemat.copy_back")


@dataclass(frozen=True)
class Hold:
    """A storage lives up to position `end` at least, because `saver` saved it for backward; None: in any case."""

    storage: int
    end: int
    saver: int | None


@dataclass(frozen=True)
class EagerStep:
    """Lifetimes of one step's storages without any module wrapped.

    Args:
        problem, labels: of a plan.
        device: device type.
        gradients_stay: no gradients exist when the step starts, so that autograd keeps the new ones.
    """

    problem: Problem
    labels: Labels
    device: str
    gradients_stay: bool = True

    @property
    def border(self) -> int:
        assert self.problem.border is not None, "a captured step has a border"
        return self.problem.border

    @property
    def end(self) -> int:
        """The last position."""
        return len(self.problem.ops) - 1

    @cached_property
    def static_bytes(self) -> int:
        """Of the problem, and of the numbers that eager makes tensors of: products save the factors."""
        numbers = (
            label.target in _PRODUCTS and len(op.inputs) + label.reads_static == 1
            for op, label in zip(self.problem.ops[: self.border], self.labels.ops, strict=False)
        )
        return self.problem.static_bytes + (_NUMBER_BYTES * sum(numbers) if self.device == "cpu" else 0)

    def is_real(self, op: int) -> bool:
        """Whether eager has this op at all: pseudo-ops of the captured step are skipped."""
        return self.labels.ops[op].target not in _PSEUDO

    @cached_property
    def storage_of(self) -> list[int]:
        """Value -> the value that stands for its storage: itself, unless eager writes it over another."""
        storages = list(range(len(self.problem.values)))
        for op, label in zip(self.problem.ops, self.labels.ops, strict=True):
            if label.overwrites is not None and op.outputs:
                storages[op.outputs[0]] = storages[label.overwrites]
        return storages

    @cached_property
    def num_bytes(self) -> list[int]:
        """Bytes per storage; 0 for values that share another's."""
        sizes = [0] * len(self.problem.values)
        for v, s in enumerate(self.storage_of):
            sizes[s] = max(sizes[s], self._eager_bytes(v))
        return sizes

    def _eager_bytes(self, v: int) -> int:
        op = self.problem.ops[self.problem.values[v].producer]
        target = self.labels.ops[self.problem.values[v].producer].target
        if target in _PSEUDO:
            return 0
        if target == _DROPOUT and self.device == "cpu":
            return self.problem.values[op.outputs[0]].bytes
        return self.problem.values[v].bytes

    def birth(self, storage: int) -> int:
        return self.problem.values[storage].producer

    def made_by(self, op: int) -> list[int]:
        """Storages that an op allocates."""
        return [v for v in self.problem.ops[op].outputs if self.storage_of[v] == v and self.is_real(op)]

    def made_again(self, op: int, is_last: bool) -> list[int]:
        """Storages that a recomputation of an op allocates; the last one stops when its noise is there."""
        made = self.made_by(op)
        is_noise = is_last and self.device == "cpu" and self.labels.ops[op].target == _DROPOUT
        return made[1:] if is_noise else made

    def goes_to_buffer(self, storage: int) -> bool:
        """Whether a value is new content of a buffer and nothing else: BatchNorm's counter and statistics."""
        return self._readers.get(storage) == {"placemat.copy_back"}

    @cached_property
    def _readers(self) -> dict[int, set[str]]:
        readers: dict[int, set[str]] = {}
        for op, label in zip(self.problem.ops, self.labels.ops, strict=True):
            for v in op.inputs:
                readers.setdefault(self.storage_of[v], set()).add(label.target)
        return readers

    def read_by(self, op: int) -> list[int]:
        """Storages that an op reads."""
        if not self.is_real(op) or (op == self.end and not self.gradients_stay):
            return []
        return sorted({self.storage_of[v] for v in self.problem.ops[op].inputs})

    def workspace_bytes(self, op: int) -> int:
        """Beside what the op allocates; autograd clones some gradients, at the latest when the step ends."""
        is_product = self.labels.ops[op].target == _DROPOUT_BACKWARD and self.device == "cpu"
        workspace = 0 if is_product else self.problem.ops[op].workspace_bytes
        if op > self.border and op != self.end:
            gradients = sum(self.num_bytes[s] for s in self.made_by(op) if self._is_gradient(s))
            workspace += min(gradients, self.problem.ops[self.end].workspace_bytes)
        return workspace

    def _is_gradient(self, storage: int) -> bool:
        return self.labels.values[storage].category == "gradients"

    @cached_property
    def paths(self) -> list[str]:
        """Module path per op; what the capture put before an op has that op's."""
        paths = [label.module_path for label in self.labels.ops]
        for op in range(self.border - 1, -1, -1):
            if not self.is_real(op) and op + 1 < self.border:
                paths[op] = paths[op + 1]
        return paths

    @cached_property
    def groups(self) -> dict[int, tuple[list[int], list[int]]]:
        """Number of an autograd node -> its ops in forward and in backward."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for index, label in enumerate(self.labels.ops):
            if label.autograd_node is not None and self.is_real(index):
                groups.setdefault(label.autograd_node, ([], []))[label.phase == "backward"].append(index)
        return groups

    def group_end(self, op: int) -> int:
        """Position at which the autograd node of a backward op returns."""
        number = self.labels.ops[op].autograd_node
        return op if number is None else max(op, *self.groups[number][1])

    def backward_of(self, op: int) -> list[int]:
        """Backward ops of the autograd node that a forward op makes."""
        number = self.labels.ops[op].autograd_node
        return [] if number is None else self.groups[number][1]

    def saver(self, op: int, v: int) -> int | None:
        """The forward op that saved the value which a backward op reads; None if it was made in backward."""
        producer = self.problem.values[v].producer
        if producer >= self.border:
            return None
        number = self.labels.ops[op].autograd_node
        forward = [] if number is None else self.groups[number][0]
        touching = (f for f in forward if v in self.problem.ops[f].inputs or v in self.problem.ops[f].outputs)
        return next(touching, producer)

    @cached_property
    def holds(self) -> list[list[Hold]]:
        """Per storage, why it lives and until when; the first is what holds in any case."""
        holds = [[Hold(s, self._python_end(s), None)] for s in range(len(self.problem.values))]
        for op in range(self.border, self.end + 1):
            for v in self.problem.ops[op].inputs if self.read_by(op) else ():
                s = self.storage_of[v]
                holds[s].append(Hold(s, self.group_end(op), self.saver(op, v)))
        return holds

    def _python_end(self, storage: int) -> int:
        """Until when locals hold a forward value, and an autograd node what it makes."""
        birth, value = self.birth(storage), self.problem.values[storage]
        if value.pinned and (self.gradients_stay or not self._is_gradient(storage)):
            return self.end
        if birth >= self.border:
            return birth if birth == self.border else self.group_end(birth)
        if self.labels.ops[birth].target == _CAST and not self.problem.ops[birth].inputs:
            return self.border - 1  # autocast may keep the cast of a parameter until its region ends
        readers = self._forward_readers.get(storage, [])
        if not readers:
            # Only the first result of an operator gets to Python: masks, means and indices go to autograd.
            is_first = storage == self.problem.ops[birth].outputs[0] and self.is_real(birth)
            return self._call_end(self.paths[birth], birth) if is_first else birth
        if (call := self.labels.ops[birth].call) is not None and all(self.labels.ops[r].call == call for r in readers):
            return self._last_of_call(birth, call)
        frame = common_path([self.paths[birth], *(self.paths[r] for r in readers)])
        if frame not in self._chains and not self.labels.ops[birth].is_unnamed:
            return max(self._call_end(frame, birth), readers[-1])
        return max(
            r if self.paths[r] == frame else self._call_end(child_path(frame, self.paths[r]), r) for r in readers
        )

    @cached_property
    def _forward_readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for op in range(self.border):
            for s in self.read_by(op):
                readers.setdefault(s, []).append(op)
        return readers

    @cached_property
    def _chains(self) -> frozenset[str]:
        return frozenset(module.path for module in self.labels.modules if module.is_chain)

    def _last_of_call(self, op: int, call: int) -> int:
        """Last op of a call of one operator that is made of several."""
        while op + 1 < self.border and (self.labels.ops[op + 1].call == call or not self.is_real(op + 1)):
            op += 1
        return op

    def _call_end(self, path: str, op: int) -> int:
        """Last op of the call of the module at `path` that runs at `op`."""
        while op + 1 < self.border and is_inside(self.paths[op + 1], path):
            op += 1
        return op


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is `outer` or in it."""
    return not outer or path == outer or path.startswith(outer + ".")


def common_path(paths: list[str]) -> str:
    """Path of the innermost module around all of these."""
    common: list[str] = []
    for parts in zip(*(path.split(".") if path else [] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def child_path(outer: str, path: str) -> str:
    """The direct child of `outer` that is `path` or around it."""
    depth = len(outer.split(".")) if outer else 0
    return ".".join(path.split(".")[: depth + 1])


def forward_labels(step: EagerStep) -> Iterator[tuple[int, OpLabel]]:
    """The forward ops that eager runs."""
    for op in range(step.border):
        if step.is_real(op):
            yield op, step.labels.ops[op]
