"""Plans: what they say of a schedule, how they read, and that a file gives back exactly what was saved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from placemat.cost_models.base import Costs
from placemat.graph.errors import PlacematError, PlanMismatch
from placemat.graph.ir import Op, OpGraph, OpSignature, Phase, Role, Value
from placemat.plan import Plan, build_plan
from placemat.problem import Problem
from placemat.schedule import Compute, Free, canonical
from placemat.simulate import simulate

KIB = 1024


def answer(problem: Problem, runs: list[int], lower_bound_seconds: float = 0.0005) -> Any:
    """A solver's answer that runs these ops; of it a plan needs only these."""
    return SimpleNamespace(
        schedule=canonical(problem, runs),
        status="optimal",
        lower_bound_seconds=lower_bound_seconds,
        family="P=2",
        solve_seconds=0.25,
    )


class GraphBuilder:
    """Writes an OpGraph op by op."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.workspaces: list[int] = []

    def op(
        self,
        name: str,
        phase: Phase,
        reads: tuple[int, ...],
        makes: tuple[tuple[int, Role, bool], ...],
        module: str = "",
        workspace: int = 0,
        why_not: str | None = None,
    ) -> tuple[int, ...]:
        """`makes` is (bytes, role, pinned) per output; returns the new values' indices."""
        index, outputs = len(self.ops), []
        for i, (num_bytes, role, pinned) in enumerate(makes):
            outputs.append(len(self.values))
            value_name = name if i == 0 else f"{name}_{i}"
            shape = (num_bytes // 4,)
            self.values.append(Value(len(self.values), value_name, num_bytes, index, role, pinned, shape, "float32"))
        stem = name.split("_")[0]
        signature = OpSignature(f"aten.{stem}.default", (), (), ())
        line = 10 + ["embed", "drop", "loss"].index(stem) if stem in ("embed", "drop", "loss") else 0
        source = f"/home/net.py:{line}, in forward: x = {stem}(x)" if phase == "forward" else None
        self.ops.append(
            Op(index, name, signature, phase, reads, reads, tuple(outputs), why_not is None, why_not, module, source)
        )
        self.workspaces.append(workspace)
        return tuple(outputs)


def network() -> tuple[OpGraph, Costs]:
    """Three equal layers with a mask each (4 + 1 KiB), a loss, and their backward: 3 ms a layer, 1 ms elsewhere."""
    build = GraphBuilder()
    act: Role = "activation"
    layers: list[tuple[int, int]] = []
    x: tuple[int, ...] = build.op(
        "embed", "forward", (), ((2 * KIB, act, False),), "wte", why_not="reads a mutated input"
    )
    for i in range(3):
        out, mask = build.op(f"drop_{i}", "forward", x, ((4 * KIB, act, False), (KIB, act, False)), f"h.{i}.attn.drop")
        layers.append((out, mask))
        x = (out,)
    (loss,) = build.op("loss", "forward", x, ((4, "output", True),))
    (grad,) = build.op("border", "border", (loss,), ((4, "tangent", True),), why_not="the border")
    flow: tuple[int, ...] = (grad,)
    for i in (2, 1, 0):
        made = build.op(
            f"back_{i}",
            "backward",
            (*flow, *layers[i]),
            ((4 * KIB, act, False), (3 * KIB, "gradient", True)),
            f"h.{i}.attn.drop",
            workspace=512,
        )
        flow = (made[0],)
    build.op("scatter", "backward", (*flow, 0), ((2 * KIB, "gradient", True),), "wte")
    border = next(op.index for op in build.ops if op.phase == "border")
    graph = OpGraph(
        ops=tuple(build.ops),
        values=tuple(build.values),
        border=border,
        static_bytes={"parameters": 11 * KIB, "buffers": 0, "inputs": 100},
        device="cpu",
        fingerprint="f00d",
        notes=("one graph note",),
    )
    runtime_s = tuple(0.003 if "drop" in op.name or "back" in op.name else 0.001 for op in build.ops)
    workspaces = tuple(build.workspaces)
    return graph, Costs(runtime_s, workspaces, workspaces, "hand-made figures")


def recomputing_plan(**changes: Any) -> Plan:
    """Layers 0 and 1 keep their masks and outputs; layer 2 runs again in backward."""
    graph, costs = network()
    problem = Problem.from_op_graph(graph, costs, reserved_bytes=256)
    runs = [op.index for op in graph.ops]
    again = next(op.index for op in graph.ops if op.name == "drop_2")
    runs.insert(graph.border + 1, again)
    given: dict[str, Any] = dict(
        budget_bytes=40 * KIB,
        reserved_bytes=256,
        floor_bytes=30 * KIB,
        floor_proven=True,
        floor_bound_bytes=30 * KIB,
        keep_everything_bytes=48 * KIB,
        capture_seconds=1.5,
        module_digest="beef",
        input_digest="cafe",
        options={"loss_fn": False, "accumulate_grad": False, "keep": ("h.0",), "time_limit_s": 60, "gap": 0.01},
        notes=("one planning note",),
    )
    return build_plan(graph, costs, problem, answer(problem, runs), **{**given, **changes})


def keep_everything_plan() -> Plan:
    graph, costs = network()
    problem = Problem.from_op_graph(graph, costs, reserved_bytes=256)
    result = answer(problem, [op.index for op in graph.ops], 0.0)
    return build_plan(
        graph,
        costs,
        problem,
        result,
        budget_bytes=1 << 20,
        reserved_bytes=256,
        floor_bytes=30 * KIB,
        floor_proven=False,
        floor_bound_bytes=30 * KIB,
        keep_everything_bytes=48 * KIB,
        capture_seconds=1.5,
        module_digest="beef",
        input_digest="cafe",
        runs_original=True,
        eager_bound_bytes=50 * KIB,
    )


# ------------------------------------------------------------------------------------------------------------ building


@pytest.mark.parametrize("make", [recomputing_plan, keep_everything_plan])
def test_breakdown_adds_up_to_the_simulated_peak(make: Any) -> None:
    plan = make()
    graph, costs = network()
    simulation = simulate(Problem.from_op_graph(graph, costs, reserved_bytes=256), plan.schedule)
    assert plan.predicted_peak_bytes == simulation.peak_bytes == sum(plan.breakdown.values())
    step = plan.schedule.steps[simulation.peak_step]
    assert isinstance(step, Compute)
    assert plan.peak_op == graph.ops[step.op].name


def test_breakdown_by_hand() -> None:
    """Backward of layer 1: two layers and the embedding are held, layer 2's gradient too; its flow and own outputs are
    temporaries. (Its mask and output are gone by then.)"""
    plan = recomputing_plan()
    assert plan.peak_op == "back_1"
    assert plan.breakdown == {
        "parameters": 11 * KIB,
        "buffers": 0,
        "inputs": 100,
        "gradients": 3 * KIB,
        "outputs": 8,
        "mutations": 0,
        "activations": 2 * KIB + 2 * 5 * KIB,
        "temporaries": 4 * KIB + (4 + 3) * KIB + 512,
        "reserved": 256,
    }


def test_seconds_and_ratios() -> None:
    plan = recomputing_plan()
    assert plan.forward_backward_seconds == pytest.approx(6 * 0.003 + 4 * 0.001)
    assert plan.recompute_seconds == 0.003
    assert plan.overhead == pytest.approx(3 / 22)
    assert plan.lower_bound == pytest.approx(0.5 / 22)
    assert plan.gap == pytest.approx(2.5 / 3)
    assert keep_everything_plan().gap == 0.0


def test_decisions() -> None:
    plan = recomputing_plan()
    by_value = {decision.value: decision for decision in plan.decisions}
    assert set(by_value) == {"embed", "drop_0", "drop_0_1", "drop_1", "drop_1_1", "drop_2", "drop_2_1", "loss"}
    assert {name for name, d in by_value.items() if d.kept} == set(by_value) - {"drop_2", "drop_2_1"}
    assert {name for name, d in by_value.items() if d.recomputed} == {"drop_2", "drop_2_1"}
    assert by_value["embed"].why == "cannot be recomputed: reads a mutated input"
    assert by_value["loss"].why.startswith("held by the caller")
    assert by_value["drop_0"].why.startswith("keeping 4.0 KiB saves 3 ms")
    assert by_value["drop_2"].why == "running aten.drop.default again, 3 ms a time, makes room for 4.0 KiB"
    assert by_value["drop_2"].module_path == "h.2.attn.drop"
    assert by_value["drop_2"].source == "/home/net.py:11, in forward: x = drop(x)"
    assert (by_value["drop_2"].shape, by_value["drop_2"].dtype) == ((KIB,), "float32")


def test_a_value_that_backward_does_not_need() -> None:
    build = GraphBuilder()
    (a,) = build.op("a", "forward", (), ((KIB, "activation", False),))
    (b,) = build.op("b", "forward", (a,), ((KIB, "output", True),))
    build.op("border", "border", (b,), ((4, "tangent", True),), why_not="the border")
    graph = OpGraph(tuple(build.ops), tuple(build.values), 2, {}, "cpu", "f")
    costs = Costs((0.0,) * 3, (0,) * 3, (0,) * 3, "none")
    problem = Problem.from_op_graph(graph, costs)
    plan = build_plan(
        graph,
        costs,
        problem,
        answer(problem, [0, 1, 2]),
        budget_bytes=KIB,
        reserved_bytes=0,
        floor_bytes=0,
        floor_proven=True,
        floor_bound_bytes=0,
        keep_everything_bytes=0,
        capture_seconds=0.0,
        module_digest="",
        input_digest="",
    )
    assert [(d.value, d.kept, d.recomputed, d.why) for d in plan.decisions] == [
        ("a", False, 0, "not needed by backward"),
        ("b", True, 0, "held by the caller or by autograd to the end of the step"),
    ]
    assert plan.overhead == 0.0  # a graph without costs has no ratio to divide by


# ---------------------------------------------------------------------------------------------------------------- text


def test_summary_text() -> None:
    plan = replace(recomputing_plan(), torch_version="2.13.0", placemat_version="0.1.0")
    assert (
        plan.summary()
        == """\
The budget bounds the peak bytes of live tensor storage on the model's device during one training step (forward, loss, \
backward): parameters, buffers, inputs, gradients, outputs, activations, temporaries and what you reserve.

floor            30.0 KiB  proven for the solved family
predicted peak   37.9 KiB  2.1 KiB below the budget
budget           40.0 KiB
keep everything  48.0 KiB  peak of planned code without recomputation; eager's may differ

at the peak     bytes  share
parameters   11.0 KiB  29.1%
inputs          100 B   0.3%
gradients     3.0 KiB   7.9%
outputs           8 B   0.0%  with their gradients
activations  12.0 KiB  31.7%
temporaries  11.5 KiB  30.4%  outputs and workspace of the running op, gradients in flight
reserved        256 B   0.7%  declared by you
total        37.9 KiB
reached at back_1: no source line

overhead     13.64%: 3 ms of recomputation for a step of 22 ms
lower bound  2.27% for family P=2, gap 83.33%, optimal
costs        hand-made figures (cpu)
time         captured in 1.50 s, solved in 0.25 s
keep         h.0
versions     placemat 0.1.0, torch 2.13.0

module        kept     bytes  recomputed    bytes  ms
wte              1   2.0 KiB           0      0 B   0
h.0-h.1 (x2)     2   5.0 KiB           0      0 B   0
h.2              0       0 B           2  5.0 KiB   3
(model)          1       4 B           0      0 B   0
total            6  12.0 KiB           2  5.0 KiB   3
figures of a row (xN) are those of each of its N modules

notes
- one graph note
- one planning note"""
    )


def test_summary_of_an_ample_budget() -> None:
    text = keep_everything_plan().summary()
    assert "The budget is ample: the module runs its original forward, which needs at most 50.0 KiB." in text
    assert "smallest peak that was found, below 30.0 KiB there is none" in text
    assert "h.0-h.2 (x3)" in text
    assert "overhead     0.00%" in text


def test_repr() -> None:
    steps = len(recomputing_plan().schedule.steps)
    assert repr(recomputing_plan()) == (
        f"Plan(budget 40.0 KiB, predicted peak 37.9 KiB, overhead 13.64%, P=2: optimal, {steps} steps)"
    )


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("make", [recomputing_plan, keep_everything_plan])
def test_round_trip(make: Any, tmp_path: Path) -> None:
    plan = make()
    path = tmp_path / "plan.json"
    path.write_text("an older file")
    plan.save(path)
    loaded = Plan.load(str(path))
    assert loaded == plan
    for field in fields(Plan):
        assert type(getattr(loaded, field.name)) is type(getattr(plan, field.name)), field.name
    assert loaded.summary() == plan.summary()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert loaded.options.get("keep", ["h.0"]) == ["h.0"]


def test_steps_are_compact(tmp_path: Path) -> None:
    plan = recomputing_plan()
    assert plan.schedule.steps[3:8] == (Compute(3), Free(6), Compute(4), Free(5), Compute(5))
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["plan"]["schedule"][3:8] == [3, -7, 4, -6, 5]


def test_people_find_decisions_by_module(saved: Path) -> None:
    decisions = json.loads(saved.read_text())["plan"]["decisions"]
    assert list(decisions) == ["wte", "h.0.attn.drop", "h.1.attn.drop", "h.2.attn.drop", ""]
    assert [(row["op"], row["kept"], row["recomputed"]) for row in decisions["h.2.attn.drop"]] == [
        ("drop_2", False, 1),
        ("drop_2", False, 1),
    ]
    assert max(map(len, saved.read_text().splitlines())) < 500


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    recomputing_plan().save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(recomputing_plan(), solve_seconds=float("nan")).save(path)
    with pytest.raises(TypeError):
        replace(recomputing_plan(), options={"loss_fn": object()}).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    recomputing_plan().save(path)
    return path


@pytest.mark.parametrize("kept", [0, 1, 10, 0.5, -1])
def test_truncated_files_are_refused(saved: Path, kept: float) -> None:
    text = saved.read_bytes()
    saved.write_bytes(text[: int(kept * len(text))] if isinstance(kept, float) else text[:kept])
    with pytest.raises(PlacematError, match="truncated"):
        Plan.load(saved)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"3", b'{"a": 1}', b'{"format": "other"}', b"\xff\xfe", b"\x80\x04.", b"[" * 100_000, b'{"a": NaN}'],
)
def test_other_files_are_refused(saved: Path, content: bytes) -> None:
    saved.write_bytes(content)
    with pytest.raises(PlacematError, match="no plan file"):
        Plan.load(saved)


