"""Compilers: what makes functions of the two graphs that a plan is emitted as, by the name that users give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from placemat.backend import Function
from placemat.codegen import boxed_function
from placemat.graph.errors import PlacematError, UnsupportedFeature
from placemat.graph.torch_private import is_compiled_wrapper
from placemat.inductor import Inductor

EAGER = "eager"
INDUCTOR = "inductor"

# Name -> what to call for each graph that is compiled.
COMPILERS: dict[str, Callable[[], Function]] = {
    EAGER: lambda: boxed_function,
    INDUCTOR: lambda: Inductor.present().function,
}


def fuses(compiler: str) -> bool:
    """Whether a compiler fuses elementwise kernels, so that plans for it have other bytes and seconds."""
    return compiler == INDUCTOR


def compiler_for(name: object, options: Mapping[str, Any]) -> str:
    """The compiler that a plan with these options is to be run by: the one that is asked for, else its own.

    Raises:
        PlacematError, UnsupportedFeature: see `check_compiler`; or the plan counts on fusion, and `name` has none.
    """
    planned = options.get("compiler", EAGER)
    compiler = check_compiler(planned if name is None else name, options.get("segments", 1))
    if fuses(planned) and not fuses(compiler):
        raise UnsupportedFeature(
            f"the plan was made for compiler={planned!r}, in whose fused kernels intermediate results take no memory; "
            f"run by compiler={compiler!r} it needs more than it says. Remedy: apply it with compiler={planned!r}, "
            f"or plan() with compiler={compiler!r}."
        )
    return compiler


def check_compiler(name: object, segments: int) -> str:
    """The name of a compiler that can run a step of that many segments.

    Raises:
        PlacematError: it is none.
        UnsupportedFeature: it cannot.
    """
    if not isinstance(name, str) or name not in COMPILERS:
        raise PlacematError(f"compiler={name!r} is none of {', '.join(map(repr, COMPILERS))}.")
    if name != EAGER and segments > 1:
        raise UnsupportedFeature(
            f"compiler={name!r} compiles the backward as one function, which cannot hand out gradients in "
            f'{segments} segments. Remedy: segments=1, or compiler="eager".'
        )
    return name


def refuse_kept(paths: Iterable[str]) -> None:
    """Refuse modules that are kept eager: they are Python, which no compiler takes.

    Raises:
        UnsupportedFeature: there are some.
    """
    if found := sorted(paths):
        raise UnsupportedFeature(
            f'{found[0]!r} is kept eager (keep_eager=, or a recurrent layer), which compiler="inductor" cannot do. '
            'Remedy: compiler="eager", or optimize the submodules around it.'
        )


def refuse_compiled(model: object) -> None:
    """Refuse a wrapper of `torch.compile`: its forward leads to compiled code, and not to the user's.

    Raises:
        UnsupportedFeature: it is one.
    """
    if is_compiled_wrapper(model):
        raise UnsupportedFeature(
            "torch.compile(model) gives a wrapper in which there is nothing to plan. Remedy: optimize the model before "
            'it is compiled; for Inductor\'s code under a plan, placemat.optimize(model, ..., compiler="inductor") '
            "instead of torch.compile."
        )
