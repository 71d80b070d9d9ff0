"""Random problems by property, for the laws of the solvers."""

from __future__ import annotations

import numpy as np

from placemat.problem import Problem, ProblemOp, ProblemValue


def random_problem(
    seed: int,
    num_ops: int = 5,
    *,
    max_outputs: int = 2,
    share_fixed: float = 0.2,
    share_pinned: float = 0.15,
    has_border: bool = False,
    has_far: bool = False,
) -> Problem:
    """Small whole numbers, so that ties and tight fits are common.

    Some ops have workspaces, some may not be recomputed, some recomputations read more than the first run does; some
    values are pinned, some have no bytes, some are never read. `has_far`: some recomputations cost less than a run.
    """
    rng = np.random.default_rng(seed)
    ops: list[ProblemOp] = []
    values: list[ProblemValue] = []
    for step in range(num_ops):
        earlier = len(values)
        reads = _choose(rng, earlier, int(rng.integers(1, 4)))
        outputs = tuple(range(earlier, earlier + int(rng.integers(1, max_outputs + 1))))
        for v in outputs:
            values.append(ProblemValue(f"v{v}", int(rng.integers(0, 6)), step, bool(rng.random() < share_pinned)))
        recomputable = bool(rng.random() >= share_fixed)
        more = _choose(rng, earlier, int(rng.random() < 0.2))
        runtime_s = float(rng.integers(0, 4))
        ops.append(
            ProblemOp(
                name=f"op{step}",
                inputs=reads,
                outputs=outputs,
                runtime_s=runtime_s,
                workspace_bytes=int(rng.integers(0, 3)),
                recomputable=recomputable,
                recompute_inputs=tuple(sorted({*reads, *more})) if recomputable else (),
                recompute_workspace_bytes=int(rng.integers(0, 3)) if recomputable else 0,
                far_s=runtime_s * int(rng.integers(0, 4)) / 4 if has_far else 0.0,
            )
        )
    return Problem(tuple(ops), tuple(values), num_ops // 2 if has_border else None, int(rng.integers(0, 3)))


def _choose(rng: np.random.Generator, num_values: int, count: int) -> tuple[int, ...]:
    chosen = rng.choice(num_values, min(count, num_values), replace=False) if num_values else ()
    return tuple(sorted(int(v) for v in chosen))


def training_chain(num_layers: int, *, activation_bytes: int = 100, gradient_bytes: int = 40) -> Problem:
    """A chain of layers with two outputs each, and its backward, last layer first; weight gradients are pinned."""
    ops: list[ProblemOp] = []
    values: list[ProblemValue] = []

    def add(name: str, reads: list[int], sizes: list[int], seconds: float, *, is_forward: bool) -> list[int]:
        outputs = list(range(len(values), len(values) + len(sizes)))
        pinned_from = 1 if not is_forward else len(sizes)
        for i, size in enumerate(sizes):
            values.append(ProblemValue(f"{name}.{i}", size, len(ops), i >= pinned_from))
        rereads = tuple(reads) if is_forward else ()
        ops.append(ProblemOp(name, tuple(reads), tuple(outputs), seconds, 7, is_forward, rereads, 7 * is_forward))
        return outputs

    kept: list[tuple[list[int], list[int]]] = []
    x: list[int] = []
    for layer in range(num_layers):
        x = [*x[:1]]
        outputs = add(f"layer{layer}", x, [activation_bytes, 1 + layer % 3], 1.0 + layer % 2, is_forward=True)
        kept.append((x, outputs))
        x = outputs
    border = len(ops)
    gradient: list[int] = x[:1]
    for layer, (reads, outputs) in reversed(list(enumerate(kept))):
        reads = sorted({*gradient, *reads, *outputs})
        gradient = add(f"back{layer}", reads, [gradient_bytes, 10], 2.0, is_forward=False)[:1]
    return Problem(tuple(ops), tuple(values), border, 50)


def with_no_ops(problem: Problem) -> Problem:
    """An op that does nothing before every step: in phases of one step each it gives room for a second recomputation
    of a value between two first runs."""
    ops: list[ProblemOp] = []
    for op in problem.ops:
        ops += [ProblemOp("no-op", (), (), 0.0, recomputable=False), op]
    values = [ProblemValue(v.name, v.bytes, 2 * v.producer + 1, v.pinned) for v in problem.values]
    return Problem(tuple(ops), tuple(values), None, problem.static_bytes)


def relabelled(problem: Problem, seed: int) -> Problem:
    """The same problem with its values in another order."""
    order = np.random.default_rng(seed).permutation(len(problem.values)).tolist()
    new = {v: i for i, v in enumerate(order)}

    def rename(indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[v] for v in reversed(indices))

    ops = tuple(
        ProblemOp(
            op.name,
            rename(op.inputs),
            rename(op.outputs),
            op.runtime_s,
            op.workspace_bytes,
            op.recomputable,
            rename(op.recompute_inputs),
            op.recompute_workspace_bytes,
            op.far_s,
        )
        for op in problem.ops
    )
    values = tuple(problem.values[v] for v in order)
    return Problem(ops, values, problem.border, problem.static_bytes, frozenset(new[v] for v in problem.dropped))
