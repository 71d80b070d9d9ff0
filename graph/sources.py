"""Where an op comes from: the module path and the user's source line, read from what Dynamo recorded on the node."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)$')
_SELF = re.compile(r"^L\['\w+'\]\.__self__\.?")
_INDEX = re.compile(r"\[(?:'([^']+)'|(\d+))\]|(?:^|\.)_(?:modules|parameters|buffers)(?=[\[.])")

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_ROOTS = tuple(os.path.join(_HERE, name) for name in ("graph", "optimizer", "cost_models"))
_LIBRARY_ROOTS = (os.path.dirname(os.path.abspath(torch.__file__)), sysconfig.get_paths()["stdlib"], *_OWN_ROOTS)


@functools.lru_cache(maxsize=1024)
def is_library_file(path: str) -> bool:
    """Whether a file belongs to torch, the standard library or placemat: frames there are not the user's."""
    if f"{os.sep}site-packages{os.sep}" in os.path.abspath(path):  # the standard library's directory contains it
        return _is_inside(path, tuple(root for root in _LIBRARY_ROOTS if root != _LIBRARY_ROOTS[1]))
    return _is_inside(path, _LIBRARY_ROOTS)


def users_stacklevel() -> int:
    """`stacklevel` with which a `warnings.warn` in the caller points to the user's line that led there."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and is_library_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _is_inside(path: str, roots: tuple[str, ...]) -> bool:
    return os.path.abspath(path).startswith(tuple(root + os.sep for root in roots))


def user_line(stack_trace: str | None) -> str | None:
    """Deepest frame of a recorded stack that is the user's: "model.py:12, in forward: x = self.a(x)".

    If all are a library's (a Sequential, called by nobody else's forward), the deepest that is not placemat's.
    """
    users = library = None
    lines = (stack_trace or "").splitlines()
    for i, text in enumerate(lines):
        match = _FRAME.match(text)
        if match is None:
            continue
        code = lines[i + 1].strip() if i + 1 < len(lines) else ""
        frame = f"{shown_file(match['file'])}:{match['line']}, in {match['function']}: {code}"
        if not is_library_file(match["file"]):
            users = frame
        elif not _is_inside(match["file"], _OWN_ROOTS):
            library = frame
    return users or library


def shown_file(path: str) -> str:
    """What the user calls a file: itself, or "In[3]" for a notebook's cell, which IPython compiles under the name of a
    temporary file that is never written and is another one in each session."""
    ipython = sys.modules.get("IPython")  # not ours to import: where there is a cell, it is there
    shell = None if ipython is None else ipython.get_ipython()
    name = None if shell is None else shell.compile.format_code_name(path)
    return path if name is None else name[1]


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
