"""The cost model that is used where the user names none."""

from __future__ import annotations

from placemat.cost_models.base import CostModel
from placemat.cost_models.measured import Measured


def default_cost_model(device: str) -> CostModel:
    """Measurement on the device that the model is on; what cannot be measured has the device's roofline.

    Args:
        device: "cpu", or "cuda" for the current device.

    Raises:
        UnsupportedFeature: another device type, or no CUDA device here; the message says how to name one.
    """
    return Measured(device)
