"""A matplotlib figure that a notebook shows without `%matplotlib inline`. The one module that imports matplotlib."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure

_DPI = 80  # about as wide as a page of text, and a file of some 50 kB


class PlanFigure(Figure):
    """Made without pyplot, so there is no window, no global state, and nothing to close."""

    def _repr_png_(self) -> bytes:
        """PNG of the figure, for IPython's display protocol."""
        png = BytesIO()
        self.savefig(png, format="png", dpi=_DPI)
        return png.getvalue()
