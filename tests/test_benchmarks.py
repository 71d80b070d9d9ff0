"""The side-by-side benchmark: a tiny workload through the whole of it, and the page that is made of results."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import placemat
from benchmarks import side_by_side
from benchmarks.contest import op_costs
from benchmarks.contest.comparison import Comparison, compare
from benchmarks.contest.contest import Contest, Effort
from benchmarks.contest.results import Estimate, PlanFigures, Point, Results
from benchmarks.contest.table import BELOW, LESS, MORE, SAME, peer_rows, verdict
from benchmarks.contest.worker import StepSession, Worker, WorkerFailed
from benchmarks.peers import CONTENDERS, PlacematPlans
from benchmarks.report import render
from benchmarks.work import WORKS
from placemat.cost_models.cache import CACHE_DIR_VARIABLE

RIGHT = Comparison("bitwise", "bitwise", "bitwise", "bitwise", 0.0, "")
WRONG = Comparison("bitwise", "wrong", "bitwise", "bitwise", 0.2, "head.weight")


def plan_of(budget_bytes: int) -> PlanFigures:
    return PlanFigures(
        budget_bytes=budget_bytes,
        predicted_peak_bytes=budget_bytes,
        predicted_overhead=0.1,
        lower_bound=0.1,
        gap=0.0,
        status="optimal",
        family="P=2 at the border",
        floor_bytes=900,
        floor_proven=True,
        keep_everything_bytes=5000,
        eager_bound_bytes=6000,
        runs_original=False,
        ops=7,
        solve_seconds=0.1,
        capture_seconds=0.2,
        planning_seconds=0.5,
    )


def ours(budget_bytes: int, failure: str = "") -> Point:
    plan = None if failure else plan_of(budget_bytes)
    return Point(
        "placemat", f"{budget_bytes} bytes", "placemat", {}, str(budget_bytes), budget_bytes, RIGHT, failure, plan
    )


def theirs(label: str, peak_bytes: int, comparison: Comparison = RIGHT) -> Point:
    return Point("torch.utils.checkpoint", label, "blocks", {}, "", peak_bytes, comparison)


@pytest.fixture
def results() -> Results:
    """Four points of a peer, of which we win one, share one, lose one, and cannot reach one."""
    made = Results("tiny", "a tiny one", {"cpu": "a processor", "cores": 2})
    points = [theirs("a", 4000), theirs("b", 3000), theirs("c", 2000, WRONG), theirs("d", 800)]
    points += [ours(4000), ours(3000), ours(2000), ours(800, "BudgetTooSmall: 900 bytes")]
    for point in points:
        made.add(point)
    a, b, c, d = (p.key for p in points[:4])
    eager = [1.0, 2.0, 1.0]
    made.batches.append({"eager": eager, a: [1.2, 2.4, 1.2], ours(4000).key: [1.1, 2.2, 1.1]})
    made.batches.append({"eager": eager, b: [1.2, 2.4, 1.3], ours(3000).key: [1.2, 2.5, 1.2]})
    made.batches.append({"eager": eager, c: [1.2, 2.4, 1.2], ours(2000).key: [1.3, 2.6, 1.3]})
    made.batches.append({"eager": eager, d: [1.5, 3.0, 1.5]})
    return made


def test_verdicts_are_of_the_same_rounds(results):
    assert [verdict(results, p) for p in results.of(["torch.utils.checkpoint"])] == [LESS, SAME, MORE, BELOW]
    difference = results.difference(ours(4000), theirs("a", 4000))
    assert difference.value == pytest.approx(-0.1)
    assert results.overhead(theirs("a", 4000)).value == pytest.approx(0.2)


def test_pairs_that_we_seem_to_lose_are_timed_again_but_not_for_ever(results):
    def contested(rounds: int) -> list[set[str]]:
        contest = Contest(results, Path("tiny.json"), Effort(rounds=rounds))
        return [{p.key for p in group} for group in contest._contested(["torch.utils.checkpoint"])]

    assert contested(rounds=3) == [{theirs("c", 2000).key, ours(2000).key}]
    results.batches += 3 * [results.batches[2]]
    assert not contested(rounds=3)
    results.batches += 12 * [{key: results.batches[2]["eager"] for key in results.batches[2]}]
    assert not contested(rounds=100)  # it was noise


def test_overheads_by_op_costs_are_those_of_a_point_that_runs_the_same(results):
    results.add(Point("eager", "as it is", "eager", {}, peak_bytes=4000, op_seconds=2.0))
    results.add(Point("activation_memory_budget", "1", "dp", {}, "a graph", 4000, RIGHT, op_seconds=2.5))
    results.add(Point("activation_memory_budget", "0.9", "dp", {}, "a graph", 4000, RIGHT))
    overheads = [results.overhead_of_ops(p) for p in results.of(["activation_memory_budget"])]
    assert overheads == [0.25, 0.25]
    assert results.overhead_of_ops(theirs("a", 4000)) is None


def test_a_margin_has_what_processes_differ_by():
    batches = [[0.0, 0.0, 0.0], [0.02, 0.02, 0.02], [0.02, 0.02, 0.02], [0.04, 0.04, 0.04]]
    assert Estimate.of_batches(batches[1:3]).margin == 0.0  # too few to tell
    assert Estimate.of_batches(batches[1:]) == Estimate(0.02, pytest.approx(2 * 0.02 / 3), 9)
    noisy = [[0.0, 0.02, 0.04], [0.0, 0.02, 0.04], [0.0, 0.02, 0.04]]
    assert Estimate.of_batches(noisy) == Estimate.of([sample for batch in noisy for sample in batch])


def test_an_ample_budget_is_timed_in_as_many_batches_as_what_we_seem_to_lose(results):
    ample = dataclasses.replace(ours(9000), plan=dataclasses.replace(plan_of(9000), runs_original=True))
    results.add(ample)
    results.batches.append({"eager": [1.0, 1.0, 1.0], ample.key: [1.0, 1.0, 1.0]})
    contest = Contest(results, Path("tiny.json"), Effort(rounds=3))
    assert contest._contested([]) == [[ample]]
    results.batches += 3 * [results.batches[-1]]
    assert contest._contested([]) == []


def test_operators_are_counted_of_the_step_that_runs():
    """Also of a compiled one, which Dynamo passes by under other dispatch modes."""
    x = torch.randn(64, 32)
    eager, ours = (nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh()))) for _ in "ab")
    placemat.optimize(ours, None, (x,), budget_fraction=0.0, time_limit_s=5)
    tanhs = []
    for model in (eager, ours):
        model(x).sum().backward()
        with op_costs.Calls() as calls:
            model(x).sum().backward()
        tanhs.append(sum(n for s, n in calls.counts.items() if s.target in ("aten.tanh.default", "aten.tanh_.default")))
    assert tanhs[0] == 4 < tanhs[1]
    assert 0 < op_costs.op_seconds(lambda: eager(x).sum().backward()) < 1


def test_results_survive_their_file(results, tmp_path):
    results.save(tmp_path / "tiny.json")
    assert Results.load(tmp_path / "tiny.json") == results
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.json"]


def test_the_page_says_where_we_lose(results):
    page = render([results], "figures")
    outcome = "WRONG gradients (error 0.2 of head.weight)"
    assert f"| c | 2.0 KiB | +20.0 % ± 0.0 |  | {outcome} | +30.0 % ± 0.0 | +10.0 % ± 0.0 | {MORE} |" in page
    assert BELOW in page
    assert "![overhead over measured peak](figures/tiny.png)" in page
    assert "a processor" in page


def test_points_that_ran_the_same_share_a_row():
    made = Results("tiny", "", {})
    for label in ("0.5", "0.25"):
        made.add(Point("activation_memory_budget", label, "dp", {}, "same graphs", 4000, RIGHT))
    [row] = peer_rows(made, "activation_memory_budget")
    assert row[0] == "0.5; 0.25"


def test_comparison_tells_rounding_from_other_numbers():
    torch.manual_seed(0)
    weight, bias = torch.randn(100), 1e-9 * torch.randn(100)  # a bias whose gradient is rounding alone
    expected = {
        "loss": {},
        "gradients": {"weight": weight, "bias": bias, "none": None},
        "buffers": {},
        "random_state": {},
    }

    def got(**gradients):
        return compare(expected, expected | {"gradients": expected["gradients"] | gradients})

    assert got().verdict == "bitwise"
    assert got(weight=weight * (1 + 1e-6)).gradients == "close"
    assert got(bias=torch.zeros(100)).gradients == "close"
    assert got(weight=weight * 1.1).gradients == "wrong"
    assert got(none=torch.zeros(3)).gradients == "wrong"
    assert got(bias=None).worst_name == "bias"


@pytest.mark.slow
def test_a_tiny_workload_through_the_whole_of_it(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))  # which a run sets, so that it is put back
    effort = Effort(rounds=2, together=12, frontier_points=2, time_limit_s=5.0)
    peers = ["torch.utils.checkpoint"]
    done = side_by_side.run("tiny", peers, effort, tmp_path, again=False)
    assert not [point.failure for point in done.points.values() if point.failure]
    [eager] = done.of(["eager"])
    by_hand = done.points["torch.utils.checkpoint: segments of sqrt(n) blocks"]
    assert by_hand.comparison.verdict == eager.comparison.verdict == "bitwise"
    assert by_hand.peak_bytes < eager.peak_bytes
    plans = [point for point in done.of([PlacematPlans.name]) if point.plan is not None]
    assert any(point.plan.runs_original for point in plans)
    for point in plans:
        ran = done.twin(point)
        assert ran.comparison.verdict == "bitwise"
        assert ran.peak_bytes <= point.plan.budget_bytes
        assert done.overhead(point).rounds >= 2
    assert done.difference(done.ours_at(by_hand.peak_bytes), by_hand) is not None
    assert Results.load(tmp_path / "tiny.json") == done

    timed = len(done.batches)
    assert len(side_by_side.run("tiny", peers, effort, tmp_path, again=False).batches) == timed  # nothing is run again


@pytest.mark.slow
def test_the_memory_budget_is_wrong_with_dropout_until_random_operators_are_kept(tmp_path: Path):
    with Worker(StepSession, "tiny_dropout") as worker:
        contender = CONTENDERS["activation_memory_budget"]
        settings = {setting.label: setting for setting in contender.settings(WORKS["tiny_dropout"])}
        worker.call("prepare", "eager", CONTENDERS["eager"].settings(WORKS["tiny_dropout"])[0])
        worker.call("record", tmp_path / "eager.pt")
        outcomes = {}
        for label in ("0.25, dp", "0.25, dp, random kept"):
            worker.call("prepare", contender.name, settings[label])
            outcomes[label] = worker.call("compare", tmp_path / "eager.pt").gradients
    assert outcomes == {"0.25, dp": "wrong", "0.25, dp, random kept": "bitwise"}


@pytest.mark.slow
def test_a_worker_tells_failures_and_survives_its_process():
    with Worker(Fragile, "any") as worker:
        with pytest.raises(WorkerFailed, match="ValueError: no such thing"):
            worker.call("fail")
        with pytest.raises(WorkerFailed, match="exit code 3"):
            worker.call("die")
        assert worker.call("name") == "any"


class Fragile:
    """A session of commands that go wrong."""

    def __init__(self, work_name: str) -> None:
        self.work_name = work_name

    def fail(self) -> None:
        raise ValueError("no such thing")

    def die(self) -> None:
        os._exit(3)

    def name(self) -> str:
        return self.work_name
