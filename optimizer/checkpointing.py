"""Wrap submodules in `torch.utils.checkpoint`, non-reentrant, so that a step does what it did, bit by bit.

PyTorch's function runs a forward twice and does not look at what else that does. Here the second run

- finds the plain attributes of its modules (train flags, counters, scales) as they were when the first began, and
  leaves them as they were before it;
- moves no running statistics: normalisation layers get clones of theirs (BatchNorm would count the batch twice);
- is refused if a parameter or a buffer that it reads was changed since the first run.

The arguments are handed over as flat tensors, so that PyTorch checks their versions, those of keyword arguments too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from placemat.graph.errors import PlacematError, UnsupportedFeature
from placemat.installed import forward_under

_COUNTER = "num_batches_tracked"
# Functions that write running statistics without a trace in version counters; positions of mean and variance.
_STATISTICS: dict[Any, tuple[int, int]] = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
    torch.native_batch_norm: (3, 4),
}
# They save their noise before it is drawn, and PyTorch ends the second run at the last tensor that is saved: backward
# would read what memory happens to hold (torch 2.13).
_DRAWN_AFTER_SAVING = (F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_)
_NAMES = ("running_mean", "running_var")
_KNOWN_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward)


class CheckpointedForward:
    """Callable replacement of `module.forward`; deepcopy and pickle take it along.

    Attributes:
        module: the module itself.
        path: of it, for messages.
        replaced: what its `__dict__` had under "forward" before, or None.
        bypassed: whether calls run the forward that was there before (`verify` compares with that).
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self.bypassed = False
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that was there before."""
        return forward_under(self.module, self.replaced)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A trace has no second run: what a captured step recomputes is a plan's business.
        if self.bypassed or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            if self.replaced is None:  # not `original`: a trace in torch 2.9 cannot bind a method
                return type(self.module).forward(self.module, *args, **kwargs)
            return self.replaced(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        del leaves, args, kwargs  # nothing but PyTorch's frame holds the arguments
        run = functools.partial(_call, self.original, structure, others, is_tensor)
        second = _SecondRun(self.module, self.path)
        versions = [t._version for t in tensors]
        output = checkpoint(
            run,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: (contextlib.nullcontext(), second),
        )
        if any(t._version != version for t, version in zip(tensors, versions, strict=True)):
            raise UnsupportedFeature(
                f"the module {self.path} writes to its arguments in place, so that a second run of its forward would "
                f"not start from what the first one had. {_REMEDY}"
            )
        second.first_is_over()
        return output


_REMEDY = "Remedy: leave it out of the modules to wrap, or take the write out of it (inplace=False)."


def _call(forward: Callable[..., Any], structure: Any, others: Any, is_tensor: Any, *tensors: Tensor) -> Any:
    supply = iter(tensors)
    leaves = [next(supply) if is_one else other for is_one, other in zip(is_tensor, others, strict=True)]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    del leaves, tensors, supply
    return forward(*args, **kwargs)


class _SecondRun(contextlib.AbstractContextManager["_SecondRun"]):
    """What a forward runs in for the second time, and what is remembered of the first for that."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path = path
        self.attributes = [(m, _plain(m.__dict__)) for m in module.modules()]
        self.module = module
        self.is_moved = {m for m in module.modules() if _moves_statistics(m)}
        self.tensors = self._state()
        self.versions = {name: t._version for name, t in self.tensors.items()}
        self.exits: list[contextlib.ExitStack] = []

    def first_is_over(self) -> None:
        """Refuse a forward that overwrites a parameter or buffer, a second run of which would do that twice.

        Raises:
            UnsupportedFeature: names the buffer.
        """
        if (changed := self._changed()) is not None:
            raise UnsupportedFeature(
                f"the forward of the wrapped module {self.path} overwrites {changed}: a second run would do that "
                "twice, and read the new content. Remedy: leave it out of the modules to wrap."
            )

    def _changed(self) -> str | None:
        present = self._state()
        for name in self.tensors.keys() | present.keys():
            old, new = self.tensors.get(name), present.get(name)
            if old is not new or (new is not None and new._version != self.versions[name]):
                return f"{self.path}.{name}"
        return None

    def _state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, but for statistics of normalisation layers that no result depends on."""
        state: dict[str, Tensor] = {}
        for prefix, inner in self.module.named_modules():
            for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
                if tensor is not None and not (name in (_COUNTER, *_NAMES) and inner in self.is_moved):
                    state[f"{prefix}.{name}".lstrip(".")] = tensor
        return state

    def __enter__(self) -> _SecondRun:
        if (changed := self._changed()) is not None:
            raise UnsupportedFeature(
                f"{changed} was changed between forward and backward, and the wrapped module {self.path} has to run "
                "again with what it was. Remedy: change it after backward(), or leave the module out of those to wrap."
            )
        exits = contextlib.ExitStack()
        self.exits.append(exits)
        for module, attributes in self.attributes:
            exits.callback(_put_back, module, dict(module.__dict__), dict(module._buffers))
            module.__dict__.update(attributes)
            if module in self.is_moved and isinstance(module._buffers.get(_COUNTER), Tensor):
                module._buffers[_COUNTER] = module._buffers[_COUNTER].clone()  # type: ignore[union-attr]
        exits.enter_context(_ClonedStatistics())
        return self

    def __exit__(self, *error: object) -> None:
        self.exits.pop().close()


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that are no tensors: those would be held from forward to backward."""
    return {name: value for name, value in attributes.items() if not isinstance(value, Tensor) and name != "forward"}


