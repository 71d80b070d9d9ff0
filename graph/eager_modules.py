"""Modules that are kept eager: which ones, and what stands for them while a step is traced or run.

Recurrent layers (nn.LSTM, GRU, RNN) are kept by themselves, others by `keep_eager=`. For the length of a trace, and of
a planned call, a kept module has a forward of the instance, which Dynamo follows into a call that is opaque to it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from placemat.graph import torch_private
from placemat.graph.eager_facts import Facts, Layout, learn
from placemat.graph.eager_ops import ACTIVE, KeptFunction
from placemat.graph.eager_run import Call
from placemat.graph.errors import ConstraintError, UnsupportedFeature
from placemat.graph.static import tensors_in

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class KeptModules:
    """The modules of one model that are kept eager, and what is known of their calls.

    Args:
        modules: path -> module. Use `find`.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = dict(modules)
        self._forwards = {path: _forward_of(path, module) for path, module in self.modules.items()}
        self._facts: dict[str, Facts] = {}
        self._examples: list[Tensor] = []
        self._stale: set[str] = set()

    @classmethod
    def find(cls, model: nn.Module, patterns: Sequence[str] = ()) -> KeptModules:
        """Modules whose path matches a pattern of `keep_eager=`, and recurrent layers that are in none of them.

        Raises:
            ConstraintError: a pattern matches nothing, or a module and one inside it.
            UnsupportedFeature: a match has a forward of its own on the instance already.
        """
        chosen = {path: module for pattern in patterns for path, module in _matches(model, pattern).items()}
        for (outer, module), (inner, other) in itertools.permutations(chosen.items(), 2):
            if other is not module and any(m is other for m in module.modules()):
                raise ConstraintError(
                    f"keep_eager={list(patterns)} matches {outer!r} and {inner!r}, which is inside of it. Remedy: name "
                    "the outer one alone."
                )
        for path, module in chosen.items():
            if "forward" in module.__dict__:
                raise UnsupportedFeature(
                    f"keep_eager= names {path!r}, whose forward was replaced on the instance. Remedy: undo that first "
                    "(placemat.restore, if placemat did it)."
                )
        inside = {m for module in chosen.values() for m in module.modules()}
        layers = {
            path: m
            for path, m in model.named_modules()
            if path and isinstance(m, nn.RNNBase) and m not in inside and "forward" not in m.__dict__
        }
        return cls({**chosen, **layers})

    def facts(self, key: str) -> Facts:
        return self._facts[key]

    def module(self, key: str) -> nn.Module:
        return self.modules[self._facts[key].call.path]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand-ins on the modules, and their operators know where to look."""
        token = ACTIVE.set(self)
        for path, module in self.modules.items():
            module.__dict__["forward"] = self._forwards[path]
        try:
            yield
        finally:
            for module in self.modules.values():
                module.__dict__.pop("forward", None)
            ACTIVE.reset(token)

    @contextmanager
    def learning(self, example: Any) -> Iterator[None]:
        """Learn anew what is called in the block; `example` are the arguments of the model's call."""
        self._examples, self._stale = list(tensors_in(example)), set(self._facts)
        try:
            yield
        finally:
            self._examples, self._stale = [], set()

    def refuse_shared(self, graph_module: fx.GraphModule) -> None:
        """Refuse a Dynamo graph that reads a buffer, or another tensor but a parameter, of a kept module.

        Raises:
            UnsupportedFeature: names it.
        """
        names = {
            t.untyped_storage()._cdata: f"{path}.{name}"
            for path, module in self.modules.items()
            for name, t in _own_tensors(module)
        }
        for node in graph_module.graph.find_nodes(op="placeholder") if names else ():
            tensor = getattr(node.meta.get("grapharg"), "example", None)
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            if (name := names.get(tensor.untyped_storage()._cdata)) is not None:
                raise UnsupportedFeature(
                    f"the forward reads {name} outside of the kept module that it belongs to, which may change it "
                    "while it runs. Remedy: let the module return it, or keep the module around both eager."
                )

    def call(self, path: str, parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """What a traced call of a kept module becomes: the operator, with its results put together.

        Raises:
            CaptureError, UnsupportedFeature: the call cannot be part of a planned step.
        """
        module = self.modules[path]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *parameters]
        call = Call(
            path=path,
            structure=structure,
            constants=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            is_tensor=tuple(isinstance(leaf, Tensor) for leaf in leaves),
            requires_grad=tuple(t.requires_grad for t in tensors),
            is_grad_enabled=torch.is_grad_enabled(),
        )
        key = _key(call, module, tensors)
        if key not in self._facts or key in self._stale:
            _check_call(module, call, tensors)
            self._facts[key] = learn(module, call, self._real(tensors[: call.num_arguments], module))
            self._stale.discard(key)
        facts = self._facts[key]
        return facts.result(KeptFunction.apply(key, facts, *tensors))

    def _real(self, arguments: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
        """Arguments to learn from: those of the model's example call, and zeros for what is computed."""
        real: list[Tensor] = []
        for fake in arguments:
            example = torch_private.real_tensor_of(fake, self._examples)
            layout = Layout.of(fake)
            with torch_private.outside_tracing():
                real.append(layout.empty().zero_() if example is None else example.detach())
        return [*real, *module.parameters()]


def _forward_of(path: str, module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _call(path, tuple(module.parameters()), args, kwargs)
        return type(module).forward(module, *args, **kwargs)

    return forward


def _call_active(path: str, parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    return ACTIVE.get().call(path, parameters, args, kwargs)


_call = torch_private.opaque_to_dynamo(_call_active)


def _key(call: Call, module: nn.Module, tensors: Sequence[Tensor]) -> str:
    """Names a kind of call, by the same text in every process."""
    geometry = [(tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for t in tensors]
    modes = [m.training for m in module.modules()]
    text = repr((call.structure, call.constants, call.is_grad_enabled, geometry, modes))
    return f"{call.path}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check_call(module: nn.Module, call: Call, tensors: Sequence[Tensor]) -> None:
    path = call.path
    for leaf in call.constants:
        if not isinstance(leaf, _PLAIN):
            raise UnsupportedFeature(
                f"the kept module {path} is called with a {type(leaf).__name__}. Remedy: pass tensors and plain values."
            )
    if any(torch.is_autocast_enabled(t.device.type) for t in tensors):
        raise UnsupportedFeature(
            f"the kept module {path} is called under torch.autocast, whose casts and their cache cannot be kept as in "
            f"eager. Remedy: with torch.autocast(device_type, enabled=False) around it, in the forward."
        )
    if any(p._backward_hooks for p in module.parameters()):
        raise UnsupportedFeature(
            f"a parameter of the kept module {path} has a hook (register_hook), which would run twice. Remedy: "
            "register_post_accumulate_grad_hook, or change the gradient after the backward."
        )
    if (name := torch_private.pending_attribute_writes(set(module.modules()))) is not None:
        raise UnsupportedFeature(
            f"the forward sets the attribute {name} of the kept module {path} from outside, and that would take effect "
            "only after the step. Remedy: pass it as an argument."
        )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and tensors that are plain attributes, with their names."""
    yield from module.named_buffers()
    for prefix, inner in module.named_modules():
        for name, value in inner.__dict__.items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}".strip("."), value


def _matches(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    named = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if path]
    found: dict[nn.Module, str] = {}
    for path, module in named:
        if fnmatchcase(path, pattern):
            found.setdefault(module, path)
    if not found:
        raise ConstraintError(
            f"keep_eager={pattern!r} matches no module. Remedy: the path of one, with * as a wildcard; there are, "
            f"among others: {', '.join(path for path, _ in named[:8]) or 'none (the root cannot be kept eager)'}."
        )
    return {path: module for module, path in found.items()}
