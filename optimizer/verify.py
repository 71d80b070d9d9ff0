"""Verify: one training step of a model and one of its optimized self, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placemat.graph.errors import PlacematError
from placemat.measure import Measurement, measure
from placemat.report import Report, compare_all
from placemat.training_state import (
    TrainingState,
    clone_inputs,
    named_leaves,
    named_tensors,
    original_forwards,
    replaced_forwards,
    rng_states,
    same_bits,
)

__all__ = ["Report", "verify"]


def verify(
    model: nn.Module,
    optimized: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Report:
    """Run a training step of `model` and one of `optimized` from the same state and compare everything.

    Both start from the parameters, buffers, train flags and generator states of `model`, with clones of the inputs and
    without gradients. Each step runs twice, and the second runs are measured: compiling, and the first use of a
    kernel, stay out of the figures. Afterwards all state is as before. `model is optimized` is the usual case, since
    `optimize` works in place: the reference then runs the original forward.

    Args:
        loss_fn: maps the output to the scalar that is differentiated. Without it that is the output's `loss`, or the
            only scalar output that requires grad, or a fixed linear functional of all outputs that require grad.

    Raises:
        PlacematError: `args` is no sequence, nothing can be differentiated, the loss is no scalar, or the two modules
            differ in names or shapes of parameters or buffers.
    """
    if isinstance(args, Tensor):
        raise PlacematError("`args` is the tuple of positional inputs; got a Tensor. Pass `(x,)`.")
    _check_same_layout(model, optimized)
    state = TrainingState([model, optimized])
    runner = _Runner(model, state, tuple(args), dict(kwargs or {}), loss_fn)
    try:
        first, _ = runner.run(model, reference=True, measured=False)
        reference, reference_measurement = runner.run(model, reference=True, measured=True)
        runner.run(optimized, reference=False, measured=False)
        result, measurement = runner.run(optimized, reference=False, measured=True)
    finally:
        state.restore()
    assert reference_measurement is not None
    assert measurement is not None
    return Report(
        rows=tuple(compare_all(reference, result)),
        reference=reference_measurement,
        optimized=measurement,
        nondeterministic=tuple(row.name for row in compare_all(first, reference) if row.status != "bitwise"),
        notes=_notes(optimized),
    )


def _notes(optimized: nn.Module) -> tuple[str, ...]:
    """What a reader has to know who takes the second step for a planned one."""
    handles = replaced_forwards(optimized)
    if not handles:
        text = "no module of it is optimized: both steps ran original forwards (placemat.apply or optimize first)"
        return (text,)
    plans = [getattr(handle, "plan", None) for handle in handles]
    if all(plan is not None and plan.runs_original for plan in plans):
        return ("the budget is ample: the optimized module runs its original forward",)
    return ()


def _named_state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _check_same_layout(model: nn.Module, optimized: nn.Module) -> None:
    ours, theirs = ({n: tuple(t.shape) for n, t in _named_state(m).items()} for m in (model, optimized))
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        name = differing[0]
        raise PlacematError(
            f"`verify` compares a model with its optimized self, but {len(differing)} parameters or buffers differ: "
            f"{name!r} has shape {ours.get(name)} in the model and {theirs.get(name)} in the optimized module."
        )


@dataclass(frozen=True)
class _Runner:
    """Runs steps from one state with one set of inputs."""

    model: nn.Module
    state: TrainingState
    args: tuple[object, ...]
    kwargs: dict[str, object]
    loss_fn: Callable[[Any], Tensor] | None

    def run(self, module: nn.Module, *, reference: bool, measured: bool) -> tuple[dict[str, Any], Measurement | None]:
        """Everything that one step made, by name, copied to the host; and its measurement, if it was asked for."""
        self.state.restore()
        self.state.clear_grads()
        if module is not self.model:
            _copy_state(self.model, module)
        before = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
        args, kwargs = clone_inputs(self.args, self.kwargs, module)
        made: dict[str, Any] = {}
        measurement: Measurement | None = None

        def step() -> None:
            made["output"] = module(*args, **kwargs)
            made["loss"] = differentiate(made["output"], self.loss_fn)

        with torch.enable_grad(), original_forwards(module) if reference else nullcontext():
            if measured:
                measurement = measure(step, device=_device_of(module, args))
            else:
                step()
        results: dict[str, Any] = {f"rng: {name}": rng for name, rng in rng_states().items()}
        results.update(_outputs(made))
        for name, parameter in module.named_parameters():
            results[f"gradient: {name}"] = _to_host(parameter.grad)
            if not same_bits(parameter, before[name]):
                results[f"parameter: {name}"] = _to_host(parameter)
        results.update({f"buffer: {name}": _to_host(buffer) for name, buffer in module.named_buffers()})
        for name, tensor in named_tensors({"args": args, "kwargs": kwargs}, "input"):
            results[f"{name} after"] = _to_host(tensor)
            if tensor.requires_grad:
                results[f"gradient: {name}"] = _to_host(tensor.grad)
        return results, measurement


def _copy_state(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the parameters, buffers and train flags of `source`."""
    values = _named_state(source)
    with torch.no_grad():
        for name, tensor in _named_state(target).items():
            if not same_bits(tensor, values[name]):
                tensor.copy_(values[name])
    flags = {name: module.training for name, module in source.named_modules()}
    for name, module in target.named_modules():
        module.training = flags.get(name, module.training)


