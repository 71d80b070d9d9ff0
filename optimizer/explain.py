"""What happens to the results of an op, a module or a source line, why, and what the other choice would cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from placemat.alternative import Alternative, keep_instead, recompute_instead
from placemat.constraints import is_inside
from placemat.graph.errors import PlacematError
from placemat.labels import location, shape_text, short_source
from placemat.replay import may_be_dropped
from placemat.summary import ample, block_of
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.decisions import Decision
    from placemat.plan import Plan

_MAX_OPS = 40  # each costs a replay of the whole step


def explain(plan: Plan, name: str) -> str:
    """The text of `Plan.explain`."""
    ops = _ops_about(plan, name)
    lines = [ample(plan)] if plan.runs_original else []
    if len(ops) == 1:
        ((op, decisions),) = ops.items()
        return "\n".join([*lines, *_op_lines(plan, op, decisions)])
    wanted = {op: listed for op, listed in ops.items() if any(d.kept or d.recomputed for d in listed)}
    lines.extend(_together(plan, wanted))
    for op in sorted(sorted(wanted, key=lambda op: -sum(d.bytes for d in ops[op]))[:_MAX_OPS]):
        lines.extend(_op_lines(plan, op, wanted[op]))
    if len(wanted) > _MAX_OPS:
        lines.append(f"{len(wanted) - _MAX_OPS} ops with fewer bytes are left out: ask for a module further inside.")
    if freed := [plan.problem.ops[op].name for op in ops if op not in wanted]:
        lines.append(f"freed, since nobody needs their results in backward: {', '.join(freed)}")
    return "\n".join(lines)


def fate(decision: Decision) -> str:
    """ "kept", "recomputed x2", both, or "freed" for what nobody needs again."""
    again = [f"recomputed x{decision.recomputed}"] if decision.recomputed else []
    return ", ".join(["kept", *again] if decision.kept else again or ["freed"])


def _ops_about(plan: Plan, name: str) -> dict[int, list[Decision]]:
    """Op index -> decisions about its results, for every op that `name` means."""
    about = (
        [d for d in plan.decisions if _is_about(d, name)]
        or [d for d in plan.decisions if is_inside(d.module_path, name)]
        or [d for d in plan.decisions if any(fnmatchcase(text, name) for text in _names(d))]
    )
    if not about or not name:
        modules = ", ".join(list(dict.fromkeys(block_of(d) for d in plan.decisions))[:8])
        raise PlacematError(
            f"no decision is about {name!r}. Give the name of an op, a value, an operator (aten.mm) or a module, "
            f"with * as a wildcard, or a source line (net.py:12). There are, among others, the modules {modules}."
        )
    ops: dict[int, list[Decision]] = {}
    for decision in about:
        ops.setdefault(plan.problem.values[decision.index].producer, []).append(decision)
    return ops


def _names(decision: Decision) -> tuple[str, ...]:
    return decision.value, decision.op, decision.target, decision.target.rpartition(".")[0]


def _is_about(decision: Decision, name: str) -> bool:
    where = location(decision.source)
    name = name.removeprefix(".../")  # as `short_source` writes it
    return (
        name in (decision.value, decision.op, decision.target, decision.module_path or "(model)")
        or decision.module_path.startswith(f"{name}.")
        or decision.target.startswith(f"{name}.")
        or (where != "" and (f"/{where}".endswith(f"/{name}") or f"/{name}".endswith(f"/{where}")))
    )


def _op_lines(plan: Plan, op: int, decisions: Sequence[Decision]) -> list[str]:
    label = plan.labels.ops[op]
    where = f"in {label.module_path}" if label.module_path else "outside of submodules"
    ms = decisions[0].recompute_s * 1e3
    lines = [f"{plan.problem.ops[op].name}: {label.target} {where}, {ms:.3g} ms a run"]
    lines.append(f"    {short_source(label.source) or 'no source line'}")
    for decision in decisions:
        what = f"{shape_text(decision.shape, decision.dtype)} {format_bytes(decision.bytes)}".strip()
        lines.append(f"    {what}: {fate(decision)}; {decision.why}")
    if other := _other_choice(plan, {op}, decisions):
        lines.append(f"    otherwise: {other}")
    return lines


def _other_choice(plan: Plan, ops: Collection[int], decisions: Sequence[Decision]) -> str | None:
    """What the referee says of the choice that the plan did not make; None if there is none to make."""
    if any(decision.recomputed for decision in decisions):
        if any(decision.index in plan.problem.dropped for decision in decisions):
            return "nothing: recompute= asks for it"
        return f"keep it: {_price(plan, keep_instead(plan.problem, plan.schedule, ops))}"
    if any(decision.kept and may_be_dropped(plan.problem, decision.index) for decision in decisions):
        return f"recompute it: {_price(plan, recompute_instead(plan.problem, plan.schedule, ops))}"
    return None


def _together(plan: Plan, ops: dict[int, list[Decision]]) -> list[str]:
    """The same for all these ops at once, since single prices do not add up."""
    decisions = [decision for listed in ops.values() for decision in listed]
    again = {op for op, listed in ops.items() if any(d.recomputed for d in listed)}
    asked = any(d.index in plan.problem.dropped for d in decisions)
    kept = {
        op for op, listed in ops.items() if any(d.kept and may_be_dropped(plan.problem, d.index) for d in listed)
    } - again
    lines = [f"together: {len(ops)} ops, {len(kept)} kept by choice, {len(again)} recomputed"]
    if again and not asked:
        lines.append(f"    keep all: {_price(plan, keep_instead(plan.problem, plan.schedule, again))}")
    if kept:
        lines.append(f"    recompute all: {_price(plan, recompute_instead(plan.problem, plan.schedule, kept))}")
    return lines


def _price(plan: Plan, other: Alternative) -> str:
    more_bytes = other.peak_bytes - plan.predicted_peak_bytes
    over_bytes = other.peak_bytes - plan.budget_bytes
    more_ms = (other.recompute_seconds - plan.recompute_seconds) * 1e3
    sign = "+" if more_bytes >= 0 else ""
    room = f"{format_bytes(over_bytes)} OVER the budget" if over_bytes > 0 else "within the budget"
    return (
        f"peak {format_bytes(other.peak_bytes)} ({sign}{format_bytes(more_bytes)}), {room}, at "
        f"{plan.problem.ops[other.peak_op].name}; {more_ms:+.3g} ms a step"
    )
