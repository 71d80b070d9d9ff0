"""Colours of categories and of decisions, the same in every plot and in the notebook repr."""

from __future__ import annotations

CATEGORY_COLORS = {
    "parameters": "#4c566a",
    "buffers": "#6f7d95",
    "inputs": "#94a1b8",
    "existing gradients": "#c2cad8",
    "reserved": "#dddddd",
    "gradients": "#b07d2b",
    "outputs": "#dfc27d",
    "mutations": "#8c6bb1",
    "activations": "#2f7fb8",
    "temporaries": "#92c5de",
}
OTHER_COLOR = "#d08fa8"
KEPT_COLOR = "#7db8e0"
RECOMPUTED_COLOR = "#f0965a"
FREED_COLOR = "#d5d5d5"
BACKWARD_COLOR = "#f6f6f6"
CURVE_COLOR = "#2f7fb8"
ALERT_COLOR = "#c0182b"


def category_color(name: str) -> str:
    return CATEGORY_COLORS.get(name, OTHER_COLOR)
