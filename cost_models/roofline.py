"""Roofline: an op takes as long as its arithmetic or its memory traffic, whichever is longer.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009:

    runtime_s = launch_s + max(FLOPs / peak FLOP/s of the dtype, bytes moved / bandwidth, random numbers / their rate)

The third roof is ours: on CPU a dropout takes ten times longer to draw its mask than to move its bytes.
"""

from __future__ import annotations

import torch

from placemat.cost_models.base import OpCost
from placemat.cost_models.devices import DeviceSpec
from placemat.cost_models.flops import bytes_moved, compute_dtype, flops, random_numbers
from placemat.cost_models.operands import device_type
from placemat.cost_models.workspaces import is_free, is_known, workspace_bytes
from placemat.graph.ir import Op


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
        if is_free(signature):
            return OpCost(runtime_s=0.0, workspace_bytes=workspace)
        known = is_known(signature.target) or device_type(signature) != "cpu"
        arithmetic_s = flops(signature) / self.device.flops_per_s(compute_dtype(signature))
        traffic_s = bytes_moved(signature) / self.device.bandwidth_bytes_per_s
        random_s = random_numbers(signature) / self.device.random_numbers_per_s
        runtime_s = self.device.launch_s + max(arithmetic_s, traffic_s, random_s)
        return OpCost(runtime_s=runtime_s, workspace_bytes=workspace, workspace_known=known)
