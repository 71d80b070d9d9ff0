"""Models of transformers, peft, diffusers, timm: eager's bits within a budget a quarter of the way, and their traps."""

from __future__ import annotations

import re

import pytest
import torch

import placemat
from placemat.graph.static import static_bytes
from tests.library_models import LIBRARY_MODELS, llama, mixtral
from tests.models import Workload
from tests.steps import run_step

QUICK = ("Llama",)


def check(work: Workload, **options) -> placemat.Plan:
    """Plan a quarter of the way, and train a step."""
    model, args, kwargs, _ = work
    expected = run_step(model, args, kwargs, work.loss)
    placemat.optimize(model, None, args, kwargs, budget_fraction=0.25, loss_fn=work.loss, time_limit_s=5, **options)
    plan = model.plan
    assert not plan.runs_original
    assert plan.recompute_seconds > 0
    assert run_step(model, args, kwargs, work.loss).same_as(expected)
    measured = sum(static_bytes(model, args, kwargs).values()) + placemat.measure(work.step).peak_bytes
    assert measured <= plan.predicted_peak_bytes <= plan.budget_bytes
    return plan


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LIBRARY_MODELS])
def test_model_trains_as_in_eager_within_its_budget(name):
    entry = LIBRARY_MODELS[name]
    if entry.absent_because is not None:
        pytest.skip(entry.absent_because)
    check(entry.build(), **entry.options)


def _masked(work: Workload, padding: int) -> Workload:
    mask = torch.ones_like(work.kwargs["input_ids"])
    mask[0, :padding] = 0
    return work._replace(kwargs={**work.kwargs, "attention_mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "T5"])
def test_attention_masks_have_eagers_bits(name, padding):
    """Eager looks whether a mask hides anything, a trace cannot: the kernels differ, and must not in their bits."""
    check(_masked(LIBRARY_MODELS[name].build(), padding))


def test_shared_keys_under_a_mask_that_eager_leaves_out_are_refused():
    """Eager finds no packed sequences and needs no mask; a trace has one, for which the library repeats the keys."""
    work = llama(key_heads=2)
    with pytest.raises(placemat.UnsupportedFeature, match=r"sdpa_attention.*TRANSFORMERS_SDPA_FORCE_GQA=1"):
        placemat.plan(work.model, "1 GiB", work.args, work.kwargs)


@pytest.mark.slow
def test_shared_keys_that_the_library_leaves_to_pytorch_have_eagers_bits(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    check(llama(key_heads=2))


@pytest.mark.slow
def test_cache_that_is_returned_costs_memory_and_no_bits():
    without, with_cache = check(llama()), check(llama(use_cache=True))
    assert with_cache.floor_bytes > without.floor_bytes


@pytest.mark.slow
def test_experts_that_look_at_data_are_refused_with_their_line():
    model, args, kwargs, _ = mixtral("eager")
    with pytest.raises(placemat.CaptureError, match=r"modeling_mixtral\.py:\d+.*keep_eager|modeling_mixtral"):
        placemat.plan(model, "1 GiB", args, kwargs)


def test_products_of_experts_may_run_again():
    work = mixtral("grouped_mm")
    plan = placemat.plan(work.model, "1 GiB", work.args, work.kwargs, loss_fn=work.loss)
    products = [op for op in plan.problem.ops if re.fullmatch(r"grouped_mm_fallback(_\d+)?", op.name)]
    assert products
    assert all(op.recomputable for op in products)
