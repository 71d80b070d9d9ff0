"""An op's signature as one line of text: what a measurement is filed under, for people to read and files to keep.

    aten.mm.default(float32[8, 16]{16, 1}, float32[16, 4]{4, 1}) -> float32[8, 4]{4, 1}

Shapes stand in brackets, strides in braces. The device is left out: a file of measurements is of one device.
"""

from __future__ import annotations

from typing import Any

from placemat.graph.ir import OpSignature, TensorSpec


def signature_text(signature: OpSignature) -> str:
    args = [_text(a) for a in signature.args]
    args += [f"{name}={_text(value)}" for name, value in signature.kwargs if name != "device"]
    return f"{signature.target}({', '.join(args)}) -> {', '.join(_text(o) for o in signature.outputs)}"


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return f"{value.dtype}{list(value.shape)}{{{', '.join(map(str, value.strides))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_text(v) for v in value)})"
    return repr(value)
