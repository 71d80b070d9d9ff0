"""Seconds: FLOPs, bytes moved, the device table, the measured host and its cache."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from placemat.cost_models import DEVICES, MeasuredWorkspaces, Roofline, device_spec, host_spec, present_roofline
from placemat.cost_models import host as host_module
from placemat.cost_models.cache import JsonCache
from placemat.cost_models.flops import bytes_moved, compute_dtype, flops
from placemat.cost_models.measured_workspaces import measure_workspace_bytes
from placemat.cost_models.workspaces import workspace_bytes
from placemat.graph.errors import PlacematError
from placemat.graph.ir import Op, OpSignature, TensorSpec
from tests.test_cost_models_workspaces import signature_of

aten = torch.ops.aten


def sign(op: Any, *args: Any, **kwargs: Any) -> OpSignature:
    return signature_of(op, args, kwargs, op(*args, **kwargs))


def op_of(signature: OpSignature) -> Op:
    return Op(0, "op", signature, "forward", (), (), (), True)


def convolution(channels: int = 8, groups: int = 1, transposed: bool = False) -> tuple[Any, ...]:
    x, weight = torch.ones(2, channels, 9, 9), torch.ones(channels, channels // groups, 3, 3)
    return (x, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)


def convolution_backward(
    groups: int = 1, transposed: bool = False, mask: tuple[bool, ...] = (True, True, False)
) -> tuple[Any, ...]:
    args = convolution(groups=groups, transposed=transposed)
    return (aten.convolution.default(*args), *args[:2], None, *args[3:], list(mask))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, (torch.ones(3, 5), torch.ones(5, 7))),
        (aten.addmm.default, (torch.ones(7), torch.ones(3, 5), torch.ones(5, 7))),
        (aten.bmm.default, (torch.ones(2, 3, 5), torch.ones(2, 5, 7))),
        (aten.convolution.default, convolution()),
        (aten.convolution.default, convolution(groups=4)),
        (aten.convolution.default, convolution(transposed=True)),
        (aten.convolution_backward.default, convolution_backward()),
        (aten.convolution_backward.default, convolution_backward(transposed=True)),
        (aten.convolution_backward.default, convolution_backward(mask=(False, True, False))),
        (aten.add.Tensor, (torch.ones(3), torch.ones(3))),
    ],
)
def test_flops_equal_those_of_torch(op: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        result = op(*args)
    assert flops(signature_of(op, args, {}, result)) == counter.get_total_flops()


def test_both_gradients_of_a_grouped_convolution_cost_its_forward() -> None:
    forward = flops(sign(aten.convolution.default, *convolution(groups=4)))
    assert flops(sign(aten.convolution_backward.default, *convolution_backward(groups=4))) == 2 * forward


def test_attention_on_cpu_costs_its_products() -> None:
    q = torch.ones(2, 3, 40, 8)
    forward, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    out, log_sum = forward(q, q, q)
    product = 2 * 2 * 3 * 40 * 40 * 8
    assert flops(sign(forward, q, q, q)) == 2 * product
    assert flops(sign(backward, out, q, q, q, out, log_sum, 0.0, False)) == 5 * product
    # Rows 0 to 31 reach 32 columns, rows 32 to 39 all 40.
    assert flops(sign(forward, q, q, q, 0.0, True)) == 2 * 2 * 2 * 3 * 8 * (32 * 32 + 8 * 40)


def test_flops_can_be_counted_while_a_graph_is_captured() -> None:
    signature = sign(aten.convolution.default, *convolution())
    with FakeTensorMode():
        assert flops(signature) > 0


def test_bytes_are_those_of_storages() -> None:
    x, row = torch.ones(64, 32), torch.ones(32)
    assert bytes_moved(sign(aten.add.Tensor, x, x)) == 3 * 8192
    assert bytes_moved(sign(aten.add.Tensor, x, row.expand(64, 32))) == 2 * 8192 + 128
    assert bytes_moved(sign(aten.view.default, x, [32, 64])) == 0
    assert bytes_moved(sign(aten.zeros_like.default, x)) == 8192
    assert bytes_moved(sign(aten.empty_like.default, x)) == 0
    index = torch.zeros(4, dtype=torch.int64)
    assert bytes_moved(sign(aten.embedding.default, torch.ones(1000, 8), index)) == 2 * 4 * 8 * 4 + 32


def test_dtype_of_the_arithmetic() -> None:
    assert compute_dtype(sign(aten.mm.default, torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())) == "bfloat16"
    assert compute_dtype(sign(aten.embedding.default, torch.ones(2, 2), torch.zeros(1, dtype=torch.int64))) == "float32"
    assert compute_dtype(sign(aten.arange.default, 3)) == "float32"


@pytest.mark.parametrize("name", list(DEVICES))
def test_roofline_grows_with_the_op(name: str) -> None:
    model = Roofline(device_spec(name))
    sizes = (1, 64, 512, 1024)
    matrices = [torch.ones(n, n) for n in sizes]
    products = [model.op_cost(op_of(sign(aten.mm.default, a, a))).runtime_s for a in matrices]
    sums = [model.op_cost(op_of(sign(aten.add.Tensor, a, 1.0))).runtime_s for a in matrices]
    assert products == sorted(products)
    assert sums == sorted(sums)
    assert model.device.launch_s < products[0] < products[-1]


def test_roofline_is_the_longer_of_arithmetic_and_traffic() -> None:
    device = device_spec("H100 SXM")
    n = 2048
    product = OpSignature("aten.mm.default", (_square(n), _square(n)), (), (_square(n),))
    assert Roofline(device).op_cost(op_of(product)).runtime_s == pytest.approx(5e-6 + 2 * n**3 / 989.5e12)
    relu = OpSignature("aten.relu.default", (_square(n),), (), (_square(n),))
    assert Roofline(device).op_cost(op_of(relu)).runtime_s == pytest.approx(5e-6 + 2 * 2 * n * n / 3.35e12)
    border = OpSignature("placemat.border", (), (), ())
    assert Roofline(device).op_cost(op_of(border)).runtime_s == 0
    view = OpSignature("aten.view.default", (_square(n), (n * n,)), (), (_square(n),))
    assert Roofline(device).op_cost(op_of(view)).runtime_s == 0


def _square(n: int) -> TensorSpec:
    return TensorSpec((n, n), (n, 1), "bfloat16", "cuda", 2)


def test_drawing_random_numbers_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e12)
    model = Roofline(host_spec(tmp_path))
    x = torch.ones(1000, 1000)
    for train, seconds in ((True, 1e6 / 1e8), (False, 9e6 / 1e12)):
        cost = model.op_cost(op_of(sign(aten.native_dropout.default, x, 0.1, train)))
        assert cost.runtime_s == pytest.approx(1e-6 + seconds)
    assert device_spec("L4").random_numbers_per_s == float("inf")


def test_device_table_is_in_si_units_and_dense() -> None:
    h100 = device_spec("H100 SXM")
    assert h100.bandwidth_bytes_per_s == 3.35e12
    assert h100.flops_per_s("bfloat16") == 989.5e12
    assert h100.flops_per_s("int8") == h100.flops_per_s("float32")
    assert device_spec("NVIDIA H100 80GB HBM3") is h100
    for device in DEVICES.values():
        assert 1e11 < device.bandwidth_bytes_per_s < 1e13
        assert device.flops_per_s("float64") <= device.flops_per_s("float32") < device.flops_per_s("bfloat16") < 1e16
        assert 1e10 < device.memory_bytes < 1e12
        assert device.source


def test_an_unknown_device_is_refused_with_the_known_names() -> None:
    with pytest.raises(PlacematError, match=r"'H100 PCIe'.*A100 80GB SXM, H100 SXM"):
        device_spec("H100 PCIe")
    with pytest.raises(PlacematError, match="device type 'xpu'"):
        present_roofline("xpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to ask")
def test_cuda_without_a_device_says_how_to_name_one() -> None:
    with pytest.raises(PlacematError, match=r"device_spec\('H100 SXM'\)"):
        present_roofline("cuda")


def test_host_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    measure = host_module._measure

    def counted() -> dict[str, Any]:
        measured.append(True)
        return measure()

    monkeypatch.setattr(host_module, "_measure", counted)
    state = torch.get_rng_state()
    with FakeTensorMode():
        first = host_spec(tmp_path)
    assert host_spec(tmp_path) == first
    assert len(measured) == 1
    assert torch.equal(torch.get_rng_state(), state)
    rates = (first.flops_per_s("float32"), first.bandwidth_bytes_per_s, first.random_numbers_per_s)
    for figure in (*rates, first.launch_s):
        assert figure > 0
        assert float(f"{figure:.1e}") == pytest.approx(figure)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"version": 1}', '{"version": 99, "entries": {}}', '{"version": 1, "entries": []}'),
        "\x00\x01",
    ],
)
def test_a_spoilt_cache_is_replaced(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e9)
    (tmp_path / "host.json").write_text(content)
    assert host_spec(tmp_path).bandwidth_bytes_per_s == 1e9
    _fake_measurement(monkeypatch, 2e9)
    assert host_spec(tmp_path).bandwidth_bytes_per_s == 1e9
    assert [p.name for p in tmp_path.iterdir()] == ["host.json"]


def test_a_spoilt_entry_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e9)
    host_spec(tmp_path)
    content = json.loads((tmp_path / "host.json").read_text())
    key = next(iter(content["entries"]))
    content["entries"][key]["bytes_per_s"] = -1
    (tmp_path / "host.json").write_text(json.dumps(content))
    _fake_measurement(monkeypatch, 2e9)
    assert host_spec(tmp_path).bandwidth_bytes_per_s == 2e9
    assert host_spec(tmp_path).bandwidth_bytes_per_s == 2e9


def test_a_directory_that_cannot_be_made_only_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e9)
    (tmp_path / "file").write_text("")
    assert host_spec(tmp_path / "file" / "below").bandwidth_bytes_per_s == 1e9


def test_thread_counts_have_entries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e9)
    host_spec(tmp_path)
    _fake_measurement(monkeypatch, 2e9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert host_spec(tmp_path).bandwidth_bytes_per_s == 2e9


def test_the_first_process_wins(tmp_path: Path) -> None:
    cache = JsonCache("numbers", tmp_path, lambda entry: isinstance(entry, int))
    assert cache.put("a", 1) == 1
    assert cache.put("a", 2) == 1
    assert cache.get("a") == 1
    assert cache.get("b") is None


def _fake_measurement(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    rates = {"bytes_per_s": bytes_per_s, "random_numbers_per_s": 1e8, "dispatch_s": 1e-6}
    entry = {"flops_per_s": {"float32": 1e10, "bfloat16": 2e10}, **rates}
    monkeypatch.setattr(host_module, "_measure", lambda: entry)


def test_the_cache_directory_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e9)
    monkeypatch.setenv("PLACEMAT_CACHE_DIR", str(tmp_path / "named"))
    model = present_roofline("cpu")
    assert (tmp_path / "named" / "host.json").exists()
    assert "10 GFLOP/s in float32, 1 GB/s" in model.source


def test_measured_workspaces_replace_bounds_only(tmp_path: Path) -> None:
    base = Roofline(device_spec("L4"), num_threads=torch.get_num_threads())
    model = MeasuredWorkspaces(base, tmp_path)
    bounded = sign(aten.convolution.default, *convolution(channels=16))
    exact = sign(aten.mm.default, torch.ones(8, 8), torch.ones(8, 8))
    with FakeTensorMode():
        cost = model.op_cost(op_of(bounded))
    assert cost.workspace_bytes == measure_workspace_bytes(bounded) <= workspace_bytes(bounded, base.num_threads)
    assert cost.runtime_s == base.op_cost(op_of(bounded)).runtime_s
    assert model.op_cost(op_of(exact)) == base.op_cost(op_of(exact))
    entries = json.loads((tmp_path / "workspaces.json").read_text())["entries"]
    assert list(entries.values()) == [cost.workspace_bytes]


def test_the_present_roofline_measures_small_bounded_ops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_measurement(monkeypatch, 1e9)
    monkeypatch.setenv("PLACEMAT_CACHE_DIR", str(tmp_path))
    model = present_roofline("cpu")
    small = sign(aten.mm.default, torch.zeros(6, 32).bfloat16(), torch.zeros(32, 32).bfloat16())
    spec = TensorSpec((2048, 2048), (2048, 1), "bfloat16", "cpu", 2)
    large = OpSignature("aten.mm.default", (spec, spec), (), (spec,))
    threads = torch.get_num_threads()
    assert model.op_cost(op_of(small)).workspace_bytes == measure_workspace_bytes(small)
    assert model.op_cost(op_of(large)).workspace_bytes == workspace_bytes(large, threads)
    assert pickle.loads(pickle.dumps(model)).op_cost(op_of(small)) == model.op_cost(op_of(small))


def test_a_bound_stands_in_while_a_profiler_runs(tmp_path: Path) -> None:
    model = MeasuredWorkspaces(Roofline(device_spec("L4"), num_threads=1), tmp_path)
    signature = sign(aten.mm.default, torch.zeros(6, 32).bfloat16(), torch.zeros(32, 32).bfloat16())
    with torch.profiler.profile():
        assert model.op_cost(op_of(signature)).workspace_bytes == workspace_bytes(signature, 1)
    assert not (tmp_path / "workspaces.json").exists()


def test_workspaces_are_not_measured_inside_a_profiler() -> None:
    signature = sign(aten.mm.default, torch.ones(8, 8), torch.ones(8, 8))
    with torch.profiler.profile(), pytest.raises(PlacematError, match="plan outside of it"):
        measure_workspace_bytes(signature)


def test_costs_can_be_asked_for_while_a_model_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMAT_CACHE_DIR", str(tmp_path))
    signature = sign(aten.convolution.default, *convolution(channels=16))
    costs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        costs.append(MeasuredWorkspaces(present_roofline("cpu"), tmp_path).op_cost(op_of(signature)))
        return graph.forward

    state = torch.get_rng_state()
    torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(torch.ones(2))
    assert costs[0].runtime_s > 0
    assert costs[0].workspace_bytes == measure_workspace_bytes(signature)
    assert torch.equal(torch.get_rng_state(), state)


def test_flops_of_the_products_of_experts_are_those_of_one_product() -> None:
    rows, weight = (
        TensorSpec((10, 4), (4, 1), "float32", "cpu", 4),
        TensorSpec((3, 4, 6), (24, 6, 1), "float32", "cpu", 4),
    )
    for target, products in (("fallback", 1), ("fallback_backward", 2)):
        signature = OpSignature(f"transformers.grouped_mm_{target}.default", (rows, weight), (), ())
        assert flops(signature) == products * 2 * 10 * 4 * 6
