"""Hooks that come and go between planned calls take effect, although Dynamo does not look for them in known modules."""

import threading

import pytest
import torch
from torch import Tensor, nn

import placemat
from tests.steps import run_step

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Held(nn.Module):
    """A registered block, and one that is only in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.listed = [nn.Sigmoid()]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.listed[0](block(x))
        return x.square().sum()


def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


def _registered(module: nn.Module) -> None:
    module.register_forward_hook(doubled)


def _written(module: nn.Module) -> None:
    module._forward_hooks[12345] = doubled


def _before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


HOOKED = {
    "inner": lambda model: model.blocks[1][1],
    "outer": lambda model: model.blocks[2],
    "listed": lambda model: model.listed[0],
}


@pytest.mark.parametrize("where", HOOKED.values(), ids=HOOKED)
@pytest.mark.parametrize("add", [_registered, _written, _before])
def test_a_hook_takes_effect_when_it_comes_and_none_when_it_has_gone(where, add):
    eager, model = Held(), Held()
    placemat.optimize(model, None, (X,), budget_fraction=0.3, time_limit_s=5)
    plain = run_step(eager, (X,))
    assert run_step(model, (X,)).same_as(plain)
    for _ in range(2):
        add(where(eager))
        add(where(model))
        hooked = run_step(eager, (X,))
        assert not hooked.same_as(plain)
        assert run_step(model, (X,)).same_as(hooked)
        for m in (eager, model):
            where(m)._forward_hooks.clear()
            where(m)._forward_pre_hooks.clear()
        assert run_step(model, (X,)).same_as(plain)


def test_a_backward_hook_that_comes_later_is_refused_as_it_is_from_the_start():
    model = Held()
    placemat.optimize(model, None, (X,), budget_fraction=0.3, time_limit_s=5)
    run_step(model, (X,))
    handle = model.blocks[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(placemat.CaptureError, match="hook"):
        model(X)
    handle.remove()
    assert run_step(model, (X,)).same_as(run_step(Held(), (X,)))


def test_a_module_with_a_hook_that_takes_the_place_of_one_without():
    eager, model = Held(), Held()
    placemat.optimize(model, None, (X,), budget_fraction=0.3, time_limit_s=5)
    run_step(model, (X,))
    for m in (eager, model):
        m.blocks[1][1] = nn.Tanh()
        m.blocks[1][1].register_forward_hook(doubled)
    assert run_step(model, (X,)).same_as(run_step(eager, (X,)))


def test_hooks_count_after_several_threads_have_traced_at_a_time():
    models = [placemat.optimize(Held(), None, (X,), budget_fraction=0.3, time_limit_s=5) for _ in range(3)]
    threads = [threading.Thread(target=lambda m=m: m(X).backward()) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eager, model = Held(), placemat.optimize(Held(), None, (X,), budget_fraction=0.3, time_limit_s=5)
    for position in (0, 2):
        for m in (eager, model):
            m.blocks[position][1].register_forward_hook(doubled)
        assert torch.equal(model(X), eager(X))


def test_a_hook_for_all_modules_counts_from_the_next_call_on():
    eager, model = Held(), Held()
    placemat.optimize(model, None, (X,), budget_fraction=0.3, time_limit_s=5)
    plain = run_step(eager, (X,))
    run_step(model, (X,))
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Tanh) else None
    )
    try:
        hooked = run_step(eager, (X,))
        assert not hooked.same_as(plain)
        assert run_step(model, (X,)).same_as(hooked)
    finally:
        handle.remove()
    assert run_step(model, (X,)).same_as(plain)
