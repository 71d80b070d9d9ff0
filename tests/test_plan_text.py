"""Plans as people read them: tables, reasons with the price of the other choice, differences, HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from placemat.alternative import keep_instead, recompute_instead
from placemat.graph.errors import PlacematError
from placemat.labels import short_source
from placemat.simulate import simulate
from tests.test_plan import KIB, keep_everything_plan, recomputing_plan


def test_table() -> None:
    assert (
        recomputing_plan().table()
        == """\
op            shape            bytes  fate           ms a run  module      source
wte
  aten.embed  float32[512]   2.0 KiB  kept                  1              home/net.py:10
h.0-h.1 (x2)
  aten.drop   float32[1024]  4.0 KiB  kept                  3  .attn.drop  home/net.py:11
  aten.drop   float32[256]   1.0 KiB  kept                  3  .attn.drop  home/net.py:11
h.2
  aten.drop   float32[1024]  4.0 KiB  recomputed x1         3  .attn.drop  home/net.py:11
  aten.drop   float32[256]   1.0 KiB  recomputed x1         3  .attn.drop  home/net.py:11
(model)
  aten.loss   float32[1]         4 B  kept                  1              home/net.py:12
kept        6 values, 12.0 KiB
recomputed  2 values, 5.0 KiB, 3 ms a step
freed       0 values, 0 B, that nobody needs again (not listed)"""
    )


def test_printing_is_summary_and_table() -> None:
    plan = recomputing_plan()
    assert str(plan) == f"{plan.summary()}\n\n{plan.table()}"
    assert plan.table(max_rows=2).splitlines()[3] == "... 8 more rows: plan.table()"
    assert plan.table(max_rows=2).splitlines()[-3:] == plan.table().splitlines()[-3:]


def test_printed_source_lines_have_the_last_folder_and_explain_takes_them() -> None:
    assert short_source("/opt/lib/nets/net.py:1, in f: a/b/c/d") == ".../nets/net.py:1, in f: a/b/c/d"
    assert short_source("In[3]:12, in forward: return x") == "In[3]:12, in forward: return x"
    assert short_source(None) is None
    plan = recomputing_plan()
    assert plan.explain(".../home/net.py:12") == plan.explain("/home/net.py:12")


def test_explain_a_module() -> None:
    assert (
        recomputing_plan(budget_bytes=37 * KIB).explain("h")
        == """\
together: 3 ops, 2 kept by choice, 1 recomputed
    keep all: peak 37.9 KiB (+0 B), 876 B OVER the budget, at back_1; -3 ms a step
    recompute all: peak 37.9 KiB (+0 B), 876 B OVER the budget, at back_1; +6 ms a step
drop_0: aten.drop.default in h.0.attn.drop, 3 ms a run
    /home/net.py:11, in forward: x = drop(x)
    float32[1024] 4.0 KiB: kept; keeping 4.0 KiB saves 3 ms and the recomputation of what it is made from
    float32[256] 1.0 KiB: kept; keeping 1.0 KiB saves 3 ms and the recomputation of what it is made from
    otherwise: recompute it: peak 35.9 KiB (-2.0 KiB), within the budget, at back_0; +3 ms a step
drop_1: aten.drop.default in h.1.attn.drop, 3 ms a run
    /home/net.py:11, in forward: x = drop(x)
    float32[1024] 4.0 KiB: kept; keeping 4.0 KiB saves 3 ms and the recomputation of what it is made from
    float32[256] 1.0 KiB: kept; keeping 1.0 KiB saves 3 ms and the recomputation of what it is made from
    otherwise: recompute it: peak 37.9 KiB (+0 B), 876 B OVER the budget, at back_1; +3 ms a step
