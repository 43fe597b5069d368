"""Compiled models take the same steps, whatever was compiled before, and compile nothing after the first few."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ekfac.curvature.capture import hooks
from paper import EKFAC, KFAC

#: Together they take long.
pytestmark = pytest.mark.over_a_second

MAKERS = {
    "running": lambda model: EKFAC(model, lr=0.01, refresh_every=3, momentum=0.9),
    "per_example": lambda model: EKFAC(model, lr=0.01, refresh_every=3, scaling="per_example"),
    "kfac": lambda model: KFAC(model, lr=0.01, refresh_every=3),
}


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Compile and attach as in a process that has done neither."""
    torch._dynamo.reset()
    for hook in (hooks.ForwardHook, hooks.BeginHook, hooks.EndHook):
        call = hook.__call__
        monkeypatch.setattr(hook, "__call__", getattr(call, "_torchdynamo_orig_callable", call))
    hooks.run_hooks_in_compiled_models.cache_clear()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield
    torch._dynamo.reset()
    hooks.run_hooks_in_compiled_models.cache_clear()  # wrapped again by whoever comes next


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, forward=None) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (forward or model)(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled(model: nn.Module):
    return torch.compile(model, backend="eager")


@pytest.mark.over_a_second
@pytest.mark.parametrize("name", MAKERS)
def test_a_compiled_model_takes_the_same_steps(name):
    plain, model = network(), network()
    expected = train(plain, MAKERS[name](plain), 8)
    assert train(model, MAKERS[name](model), 8, compiled(model)) == pytest.approx(expected, rel=1e-10)


def test_a_twin_that_was_compiled_without_hooks_before_does_not_stand_in():
    plain, twin, model = network(), network(), network()
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 3, compiled(twin))
    expected = train(plain, MAKERS["running"](plain), 8)
    assert train(model, MAKERS["running"](model), 8, compiled(model)) == pytest.approx(expected, rel=1e-10)


def test_a_twin_that_is_compiled_without_hooks_afterwards_is_left_alone():
    model, twin = network(), network()
    expected = train(plain := network(), torch.optim.SGD(plain.parameters(), lr=0.1), 4)
    train(model, MAKERS["running"](model), 4, compiled(model))
    before = copy.deepcopy(model.state_dict())
    assert train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 4, compiled(twin)) == pytest.approx(expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_that_ran_compiled_before_the_optimizer_was_made_is_captured():
    model, plain = network(), network()
    forward = compiled(model)
    forward(torch.randn(12, 4, dtype=torch.float64)).sum().backward()
    expected = train(plain, MAKERS["running"](plain), 5)
    optimizer = MAKERS["running"](model)
    assert train(model, optimizer, 5, forward) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_compiled_after_the_first_steps(name):
    model = network()
    optimizer, forward = MAKERS[name](model), compiled(model)
    train(model, optimizer, 4, forward)  # past the first refresh
    before = counters["stats"]["unique_graphs"]
    assert before > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(model, optimizer, 10, forward)
    assert counters["stats"]["unique_graphs"] == before
    assert optimizer.stats()["refreshes"] >= 4


@pytest.mark.parametrize("what", ["step", "training step"])
def test_a_compiled_step_is_run_as_it_is(what):
    """Before, the compiler went through every hook and every part of a step: minutes for three of them."""
    expected = train(plain := network(), MAKERS["running"](plain), 6)
    model = network()
    opt = MAKERS["running"](model)
    generator = torch.Generator().manual_seed(1)

    def whole(x):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step()
        return loss

    step = torch.compile(opt.step, backend="eager") if what == "step" else opt.step
    go = whole if what == "step" else torch.compile(whole, backend="eager")
    counters.clear()
    losses, frames = [], []
    for _ in range(6):
        losses.append(go(torch.randn(12, 4, generator=generator, dtype=torch.float64)).item())
        frames.append(counters["frames"]["total"])
    assert losses == pytest.approx(expected, rel=1e-10)
    assert frames[0] < 80
    assert frames[-1] == frames[1]  # nothing is compiled again
