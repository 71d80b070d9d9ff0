"""From an OpGraph to seconds and workspace bytes.

| cost model | where its figures come from |
|---|---|
| `Measured` | every distinct op is run on the present device, alone, on synthetic inputs |
| `Roofline` | FLOPs, bytes and random numbers of the op against the rates of a device, from a table or one's own |
| `Recorded` | a file that `Measured.recorded()` wrote, perhaps on another machine |
| `CostFunction`, `CostTable` | the user |
| `MeasuredWorkspaces` | another model's, but for workspaces that vendor libraries choose: those are measured |

`base.py` has the protocol; `workspaces*.py` the formulas for what ops allocate on the CPU; `flops.py` arithmetic and
traffic; `devices.py` the table of devices with its sources; `host.py` the rates of this machine's CPU.
"""

from placemat.cost_models.base import CostModel, Costs, OpCost, cost_graph
from placemat.cost_models.custom import CostFunction, CostTable
from placemat.cost_models.default import default_cost_model
from placemat.cost_models.devices import DEVICES, DeviceSpec, device_spec
from placemat.cost_models.host import host_spec
from placemat.cost_models.measured import Measured
from placemat.cost_models.measured_workspaces import MeasuredWorkspaces
from placemat.cost_models.present import present_roofline
from placemat.cost_models.recorded import Recorded
from placemat.cost_models.roofline import Roofline

__all__ = [
    "DEVICES",
    "CostFunction",
    "CostModel",
    "CostTable",
    "Costs",
    "DeviceSpec",
    "Measured",
    "MeasuredWorkspaces",
    "OpCost",
    "Recorded",
    "Roofline",
    "cost_graph",
    "default_cost_model",
    "device_spec",
    "host_spec",
    "present_roofline",
]
