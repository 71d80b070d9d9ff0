"""A plan as HTML, for notebooks: what `summary` says, and the table of values folded away.

Every text is escaped: module paths and source lines come from files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from placemat import op_table, summary
from placemat.colors import category_color
from placemat.units import format_bytes

if TYPE_CHECKING:
    from placemat.plan import Plan

_CELL = "padding:1px 10px 1px 0;vertical-align:top;border:none;"


def to_html(plan: Plan) -> str:
    """The text of `Plan._repr_html_`."""
    parts = [
        '<div style="font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;line-height:1.45">',
        f"<p><b>{escape(headline(plan))}</b></p>",
        f"<p>{escape(summary.ample(plan))}</p>" if plan.runs_original else "",
        _table(summary.limit_rows(plan), frozenset({0, 2})),
        _bar(plan),
        _table(summary.peak_rows(plan), frozenset({0, 3}), has_header=True),
        f"<p>{escape(summary.peak_place(plan))}</p>",
        _table(summary.cost_rows(plan), frozenset({0, 1})),
        _table(summary.module_rows(plan.decisions), frozenset({0}), has_header=True),
        _values(plan),
        _list(plan.notes),
        "</div>",
    ]
    return "\n".join(part for part in parts if part)


def headline(plan: Plan) -> str:
    """The plan in a line."""
    return (
        f"budget {format_bytes(plan.budget_bytes)}, predicted peak {format_bytes(plan.predicted_peak_bytes)}, "
        f"overhead {plan.overhead:.2%}, {plan.family.split(' (')[0]}: {plan.status}"  # details are by the bound
    )


def _bar(plan: Plan) -> str:
    """The peak by category as one coloured bar, as wide as the budget; the rest of it is empty."""
    whole = max(plan.budget_bytes, plan.predicted_peak_bytes)
    pieces = [
        f'<span title="{escape(name)} {format_bytes(size)}" style="display:inline-block;height:14px;'
        f'width:{100 * size / whole:.2f}%;background:{category_color(name)}"></span>'
        for name, size in plan.breakdown.items()
        if size
    ]
    style = "width:640px;max-width:100%;font-size:0;margin:6px 0;background:#eee"
    names = [
        f'<span style="color:{category_color(name)}">&#9632;</span> {escape(name)}'
        for name, size in plan.breakdown.items()
        if size
    ]
    return f'<div style="{style}">{"".join(pieces)}</div><div>{" &nbsp; ".join(names)}</div>'


def _values(plan: Plan) -> str:
    rows: list[Sequence[str]] = [op_table.HEADER]
    for label, count, block_rows in op_table.folded_blocks(plan.decisions):
        rows.append([f"{label} (x{count})" if count > 1 else label, *[""] * (len(op_table.HEADER) - 1)])
        rows.extend(block_rows)
    totals = "<br>".join(escape(line) for line in op_table.totals(plan))
    table = _table(rows, op_table.LEFT, has_header=True)
    return f"<details><summary>values, kept and recomputed</summary>{table}</details><p>{totals}</p>"


def _table(rows: Iterable[Sequence[str]], left: frozenset[int], *, has_header: bool = False) -> str:
    lines = []
    for number, row in enumerate(rows):
        is_heading = has_header and (number == 0 or not any(row[1:]))
        weight = "font-weight:bold;" if is_heading else ""
        cells = "".join(
            f'<td style="{_CELL}{weight}white-space:{"pre-wrap" if i == len(row) - 1 else "pre"};'
            f'text-align:{"left" if i in left else "right"}">{escape(cell)}</td>'
            for i, cell in enumerate(row)
        )
        lines.append(f'<tr style="background:none">{cells}</tr>')
    return f'<table style="border-collapse:collapse;margin:6px 0;font-size:inherit">{"".join(lines)}</table>'


def _list(notes: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""
