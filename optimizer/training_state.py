"""Everything that a training step may change, put aside and put back."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from placemat.graph.static import local_part
from placemat.installed import ATTRIBUTE

# Attributes that placemat itself sets on a module: a plan made during a first call stays.
_OWN_ATTRIBUTES = frozenset({"forward", "plan", ATTRIBUTE})


def named_leaves(tree: object, path: str) -> Iterator[tuple[str, object]]:
    """(path, leaf) of nested mappings, sequences and dataclasses: ("output.logits", tensor), ("args[0]", tensor)."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            name = f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"
            yield from named_leaves(child, name)
    elif isinstance(tree, (list, tuple)):
        for index, child in enumerate(tree):
            yield from named_leaves(child, f"{path}[{index}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for item in fields(tree):
            yield from named_leaves(getattr(tree, item.name), f"{path}.{item.name}")
    else:
        yield path, tree


def named_tensors(tree: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors among `named_leaves`."""
    for name, leaf in named_leaves(tree, path):
        if isinstance(leaf, Tensor):
            yield name, leaf


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits: NaNs equal themselves, 0.0 and -0.0 differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # A contiguous tensor of one element may have any stride, with which it could not be viewed as bytes.
    a, b = (t.detach().cpu().contiguous().as_strided((t.numel(),), (1,)) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


class TrainingState:
    """The state of some modules and of the random number generators at one moment.

    Holds the contents (copied to the host; of a DTensor this process's shard) of parameters, buffers and tensors that
    are plain attributes; the objects in `.grad`; every other attribute by reference, train flags and counters included;
    the generators of torch (CPU and CUDA), `random` and numpy. Contents of lists and other objects that a forward
    changes in place are not covered.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list({id(m): m for root in modules for m in root.modules()}.values())
        self._attributes = [dict(m.__dict__) for m in self._modules]
        self._buffers = [dict(m._buffers) for m in self._modules]
        tensors = {id(t): t for m in self._modules for t in _own_tensors(m)}
        self._contents = [(t, _content(t)) for t in tensors.values()]
        self._grads = [(t, t.grad) for t in tensors.values() if t.is_leaf]
        self.rng = rng_states()

    def restore(self) -> None:
        """Put everything back; tensors that still have their bits are not written to."""
        for module, attributes, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            for name in set(module.__dict__) - set(attributes) - _OWN_ATTRIBUTES:
                del module.__dict__[name]
            kept = {name: value for name, value in attributes.items() if name not in _OWN_ATTRIBUTES}
            module.__dict__.update(kept)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, content in self._contents:
                if not same_bits(local_part(tensor), content):
                    local_part(tensor).copy_(content)
        for tensor, grad in self._grads:
            tensor.grad = grad
        set_rng_states(self.rng)

    def clear_grads(self) -> None:
        """Every `.grad` to None, without touching the gradients that were put aside."""
        for tensor, _ in self._grads:
            tensor.grad = None


def _content(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).cpu().clone()


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and tensors that are plain attributes of this module, not of its children."""
    for candidate in (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()):
        if isinstance(candidate, Tensor):
            yield candidate


def rng_states() -> dict[str, Tensor | bytes]:
    """State of every generator that a training step draws from, by name."""
    states: dict[str, Tensor | bytes] = {
        "cpu": torch.get_rng_state(),
        "python": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }
    if torch.cuda.is_initialized():
        states.update({f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Put back what `rng_states` returned."""
    torch.set_rng_state(states["cpu"])
    random.setstate(pickle.loads(states["python"]))
    np.random.set_state(pickle.loads(states["numpy"]))
    for name, state in states.items():
        if name.startswith("cuda:"):
            torch.cuda.set_rng_state(state, name)


def replaced_forwards(model: nn.Module) -> list[Any]:
    """What placemat put in the place of the forward of the model, and of any module inside it."""
    found = [module.__dict__.get(name) for module in model.modules() for name in (ATTRIBUTE, "forward")]
    return [forward for forward in found if hasattr(forward, "bypassed")]


@contextmanager
def original_forwards(model: nn.Module) -> Iterator[None]:
    """Let the model, and any module inside it, run the forward that it had before placemat replaced it.

    What another library wrapped around the handle since stays around it.
    """
    replacements = replaced_forwards(model)
    for forward in replacements:
        forward.bypassed = True
    try:
        yield
    finally:
        for forward in replacements:
            forward.bypassed = False


def clone_inputs(
    args: Sequence[object], kwargs: Mapping[str, object], model: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of their own for one run: same shapes, strides, aliasing and `requires_grad`, gradients cleared.

    A tensor that is a parameter or buffer of the model stays itself.
    """
    memo: dict[int, Any] = {id(t): t for m in model.modules() for t in _own_tensors(m)}
    storages: dict[int, torch.UntypedStorage] = {}
    for _, tensor in named_tensors((tuple(args), dict(kwargs)), ""):
        if id(tensor) not in memo:
            memo[id(tensor)] = _clone(tensor, storages)
    return copy.deepcopy((tuple(args), dict(kwargs)), memo)


def _clone(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A leaf with the tensor's content; strided tensors are the same view of a clone of their storage."""
    source = tensor.detach()
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return source.clone().requires_grad_(tensor.requires_grad)
    storage = source.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    clone.set_(storages[storage._cdata], source.storage_offset(), source.size(), source.stride())
    return clone.requires_grad_(tensor.requires_grad)
