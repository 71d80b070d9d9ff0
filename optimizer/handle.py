"""Handle: what stands in for `forward` on an optimized module.

It lives in the instance's `__dict__` under "forward", so the module keeps its class, parameters, keys, hooks and
identity; deepcopy and pickle take it along with its plans. It decides per call which of three things runs: the original
forward (no gradients wanted, or the budget is ample), the planned code, or a refusal. Never an unplanned run.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from placemat.backend import Backend, Planned
from placemat.call_differences import call_difference, foreign_call, foreign_graph
from placemat.calls import describe_call, is_trainable
from placemat.compilers import COMPILERS, EAGER, refuse_kept
from placemat.gradient_watch import GradientWatch
from placemat.graph import torch_private
from placemat.graph.autocast import is_inside_region
from placemat.graph.capture import FORWARD_OWNER, Interrupt, capture, make_entry, reported
from placemat.graph.eager_modules import KeptModules
from placemat.graph.errors import CaptureError, PlacematError, PlanMismatch, UnsupportedFeature
from placemat.graph.joint import JointGraph
from placemat.installed import Rebindable, forward_under
from placemat.module_walk import global_hooks, has_hooks, modules_of, parameters_of
from placemat.parallel_wrappers import refuse_parallel
from placemat.pipeline import Planner
from placemat.plan import Plan
from placemat.relower import relower
from placemat.simulate import steps_below_peak

log = logging.getLogger("placemat")

_MANY_COMPILATIONS = (8, 32, 128, 512)


# The user's torch.compile around an optimized module: a graph ends before it and another begins behind it.
_own_compilation = torch.compiler.disable(
    reason="a module that placemat optimized is compiled by itself, under its plan, and cannot be part of a larger "
    "graph. Remedy: compile what is around it without fullgraph=True, or placemat.restore(model)."
)


class _Unplanned(Interrupt):
    """The graph of this fingerprint, which is being compiled, has no plan."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint


