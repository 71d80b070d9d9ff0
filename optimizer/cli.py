"""The command line: plan a model, read a plan, trace the frontier, check a plan against eager.

    python -m placemat plan nets:build --budget "8 GiB" --out plan.json
    python -m placemat show plan.json --explain h.3.mlp --plot memory.png
    python -m placemat frontier nets:build --points 6 --plot frontier.png
    python -m placemat check plan.json nets:build

`nets:build` is a function without arguments in an importable module (the current folder counts). It returns
`(model, args)`, `(model, args, kwargs)` or `(model, args, kwargs, loss_fn)` for one training call.

Exit codes: 0 done; 1 the check failed; 2 wrong usage, or a file that cannot be read or written; 3 the budget is below
the floor; 4 any other refusal of placemat; 5 your factory, model or loss raised an exception of its own. With --json,
standard output is one JSON object, for refusals too. Nothing but the answer is written there: what the factory prints
goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from placemat import api
from placemat.compilers import COMPILERS, EAGER
from placemat.cost_models import CostModel, Roofline, device_spec
from placemat.factory import Call, FactoryError, FactoryFailed, load_call
from placemat.frontier import Frontier
from placemat.graph.errors import BudgetTooSmall, PlacematError
from placemat.plan import Plan
from placemat.report import Report
from placemat.units import format_bytes
from placemat.verify import verify

DONE, CHECK_FAILED, USAGE, BUDGET_TOO_SMALL, REFUSED, USERS_ERROR = range(6)


@dataclass(frozen=True)
class _Answer:
    """What a command has to say: as text for people, as an object for --json; and the exit code."""

    text: str
    content: dict[str, Any]
    code: int = DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(argv)
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    answer = _answer(options)
    is_refusal = answer.code not in (DONE, CHECK_FAILED)
    try:
        if options.json:
            print(json.dumps(answer.content, indent=1))
        else:
            print(answer.text, file=sys.stderr if is_refusal else sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return answer.code


def _answer(options: argparse.Namespace) -> _Answer:
    command = {"plan": _plan, "show": _show, "frontier": _frontier, "check": _check}[options.command]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return command(options)
    except BudgetTooSmall as error:
        return _refusal(error, BUDGET_TOO_SMALL, minimum_budget_bytes=error.minimum_budget_bytes)
    except PlacematError as error:
        return _refusal(error, REFUSED)
    except (FactoryError, OSError) as error:
        return _refusal(error, USAGE)
    except FactoryFailed as error:
        if options.verbose:
            traceback.print_exception(error.__cause__)
        return _refusal(error, USERS_ERROR)
    except Exception as error:  # Python would exit with 1, which says that the check failed
        traceback.print_exception(error)
        return _refusal(error, USERS_ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m placemat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    plan = commands.add_parser("plan", help="plan a model's training step under a budget")
    budget = plan.add_mutually_exclusive_group(required=True)
    budget.add_argument("--budget", metavar="SIZE", help='peak bytes of a step, such as "8 GiB"')
    budget.add_argument("--budget-fraction", type=float, metavar="F", help="0 is the floor, 1 keeps everything")
    plan.add_argument("--out", metavar="FILE", help="write the plan to this file")

    show = commands.add_parser("show", help="read a plan file")
    show.add_argument("plan", help="plan file")
    show.add_argument("--explain", metavar="NAME", help="why an op, module or source line is kept or recomputed")
    show.add_argument("--table", action="store_true", help="every value, without a limit on rows")
    show.add_argument("--checkpoint-modules", action="store_true", help="modules to wrap in torch.utils.checkpoint")
    show.add_argument("--diff", metavar="FILE", help="compare with another plan file")
    show.add_argument("--plot", metavar="FILE", help="write the memory over the step as an image")
    show.add_argument("--plot-graph", metavar="FILE", help="write the graph around the peak as an image")

    frontier = commands.add_parser("frontier", help="what each budget costs")
    frontier.add_argument("--points", type=int, default=12, help="how many budgets; default 12")
    frontier.add_argument("--plot", metavar="FILE", help="write the curve as an image")

    check = commands.add_parser("check", help="run a step of a plan and one of eager, and compare bit by bit")
    check.add_argument("plan", help="plan file")

    for command in (plan, frontier, check):
        command.add_argument("model", metavar="module:callable", help="returns (model, args, kwargs, loss_fn)")
        command.add_argument("--device", help="move model and inputs there first; meta plans without any memory")
    for command in (plan, frontier):
        command.add_argument("--cost-device", metavar="NAME", help='device to cost for, such as "H100 SXM"')
        command.add_argument("--reserved", metavar="SIZE", default="0", help="optimizer state, buffers, slack")
        command.add_argument("--accumulate-grad", action="store_true", help="gradients exist when a step starts")
        command.add_argument("--segments", type=int, default=1, metavar="K", help="parts that backward runs in")
        command.add_argument("--compiler", choices=tuple(COMPILERS), default=EAGER, help="what the plan will be run by")
        command.add_argument("--keep", action="append", default=[], metavar="PATTERN")
        command.add_argument("--recompute", action="append", default=[], metavar="PATTERN")
        command.add_argument("--keep-eager", action="append", default=[], metavar="PATTERN")
        command.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
        command.add_argument("--gap", type=float, default=0.01)
    for command in (plan, show, frontier, check):
        command.add_argument("--json", action="store_true", help="one JSON object on standard output")
        command.add_argument("--verbose", action="store_true", help="log each stage to standard error")
    return parser


def _plan(options: argparse.Namespace) -> _Answer:
    call = load_call(options.model, options.device)
    plan = api.plan(
        call.model,
        options.budget,
        call.args,
        call.kwargs,
        budget_fraction=options.budget_fraction,
        **_planning(options, call),
    )
    if options.out is not None:
        plan.save(options.out)
    return _Answer(str(plan), _figures(plan))


def _show(options: argparse.Namespace) -> _Answer:
    plan = Plan.load(options.plan)
    texts = []
    if options.explain is not None:
        texts.append(plan.explain(options.explain))
    if options.diff is not None:
        texts.append(plan.diff(Plan.load(options.diff)))
    if options.table:
        texts.append(plan.table())
    if options.checkpoint_modules:
        texts.append(str(plan.checkpoint_modules()))
    if options.plot is not None:
        plan.plot().savefig(options.plot, dpi=120)
    if options.plot_graph is not None:
        plan.plot_graph().savefig(options.plot_graph, dpi=120)
    return _Answer("\n\n".join(texts or [str(plan)]), {**_figures(plan), "texts": texts})


def _frontier(options: argparse.Namespace) -> _Answer:
    call = load_call(options.model, options.device)
    curve = api.frontier(call.model, call.args, call.kwargs, points=options.points, **_planning(options, call))
    if options.plot is not None:
        curve.plot().savefig(options.plot, dpi=120)
    return _Answer(repr(curve), {"points": _points(curve)})


def _check(options: argparse.Namespace) -> _Answer:
    plan = Plan.load(options.plan)
    call = load_call(options.model, options.device)
    model = api.apply(call.model, plan)
    report = verify(model, model, call.args, call.kwargs, loss_fn=call.loss_fn)
    peak_bytes = report.optimized.peak_bytes + sum(plan.static_bytes.values())
    fits = peak_bytes + plan.reserved_bytes <= plan.budget_bytes
    text = (
        f"{report}\nmeasured {format_bytes(peak_bytes)} with parameters, buffers and inputs, predicted "
        f"{format_bytes(plan.predicted_peak_bytes - plan.reserved_bytes)}; budget {format_bytes(plan.budget_bytes)} "
        f"with {format_bytes(plan.reserved_bytes)} reserved: {'holds' if fits else 'BROKEN'}"
    )
    return _Answer(text, _outcome(report, plan, peak_bytes, fits), DONE if report.ok and fits else CHECK_FAILED)


def _planning(options: argparse.Namespace, call: Call) -> dict[str, Any]:
    cost_model: CostModel | None = None if options.cost_device is None else Roofline(device_spec(options.cost_device))
    return {
        "loss_fn": call.loss_fn,
        "cost_model": cost_model,
        "reserved_bytes": options.reserved,
        "accumulate_grad": options.accumulate_grad,
        "segments": options.segments,
        "compiler": options.compiler,
        "keep": options.keep,
        "recompute": options.recompute,
        "keep_eager": options.keep_eager,
        "time_limit_s": options.time_limit,
        "gap": options.gap,
    }


def _figures(plan: Plan) -> dict[str, Any]:
    names = (
        "budget_bytes", "reserved_bytes", "floor_bytes", "floor_proven", "floor_bound_bytes", "keep_everything_bytes",
        "predicted_peak_bytes", "breakdown", "peak_op", "peak_source", "forward_backward_seconds",
        "recompute_seconds", "overhead", "lower_bound", "gap", "status", "family", "solve_seconds", "cost_source",
        "device", "torch_version", "placemat_version", "fingerprint", "runs_original", "notes",
    )  # fmt: skip
    return {name: getattr(plan, name) for name in names}


def _points(curve: Frontier) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(point).items() if name != "schedule"} for point in curve]


def _outcome(report: Report, plan: Plan, peak_bytes: int, fits: bool) -> dict[str, Any]:
    return {
        "ok": report.ok and fits,
        "bitwise": report.ok,
        "fits": fits,
        "measured_peak_bytes": peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes - plan.reserved_bytes,
        "budget_bytes": plan.budget_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "different": [asdict(row) for row in report.rows if row.status != "bitwise"],
    }


def _refusal(error: Exception, code: int, **more: Any) -> _Answer:
    name = type(error).__name__
    return _Answer(f"{name}: {error}", {"error": name, "message": str(error), "exit_code": code, **more}, code)
