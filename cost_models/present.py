"""The roofline of the device that is here."""

from __future__ import annotations

import torch

from placemat.cost_models.base import CostModel
from placemat.cost_models.devices import device_spec
from placemat.cost_models.host import host_spec
from placemat.cost_models.measured_workspaces import DEFAULT_LIMIT_BYTES, MeasuredWorkspaces
from placemat.cost_models.roofline import Roofline
from placemat.graph.errors import UnsupportedFeature


def present_roofline(device: str) -> CostModel:
    """Roofline of the device type that the model is on, with small CPU ops' workspaces measured.

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
