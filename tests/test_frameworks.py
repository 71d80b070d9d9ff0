"""Planned models inside `transformers.Trainer`, Accelerate and Lightning: weights, checkpoints and copies."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import placemat
from tests.models import gpt2
from tests.steps import FreeOfWorkspace, run_step

BATCH, WIDTH, CLASSES = 8, 16, 4


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    """Accelerate takes its settings for a whole process from the first that asks."""
    AcceleratorState._reset_state(reset_partial_state=True)


class Classifier(nn.Module):
    """With BatchNorm and dropout; logits, or what the Trainer wants if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        middle = [nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*middle, nn.Linear(64, CLASSES))

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.layers(x)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits, labels, reduction="sum") / kwargs["num_items_in_batch"]
        return {"loss": loss, "logits": logits}


def classifier(**options: Any) -> nn.Module:
    """A seeded one, optimized if there are options."""
    torch.manual_seed(0)
    model = Classifier()
    if options:
        placemat.optimize(model, budget_fraction=0.0, cost_model=FreeOfWorkspace(), time_limit_s=2, **options)
    return model


def small_gpt2(**options: Any) -> nn.Module:
    model = gpt2(layers=1, width=32, heads=2, sequence=WIDTH, batch=BATCH).model
    if options:
        placemat.optimize(model, budget_fraction=0.2, time_limit_s=5, **options)
    return model


def samples(model: nn.Module, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, GPT2LMHeadModel):
        ids = torch.randint(0, 256, (count, WIDTH), generator=generator)
        return [{"input_ids": row, "labels": row} for row in ids]
    rows = torch.randn(count, WIDTH, generator=generator)
    return [{"x": row, "labels": row[:CLASSES].argmax()} for row in rows]


def make_trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """For four steps at the most."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        learning_rate=1e-2,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        **{"max_steps": 4, "save_strategy": "no", **options},
    )
    count = 4 * BATCH * options.get("gradient_accumulation_steps", 1)
    return Trainer(model=model, args=arguments, train_dataset=samples(model, count))


def same_state(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (classifier, {"gradient_accumulation_steps": 2, "bf16": True}),
        pytest.param(small_gpt2, {}, marks=pytest.mark.slow),
        pytest.param(small_gpt2, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param(small_gpt2, {"bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_trainer_comes_to_the_same_state(make, options, tmp_path):
    expected = make()
    make_trainer(expected, tmp_path, **options).train()
    model = make(loss_fn=loss_of, accumulate_grad="gradient_accumulation_steps" in options)
    make_trainer(model, tmp_path, **options).train()
    assert model.plan.recompute_seconds > 0
    assert same_state(model, expected)


def loss_of(output: Any) -> Tensor:
    return output["loss"]


def test_trainer_saves_and_resumes(tmp_path):
    expected, stopped, resumed = classifier(), classifier(loss_fn=loss_of), classifier()
    make_trainer(expected, tmp_path / "expected").train()
    make_trainer(stopped, tmp_path, max_steps=2, save_steps=2, save_strategy="steps").train()
    placemat.apply(resumed, stopped.plan)
    trainer = make_trainer(resumed, tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same_state(resumed, expected)
    trainer.save_model(str(tmp_path / "saved"))
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == expected.state_dict().keys()


X = torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH)


def prepared(**options: Any) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    return accelerator, accelerator.prepare_model(classifier(**options))


def test_accelerate_runs_the_plan_under_its_autocast():
    _, expected = prepared()
    _, model = prepared(accumulate_grad=False)
    torch.manual_seed(1)
    result = run_step(expected, (X,), loss_fn=torch.sum)
    torch.manual_seed(1)
    assert run_step(model, (X,), loss_fn=torch.sum).same_as(result)
    assert model.plan.options["call"]["autocast on cpu"] == "bfloat16"


def test_copy_of_a_wrapped_model_trains_its_own_weights():
    _, model = prepared(accumulate_grad=False)
    run_step(model, (X,), loss_fn=torch.sum)
    model.zero_grad(set_to_none=True)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.layers[-1].weight)
    nn.init.constant_(twin.layers[-1].bias, 3.0)
    output = twin(X)
    assert torch.equal(output, torch.full_like(output, 3.0))
    output.sum().backward()
    assert twin.__dict__["_placemat_handle"]._backend.runs == 1
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_wrapped_forward_is_neither_lost_nor_planned_twice():
    accelerator, model = prepared(accumulate_grad=False)
    run_step(model, (X,), loss_fn=torch.sum)
    for function in (placemat.restore, lambda m: placemat.optimize(m, "1 MiB"), lambda m: placemat.plan(m, 99, (X,))):
        with pytest.raises(placemat.PlacematError, match=r"unwrap_model\(model, keep_fp32_wrapper=False\)"):
            function(model)
    for plain in (accelerator.unwrap_model(copy.deepcopy(model), False), accelerator.unwrap_model(model, False)):
        with torch.no_grad():
            assert torch.equal(plain.eval()(X), plain.layers(X))
        placemat.restore(plain)
        assert not {"forward", "plan", "_placemat_handle"} & set(vars(plain))


def test_verify_compares_a_wrapped_model_with_the_original():
    _, model = prepared(accumulate_grad=False)
    run_step(model, (X,), loss_fn=torch.sum)
    backend = model.__dict__["_placemat_handle"]._backend
    runs = backend.runs
    assert placemat.verify(model, model, (X,), loss_fn=torch.sum).ok
    assert backend.runs == runs + 2  # of four steps


class Module(lightning.LightningModule):
    def __init__(self, network: nn.Module, clears: bool = True) -> None:
        super().__init__()
        self.network, self.clears = network, clears

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[0][:, :CLASSES])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.clears:
            self.zero_grad(set_to_none=True)


def fit(module: Module, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    rows = torch.randn(4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(rows), BATCH))
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_lightning_comes_to_the_same_state(options, tmp_path):
    accumulates = "accumulate_grad_batches" in options
    expected = Module(classifier(), clears=not accumulates)
    fit(expected, **options)
    module = Module(classifier(accumulate_grad=accumulates), clears=not accumulates)
    trainer = fit(module, **options)
    assert same_state(module, expected)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "last.ckpt", network=classifier(accumulate_grad=accumulates))
    assert same_state(loaded, expected)


def test_gradients_that_lightning_clears_only_after_forward_are_told_of():
    module = Module(classifier(accumulate_grad=False), clears=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(module)
    (warning,) = [w for w in told if w.category is placemat.UndeclaredGradients]
    assert "on_train_batch_start" in str(warning.message)


def test_checkpointing_beside_a_plan_is_refused_with_its_line():
    workload = gpt2(layers=1, width=32, heads=2, sequence=16, batch=2)
    workload.model.gradient_checkpointing_enable()
    with pytest.raises(placemat.UnsupportedFeature, match=r"torch.utils.checkpoint.*gradient_checkpointing=False"):
        placemat.plan(workload.model, "1 GiB", (), workload.kwargs)
