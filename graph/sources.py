"""Where an op comes from: the module path and the user's source line, read from what Dynamo recorded on the node."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)$')
_SELF = re.compile(r"^L\['\w+'\]\.__self__\.?")
_INDEX = re.compile(r"\[(?:'([^']+)'|(\d+))\]|(?:^|\.)_(?:modules|parameters|buffers)(?=[\[.])")

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY_ROOTS = (
    os.path.dirname(os.path.abspath(torch.__file__)),
    sysconfig.get_paths()["stdlib"],
    *(os.path.join(_HERE, name) for name in ("graph", "optimizer", "cost_models")),
)


@functools.lru_cache(maxsize=1024)
def is_library_file(path: str) -> bool:
    """Whether a file belongs to torch, the standard library or placemat: frames there are not the user's."""
    full = os.path.abspath(path)
    if f"{os.sep}site-packages{os.sep}" in full:  # the standard library's directory contains site-packages
        return any(full.startswith(root + os.sep) for root in _LIBRARY_ROOTS if root != _LIBRARY_ROOTS[1])
    return any(full.startswith(root + os.sep) for root in _LIBRARY_ROOTS)


def user_line(stack_trace: str | None) -> str | None:
    """Deepest frame of a recorded stack that is the user's: "model.py:12, in forward: x = self.a(x)"."""
    best = None
    lines = (stack_trace or "").splitlines()
    for i, text in enumerate(lines):
        match = _FRAME.match(text)
        if match is None:
            continue
        code = lines[i + 1].strip() if i + 1 < len(lines) else ""
        if best is None or not is_library_file(match["file"]):
            best = f"{match['file']}:{match['line']}, in {match['function']}: {code}"
    return best


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that ran the node ("h.3.mlp.c_fc"), or "" for the root."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for name, _ in reversed(stack.values()):
        return tidy(name)
    return ""


def tidy(name: str) -> str:
    """Turn Dynamo's source text into a path: "L['forward'].__self__._modules['h']._modules['0']" -> "h.0"."""
    name = _SELF.sub("", name)
    name = _INDEX.sub(lambda m: f".{m[1] or m[2]}" if m[0].startswith("[") else "", name)
    return name.strip(".").replace("..", ".")


def module_paths(graph: fx.Graph) -> dict[fx.Node, str]:
    """Module path of every node; a backward node takes that of the forward node it differentiates (same seq_nr)."""
    by_sequence: dict[int, str] = {}
    paths: dict[fx.Node, str] = {}
    for node in graph.nodes:
        path = module_path(node)
        sequence = node.meta.get("seq_nr")
        if path and sequence is not None:
            by_sequence.setdefault(sequence, path)
        paths[node] = path or by_sequence.get(sequence, "")
    return paths
