"""From an OpGraph to seconds and workspace bytes."""

from placemat.cost_models.base import CostModel, Costs, OpCost, cost_graph
from placemat.cost_models.devices import DEVICES, DeviceSpec, device_spec
from placemat.cost_models.host import host_spec
from placemat.cost_models.measured import MeasuredWorkspaces
from placemat.cost_models.roofline import Roofline, default_cost_model

__all__ = [
    "DEVICES",
    "CostModel",
    "Costs",
    "DeviceSpec",
    "MeasuredWorkspaces",
    "OpCost",
    "Roofline",
    "cost_graph",
    "default_cost_model",
    "device_spec",
    "host_spec",
]