def _device_of(module: nn.Module, args: object) -> torch.device:
    tensors = [*_named_state(module).values(), *(t for _, t in named_tensors(args, ""))]
    return tensors[0].device if tensors else torch.device("cpu")


def differentiate(output: object, loss_fn: Callable[[Any], Tensor] | None) -> Tensor | None:
    """Differentiate the loss, which is returned, or the outputs with fixed tangents, when there is none."""
    loss = _loss(output, loss_fn)
    if loss is not None:
        loss.backward()
        return loss.detach()
    outputs = [t for _, t in named_tensors(output, "") if t.requires_grad]
    if not outputs:
        raise PlacematError(
            "no output requires grad: there is nothing to differentiate. Pass `loss_fn=`, or let a parameter or an "
            "input require grad."
        )
    torch.autograd.backward(outputs, [_tangent(t) for t in outputs])
    return None


def _loss(output: object, loss_fn: Callable[[Any], Tensor] | None) -> Tensor | None:
    if loss_fn is not None:
        loss: object = loss_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise PlacematError(f"`loss_fn` must return one number that requires grad; got {shape}.")
        return loss
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and named.ndim == 0 and named.requires_grad:
        return named
    scalars = [t for _, t in named_tensors(output, "") if t.ndim == 0 and t.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


def _tangent(output: Tensor) -> Tensor:
    """Weights of the linear functional: cosines, so that neither signs nor magnitudes repeat along an axis."""
    angles = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    return torch.cos(0.7 * angles).reshape(output.shape).to(output.dtype)


def _outputs(made: Mapping[str, Any]) -> dict[str, Any]:
    """Loss and outputs by name, and what types the outputs are of."""
    results: dict[str, Any] = {}
    if made["loss"] is not None:
        results["loss"] = _to_host(made["loss"])
    types = [type(made["output"]).__qualname__]
    for name, leaf in named_leaves(made["output"], "output"):
        grad = " that requires grad" if isinstance(leaf, Tensor) and leaf.requires_grad else ""
        types.append(f"{name}: {type(leaf).__qualname__}{grad}")
        if isinstance(leaf, (Tensor, int, float, complex, str, bytes)):
            results[name] = _to_host(leaf) if isinstance(leaf, Tensor) else leaf
    results["output types"] = "; ".join(types)
    return results


def _to_host(tensor: Tensor | None) -> Tensor | None:
    """A dense copy in host memory, so that results of one step do not weigh on the device during the next."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.cpu().clone()