class Handle:
    """Callable replacement of `module.forward`.

    Attributes:
        module: the module itself.
        original: the forward that was there before (bound).
        planner: makes a plan for a call that has none, or None when the plan was given and must fit (`apply`).
        plans: graph fingerprint -> Plan.
        plan: the latest plan, or None before the first one.
        compiler: what runs planned steps, see `compilers`.
        bypassed: calls run the original forward, whatever the plan (see `original_forwards`).
    """

    def __init__(self, module: nn.Module, planner: Planner | None, compiler: str) -> None:
        self.module = module
        self.compiler = compiler
        self.replaced = module.__dict__.get("forward")
        self.planner = planner
        self.plans: dict[str, Plan] = {}
        self.plan: Plan | None = None
        self._start()

    def _start(self) -> None:
        """State that belongs to this process: compiled code and which calls were seen."""
        self._decisions: dict[Any, bool] = {}  # call key -> whether the original forward runs
        self._gradients = GradientWatch(self)
        self._backend = Backend(
            _weak_planner(self), self._gradients.before_backward, _weak_refusal(self), COMPILERS[self.compiler]
        )
        self._compiled: dict[Any, Callable[..., Any]] = {}  # see _compiled_for
        self._present_modules: list[nn.Module] = []  # of the model, when it was last called
        self._kept: KeptModules | None = None
        self._original: Callable[..., Any] | None = None
        self.bypassed = False

    def parameters(self) -> list[nn.Parameter]:
        """Of the model as it was last called; shared ones come several times."""
        return parameters_of(self._present_modules)

    @property
    def original(self) -> Callable[..., Any]:
        present = forward_under(self.module, self.replaced)
        last = self._original
        if last is None or not isinstance(present, MethodType) or present != last:
            last = self._original = present
        return last  # one object for all calls: in torch 2.9 Dynamo guards on the identity of a method

    @property
    def __func__(self) -> Rebindable:
        """The function that this handle is the method of, for libraries that wrap it and bind it again."""
        return Rebindable(self.original)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __code__(self) -> Any:
        return getattr(self.original, "__code__", None)

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("module", "replaced", "planner", "plans", "plan", "compiler")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def kept(self) -> KeptModules:
        """Modules that are kept eager; found when they are needed, since a copied module is not complete before."""
        if self._kept is None:
            options = next(iter(self.plans.values())).options if self.planner is None else {}
            patterns = options.get("keep_eager", ()) if self.planner is None else self.planner.keep_eager
            self._kept = KeptModules.find(self.module, patterns)
            if self.compiler != EAGER:
                refuse_kept(self._kept.modules)
        return self._kept

    def add_plan(self, plan: Plan) -> None:
        """Take a plan; it is also `module.plan`, unless the user's module has something else under that name."""
        self.plans[plan.fingerprint] = plan
        self.plan = plan
        present = self.module.__dict__.get("plan")
        if isinstance(present, Plan) or not hasattr(self.module, "plan"):
            self.module.__dict__["plan"] = plan

    def remember(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Take a plan for calls like this one."""
        self.add_plan(plan)
        self._decisions[call_key(modules_of(self.module), args, kwargs)] = self._runs_original(plan)

    def _runs_original(self, plan: Plan) -> bool:
        """Whether calls of a plan run the original forward; not if somebody asked for a compiler."""
        return plan.runs_original and self.compiler == EAGER

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.bypassed or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        key = self._planned_key(args, kwargs)
        if key is None:
            return self.original(*args, **kwargs)
        return self._run_planned(key, args, kwargs)

    @_own_compilation
    def _planned_key(self, args: Any, kwargs: Any) -> Any:
        """The key of a call that a plan serves; None if the original forward does."""
        if torch_private.inside_functorch():
            raise UnsupportedFeature(
                "torch.func transforms (grad, vmap, jvp) over an optimized module are not supported. Remedy: "
                "placemat.restore(model) before, or optimize a module that is called inside none."
            )
        self._present_modules = modules_of(self.module)
        key = call_key(self._present_modules, args, kwargs)
        runs_original = self._decisions.get(key)
        if runs_original is None:
            with self._compared(args, kwargs):
                runs_original = self._decisions[key] = self._decide(args, kwargs)
        return None if runs_original else key

    @contextlib.contextmanager
    def _compared(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Let a refusal say how the call differs from those that were planned."""
        try:
            yield
        except PlanMismatch:  # says so already
            raise
        except PlacematError as error:
            call = describe_call(self.module, self.original, args, kwargs)
            if isinstance(error, CaptureError) and self.planner is None:
                if (foreign := foreign_call(self._given_plan, call, error)) is not None:
                    raise foreign from error
                raise
            difference = call_difference([plan.options["call"] for plan in self.plans.values()], call)
            error.args = (" ".join(filter(None, (str(error), difference))),)
            raise

    @property
    def _given_plan(self) -> Plan:
        """The one plan of a handle without a planner."""
        (plan,) = self.plans.values()
        return plan

    def _decide(self, args: Any, kwargs: Any) -> bool:
        """Whether the original forward serves this kind of call; plans for it if nothing is known yet."""
        refuse_parallel(self.module, is_called=True)
        if not is_trainable(self.module, args, kwargs):
            return True
        if self.planner is None:
            is_original = self._runs_original(self._given_plan)
            if is_original:
                fingerprint = capture(self.original, args, kwargs, self.kept).fingerprint
                if fingerprint != self._given_plan.fingerprint:
                    raise self._foreign(args, kwargs, fingerprint)
            return is_original
        plan = self.planner.plan(self.module, self.original, args, kwargs, self.kept, known=self.plans)
        if plan.fingerprint not in self.plans and self.plans:
            log.warning("placemat: new input shapes or flags, planned again under the same budget: %r", plan)
        self.add_plan(plan)
        return self._runs_original(plan)

    @_own_compilation
    def _run_planned(self, key: Any, args: Any, kwargs: Any) -> Any:
        self._gradients.before_forward()
        try:
            return self._run_compiled(args, kwargs)
        except _Unplanned as unplanned:  # Python state outside the arguments has changed what the forward does
            if self.planner is None:
                raise self._foreign(args, kwargs, unplanned.fingerprint) from None
            with self._compared(args, kwargs):
                self._decisions[key] = self._decide(args, kwargs)
        except CaptureError:
            with self._compared(args, kwargs):
                raise
        return self.original(*args, **kwargs) if self._decisions[key] else self._run_compiled(args, kwargs)

    def _foreign(self, args: Any, kwargs: Any, fingerprint: str) -> PlanMismatch:
        return foreign_graph(self._given_plan, describe_call(self.module, self.original, args, kwargs), fingerprint)

    def _run_compiled(self, args: Any, kwargs: Any) -> Any:
        runs, compilations = self._backend.runs, self._backend.compilations
        original = self.original
        is_bare = getattr(original, "__self__", None) is self.module and not has_hooks(self._present_modules)
        compiled = self._compiled_for(is_bare, global_hooks())
        with torch_private.call_settings(), self.kept.installed(), reported(original):
            output = compiled(original, args, kwargs, is_inside_region())
        if self._backend.compilations > compilations and self._backend.compilations in _MANY_COMPILATIONS:
            log.warning(
                "placemat: %s was compiled %d times. Python state that its forward reads (a counter, a growing "
                "list, a float schedule) probably changes with every step, and each change costs a compilation.",
                type(self.module).__name__,
                self._backend.compilations,
            )
        if self._backend.runs == runs:
            raise UnsupportedFeature(
                "the planned code did not run: something turned torch.compile off for this call (a compiler stance "
                "such as force_eager, or torch._dynamo.config.disable). Remedy: take that setting away, or "
                "placemat.restore(model)."
            )
        return output

    def _compiled_for(self, is_bare: bool, of_all_modules: tuple[Any, ...]) -> Callable[..., Any]:
        """What runs planned calls of a model without hooks, or with some, under these hooks for all modules.

        Without, nothing of what Dynamo compiled is guarded against hooks; so it must not serve a call with them. Those
        guards took longer than all others together: 1.4 of 2.5 ms a call for 514 modules (torch 2.13).
        """
        key = is_bare, of_all_modules
        if key not in self._compiled:
            bare = FORWARD_OWNER if is_bare else None
            self._compiled[key] = torch_private.compiled(make_entry(), self._backend, bare)
        return self._compiled[key]

    def planned(self, joint: JointGraph) -> Planned:
        """The plan of a graph that is being compiled."""
        plan = self.plans.get(joint.fingerprint)
        if plan is None:
            raise _Unplanned(joint.fingerprint)
        return Planned(relower(joint, plan), plan.schedule, steps_below_peak(plan.problem, plan.schedule))


def _weak_planner(handle: Handle) -> Callable[[JointGraph], Planned]:
    reference = weakref.ref(handle)

    def planner(joint: JointGraph) -> Planned:
        alive = reference()
        assert alive is not None, "a module compiles only while it is called"
        return alive.planned(joint)

    return planner


def _weak_refusal(handle: Handle) -> Callable[[fx.GraphModule], None]:
    reference = weakref.ref(handle)

    def refuse_shared(graph_module: fx.GraphModule) -> None:
        alive = reference()
        assert alive is not None, "a module compiles only while it is called"
        alive.kept.refuse_shared(graph_module)

    return refuse_shared


def call_key(modules: Sequence[nn.Module], args: Any, kwargs: Any) -> Any:
    """What tells calls apart that need plans of their own: shapes, dtypes, plain values, modes and flags.

    Types are in it, since sharding a model changes those of its modules or of its parameters.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    parameters = parameters_of(modules)
    device = "cpu" if not torch.cuda.is_available() else "cuda"
    return (
        structure,
        tuple(_leaf_key(leaf) for leaf in leaves),
        tuple(map(type, modules)),
        tuple([m.training for m in modules]),
        tuple(map(type, parameters)),
        tuple([p.requires_grad for p in parameters]),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        is_inside_region(),
        torch.is_autocast_cache_enabled(),
        global_hooks(),
    )


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (
            leaf.shape,
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            leaf.stride() if leaf.layout == torch.strided else leaf.layout,
        )
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return (type(leaf), leaf)
    return type(leaf)