def _put_back(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Tensor | None]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


def _moves_statistics(module: nn.Module) -> bool:
    """Whether it is a normalisation layer that goes by the batch: in training, and with PyTorch's own forward."""
    return isinstance(module, _NormBase) and module.training and type(module).forward in _KNOWN_FORWARDS


class _ClonedStatistics(TorchFunctionMode):
    """Lets normalisation functions that update running statistics update clones of them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _DRAWN_AFTER_SAVING:
            raise UnsupportedFeature(
                "a wrapped module calls rrelu, whose noise PyTorch saves before it is drawn: a second run would end "
                "too early. Remedy: leave modules with RReLU out of those to wrap."
            )
        args, kwargs = list(args), dict(kwargs or {})
        for position, name in zip(_STATISTICS.get(function, ()), _NAMES, strict=False):
            if position < len(args) and isinstance(args[position], Tensor):
                args[position] = args[position].clone()
            elif isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].clone()
        return function(*args, **kwargs)


def apply_checkpointing(model: nn.Module, modules: Iterable[str]) -> nn.Module:
    """Wrap submodules in `torch.utils.checkpoint(..., use_reentrant=False)`, in place; returns the same model.

    Loss, gradients, buffers and the random state after a step are bitwise those of the model as it was. Double
    backward, hooks and graph breaks work as in eager. `placemat.restore(model)` undoes it. Under `torch.compile`
    nothing is wrapped: what a compiled graph recomputes is the compiler's choice.

    Args:
        model: runs eagerly; `forward` of each named submodule is replaced on the instance.
        modules: paths as in `model.named_modules()`, or what `Plan.checkpoint_modules` returned.

    Raises:
        PlacematError: a path names no submodule, one is inside another or named twice, or something is wrapped or
            optimized already. Nothing is changed then.
        UnsupportedFeature: when the model runs: a wrapped forward overwrites its arguments, its parameters or buffers
            other than statistics of normalisation layers, or calls rrelu; or what it reads was changed before its
            backward.
    """
    if isinstance(modules, str):
        raise PlacematError(f"apply_checkpointing(model, modules) takes a list of paths: write [{modules!r}].")
    if "forward" in model.__dict__ and hasattr(model.__dict__["forward"], "original"):
        raise PlacematError(
            "the model is optimized: a plan recomputes what it has to. Remedy: placemat.restore(model)."
        )
    paths = list(modules)
    named = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        if path not in named or not path:
            raise PlacematError(
                f"{path!r} names no submodule. Remedy: a path as in model.named_modules(); there are, among others: "
                f"{', '.join([p for p in named if p][:8]) or 'none'}."
            )
        if isinstance(named[path].__dict__.get("forward"), CheckpointedForward):
            raise PlacematError(f"{path!r} is wrapped already. Remedy: placemat.restore(model) first.")
    _refuse_nested(paths, named)
    for path in paths:
        named[path].forward = CheckpointedForward(named[path], path)
    return model


def _refuse_nested(paths: list[str], named: Mapping[str, nn.Module]) -> None:
    inside: dict[nn.Module, str] = {}
    for path in paths:
        for module in named[path].modules():
            if module in inside:
                raise PlacematError(
                    f"{inside[module]!r} and {path!r} are one inside the other, or share a module: its forward would "
                    "run three times. Remedy: name one of them."
                )
            inside[module] = path


def remove_checkpointing(model: nn.Module) -> bool:
    """Undo `apply_checkpointing`; whether there was anything to undo."""
    found = False
    for module in model.modules():
        wrapper = module.__dict__.get("forward")
        if isinstance(wrapper, CheckpointedForward):
            found = True
            del module.__dict__["forward"]
            if wrapper.replaced is not None:
                module.__dict__["forward"] = wrapper.replaced
    return found
