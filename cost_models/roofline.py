"""Roofline: an op takes as long as its arithmetic or its memory traffic, whichever is longer.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009:

    runtime_s = launch_s + max(FLOPs / peak FLOP/s of the dtype, bytes moved / bandwidth, random numbers / their rate)

The third roof is ours: on CPU a dropout takes ten times longer to draw its mask than to move its bytes.
"""

from __future__ import annotations

import torch

from placemat.cost_models.base import CostModel, OpCost
from placemat.cost_models.devices import DeviceSpec, device_spec
from placemat.cost_models.flops import bytes_moved, compute_dtype, flops, random_numbers
from placemat.cost_models.host import host_spec
from placemat.cost_models.measured import DEFAULT_LIMIT_BYTES, MeasuredWorkspaces
from placemat.cost_models.workspaces import is_view, workspace_bytes
from placemat.graph.errors import UnsupportedFeature
from placemat.graph.ir import Op

_FREE = ("placemat.border", "placemat.rng_state")


class Roofline:
    """Cost model of one device.

    Args:
        device: rates of the device (`device_spec`, `host_spec` or your own).
        num_threads: intra-op threads for CPU workspaces; the present `torch.get_num_threads()` if None.
    """

    def __init__(self, device: DeviceSpec, num_threads: int | None = None) -> None:
        self.device = device
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads

    @property
    def source(self) -> str:
        rate = self.device.flops_per_s("float32") / 1e9
        return (
            f"roofline of {self.device.name}: {rate:.3g} GFLOP/s in float32, "
            f"{self.device.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {self.device.launch_s * 1e6:.2g} us per op "
            f"({self.device.source})"
        )

    def op_cost(self, op: Op) -> OpCost:
        """Seconds and workspace bytes of one run; views and bookkeeping pseudo-ops take no time."""
        signature = op.signature
        workspace = workspace_bytes(signature, self.num_threads)
        if is_view(signature.target) or signature.target in _FREE:
            return OpCost(runtime_s=0.0, workspace_bytes=workspace)
        arithmetic_s = flops(signature) / self.device.flops_per_s(compute_dtype(signature))
        traffic_s = bytes_moved(signature) / self.device.bandwidth_bytes_per_s
        random_s = random_numbers(signature) / self.device.random_numbers_per_s
        runtime_s = self.device.launch_s + max(arithmetic_s, traffic_s, random_s)
        return OpCost(runtime_s=runtime_s, workspace_bytes=workspace)


def default_cost_model(device: str) -> CostModel:
    """Roofline of the device type that the model is on, with small CPU ops' workspaces measured (`measured.py`).

    Args:
        device: "cpu" (the host is measured once, see `host_spec`) or "cuda" (the current device must be in the table).

    Raises:
        UnsupportedFeature: another device type, no CUDA device here, or one that the table does not have.
    """
    if device == "cpu":
        return MeasuredWorkspaces(Roofline(host_spec()), limit_bytes=DEFAULT_LIMIT_BYTES)
    if device != "cuda":
        raise UnsupportedFeature(
            f"no default cost model for device type {device!r}; pass `cost_model=Roofline(device_spec('H100 SXM'))`, "
            "another device of `placemat.cost_models.devices`, or rates of your own, `Roofline(DeviceSpec(...))`."
        )
    if not torch.cuda.is_available():
        raise UnsupportedFeature(
            "the model is on a CUDA device, but this process has none to ask for its name; pass "
            "`cost_model=Roofline(device_spec('H100 SXM'))` or another device of `placemat.cost_models.devices`."
        )
    return Roofline(device_spec(torch.cuda.get_device_name()))