drop_2: aten.drop.default in h.2.attn.drop, 3 ms a run
    /home/net.py:11, in forward: x = drop(x)
    float32[1024] 4.0 KiB: recomputed x1; running aten.drop.default again, 3 ms a time, makes room for 4.0 KiB
    float32[256] 1.0 KiB: recomputed x1; running aten.drop.default again, 3 ms a time, makes room for 1.0 KiB
    otherwise: keep it: peak 37.9 KiB (+0 B), 876 B OVER the budget, at back_1; -3 ms a step"""
    )


def test_what_the_other_choice_costs_is_the_referees_word() -> None:
    plan = keep_everything_plan()
    other = recompute_instead(plan.problem, plan.schedule, {1})
    simulation = simulate(plan.problem, other.schedule)
    assert (simulation.peak_bytes, simulation.recompute_seconds) == (other.peak_bytes, other.recompute_seconds)
    assert other.recompute_seconds == 0.003
    assert keep_instead(plan.problem, other.schedule, {1}).schedule == plan.schedule


@pytest.mark.parametrize("name", ["drop_2", "h.2", "h.2.attn", "h.2.attn.drop", "drop_2_1"])
def test_names_of_one_op(name: str) -> None:
    text = recomputing_plan().explain(name)
    assert text.startswith("drop_2: aten.drop.default in h.2.attn.drop, 3 ms a run\n")
    assert text.count("otherwise: ") == 1


@pytest.mark.parametrize(
    "name",
    [
        *("aten.drop", "aten.drop.default", "net.py:11", "/home/net.py:11"),
        *("h.*", "*.drop", "h.?.attn", "*.drop.default", "drop_[0-2]"),  # as `keep=` takes them
    ],
)
def test_names_of_several_ops(name: str) -> None:
    assert re.findall(r"^(\w+): aten", recomputing_plan().explain(name), re.M) == ["drop_0", "drop_1", "drop_2"]


@pytest.mark.parametrize("name", ["h.22", "net.py:1", "et.py:11", "aten.dr", "", ".", "g.*"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(PlacematError, match=r"no decision is about .* \* as a wildcard.* the modules wte, h.0, h.1"):
        recomputing_plan().explain(name)


def test_what_has_no_other_choice() -> None:
    plan = recomputing_plan()
    assert "cannot be recomputed: reads a mutated input" in plan.explain("embed")
    assert "otherwise" not in plan.explain("embed") + plan.explain("loss")
    asked = replace(plan, problem=replace(plan.problem, dropped=frozenset({5, 6})))
    assert "otherwise: nothing: recompute= asks for it" in asked.explain("h.2")


def test_an_ample_budget_is_said_first() -> None:
    assert keep_everything_plan().explain("h.0").startswith("The budget is ample: the module runs its original forward")


def test_diff() -> None:
    assert (
        recomputing_plan().diff(replace(keep_everything_plan(), options=recomputing_plan().options))
        == """\
                   this    other
budget         40.0 KiB  1.0 MiB  +984.0 KiB
overhead         13.64%    0.00%     -13.64%
recomputation      3 ms     0 ms       -3 ms

module         op      shape            bytes  this           other
h.2.attn.drop  drop_2  float32[1024]  4.0 KiB  recomputed x1  kept
h.2.attn.drop  drop_2  float32[256]   1.0 KiB  recomputed x1  kept
2 values are treated differently, 6 alike"""
    )


def test_diff_of_equal_plans() -> None:
    assert recomputing_plan().diff(recomputing_plan()) == "All 8 values are treated alike."


def test_diff_of_other_graphs() -> None:
    other = replace(keep_everything_plan(), fingerprint="beef", options=recomputing_plan().options)
    text = recomputing_plan().diff(other)
    assert "The graphs are different ones (f00d and beef" in text
    assert text.splitlines()[-1].split() == ["h.2", "0", "B", "5.0", "KiB", "5.0", "KiB", "0", "B"]


class _Cells(HTMLParser):
    """Texts and open tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_html_says_what_the_text_says() -> None:
    plan = recomputing_plan()
    page = _Cells()
    page.feed(plan._repr_html_())
    assert page.open == []
    wanted = {cell.strip() for line in plan.table().splitlines()[:-3] for cell in re.split(r"  +", line) if cell}
    wanted |= {"37.9 KiB", "2.1 KiB below the budget", "11.0 KiB", "13.64%: 3 ms of recomputation for a step of 22 ms"}
    assert wanted <= set(page.texts)


def test_html_is_escaped() -> None:
    plan = replace(recomputing_plan(), notes=("<script>alert(1)</script>",), peak_source='<img src="x">')
    assert "<script" not in plan._repr_html_()
    assert "<img" not in plan._repr_html_()