def rewrite(path: Path, change: Any, *, sign: bool) -> None:
    """Apply `change` to a saved file's JSON object, with a fresh digest if `sign`."""
    body = json.loads(path.read_text())
    change(body)
    if sign:
        body.pop("sha256")
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["plan"].update(budget_bytes=1),
        lambda body: body["plan"]["schedule"].pop(),
        lambda body: body["plan"]["decisions"]["wte"][0].update(value="other"),
        lambda body: body["plan"]["problem"]["ops"]["rows"][0].__setitem__(0, "other"),
        lambda body: body.update(extra=1),
        lambda body: body.pop("sha256"),
    ],
)
def test_tampered_files_are_refused(saved: Path, change: Any) -> None:
    rewrite(saved, change, sign=False)
    with pytest.raises(PlacematError, match="was changed after it was saved"):
        Plan.load(saved)


def test_reformatted_files_are_accepted(saved: Path) -> None:
    saved.write_text(json.dumps(json.loads(saved.read_text()), indent=2))
    assert Plan.load(saved) == recomputing_plan()


def test_newer_files_are_a_mismatch(saved: Path) -> None:
    rewrite(saved, lambda body: body.update(schema=5), sign=True)
    with pytest.raises(PlanMismatch, match="newer placemat: its schema is 5, this version reads 4"):
        Plan.load(saved)


def test_older_files_are_a_mismatch(saved: Path) -> None:
    rewrite(saved, lambda body: body.update(schema=3), sign=True)
    with pytest.raises(PlanMismatch, match=r"older placemat: its schema is 3, this version reads 4\. Plan again"):
        Plan.load(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body.update(schema="1"), "schema '1'"),
        (lambda body: body.update(plan=[]), "holds no plan"),
        (lambda body: body["plan"].pop("status"), r"\['status'\]"),
        (lambda body: body["plan"].update(extra=1), r"\['extra'\]"),
        (lambda body: body["plan"].update(budget_bytes="8"), r"\['budget_bytes'\]"),
        (lambda body: body["plan"].update(budget_bytes=True, options=None), r"\['budget_bytes', 'options'\]"),
        (lambda body: body["plan"].update(schedule=3), "cannot be read"),
        (lambda body: body["plan"]["decisions"]["wte"][0].pop("bytes"), "cannot be read"),
        (lambda body: body["plan"]["decisions"].update(wte=3), "cannot be read"),
        (lambda body: body["plan"]["problem"]["ops"]["rows"][0].pop(), "cannot be read"),
        (lambda body: body["plan"]["problem"]["values"]["columns"].append("__class__"), "cannot be read"),
        (lambda body: body["plan"]["problem"].update(border="x"), "cannot be read"),
        (lambda body: body["plan"]["schedule"].pop(0), "schedule is not one"),
        (lambda body: body["plan"].update(predicted_peak_bytes=1), "the file was edited"),
        (lambda body: body["plan"].update(recompute_seconds=0.0), "the file was edited"),
        (lambda body: body["plan"]["schedule"].append("os.system"), "cannot be read"),
    ],
)
def test_wrong_contents_are_refused_even_if_signed(saved: Path, change: Any, said: str) -> None:
    rewrite(saved, change, sign=True)
    with pytest.raises(PlacematError, match=said):
        Plan.load(saved)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        recomputing_plan().save(tmp_path / "none" / "plan.json")
