"""A torch optimizer like any other.

Groups, schedulers, closures, hooks, tensor lr, zero_grad, summary, close.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac import summary
from helpers import (
    LOSSES,
    assert_same_weights,
    backward,
    bases_of,
    batches_for,
    half_square,
    make_pair,
    mean_loss,
    mlp,
    parameters_of,
)
from oracle import per_example_gradients
from paper import EKFAC, KFAC, Preconditioner

METHODS: dict[str, Any] = {
    "EKFAC": lambda model, **o: EKFAC(model, scaling="per_example", **o),
    "EKFAC-ra": lambda model, **o: EKFAC(model, scaling="running", **o),
    "KFAC": lambda model, **o: KFAC(model, **o),
}


def train(model: nn.Module, opt: Any, steps: list[Any]) -> dict[str, Tensor]:
    for (batch,) in steps:
        opt.zero_grad()
        mean_loss(model, batch).backward()
        opt.step()
    return parameters_of(model)


def test_it_is_a_torch_optimizer() -> None:
    model = mlp(3, 2)
    for kind in (EKFAC, KFAC):
        opt = kind(model, lr=0.1)
        assert isinstance(opt, torch.optim.Optimizer)
        assert opt.param_groups[0]["lr"] == 0.1
        assert [id(p) for g in opt.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]
        opt.close()


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_is_trained(method: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free = nn.Parameter(torch.randn(3))
            self.layer = nn.Linear(3, 4)
            self.act = nn.PReLU()
            self.bilinear = nn.Bilinear(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.layer(x * self.free))
            return self.bilinear(h, h)

    model = Odd().double()
    before = parameters_of(model)
    after = train(model, METHODS[method](model, lr=0.01), batches_for(model, (3,), steps=3))
    for name in before:
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_tensor_lr_is_the_number(method: str) -> None:
    ends = []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        torch.manual_seed(2)
        model = mlp(3, 4, 2)
        ends.append(
            train(
                model,
                METHODS[method](model, lr=lr, momentum=0.9, weight_decay=0.1, kl_clip=0.01),
                batches_for(model, (3,), steps=5),
            )
        )
    assert_same_weights(*ends, 1e-12)


@pytest.mark.parametrize("rule", [{"scaling": "running"}, {"optimizer": "KFAC"}])
def test_lr_schedulers(rule: dict[str, Any]) -> None:
    model = mlp(3, 4, 2)
    opt, oracle = make_pair(model, LOSSES["mean"], lr=0.1, damping=0.1, refresh_every=2, kl_clip=0.01, **rule)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
    for number, micro_batches in enumerate(batches_for(model, (3,), steps=6)):
        opt.zero_grad()
        backward(model, LOSSES["mean"], micro_batches)
        opt.step()
        scheduler.step()
        oracle.lr = 0.1 * 0.5 ** (number // 2)
        bases = bases_of(opt, model) if "scaling" in rule else None
        assert_same_weights(parameters_of(model), oracle.step(micro_batches, bases=bases), 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_comes_back(method: str) -> None:
    torch.manual_seed(3)
    model, twin = mlp(3, 4, 2), mlp(3, 4, 2)
    twin.load_state_dict(model.state_dict())
    opt, other = (
        METHODS[method](model, lr=0.1, refresh_every=2),
        METHODS[method](twin, lr=0.1, refresh_every=2),
    )
    for (batch,) in batches_for(model, (3,), steps=4):
        calls = []

        def closure() -> Tensor:
            opt.zero_grad()
            loss = mean_loss(model, batch)  # noqa: B023
            loss.backward()
            calls.append(loss)  # noqa: B023
            return loss

        with torch.no_grad():
            returned = opt.step(closure)
        assert len(calls) == 1 and returned is calls[0]
        train(twin, other, [[batch]])
    assert_same_weights(parameters_of(model), parameters_of(twin), 0.0)


def test_step_hooks_run() -> None:
    model, seen = mlp(3, 2), []
    opt = EKFAC(model, lr=0.1)
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, opt, batches_for(model, (3,), steps=2))
    assert seen == ["before", "after"] * 2


def test_parameters_without_gradient_are_left_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Two().double()
    before = parameters_of(model)
    opt = EKFAC(model, lr=0.1, weight_decay=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = train(model, opt, batches_for(model, (3,), steps=3))
        told = " ".join(str(w.message) for w in caught) + str(opt.summary())
    assert torch.equal(before["unused.weight"], after["unused.weight"])
    assert torch.equal(before["unused.bias"], after["unused.bias"])
    assert not torch.equal(before["used.weight"], after["used.weight"])
    assert "unused" in told


def test_a_layer_that_fires_later_starts_then() -> None:
    """Its first step refreshes it, in the middle of the others' interval; until then it is untouched."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late, self.on = nn.Linear(3, 3), nn.Linear(3, 3), False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.late(x) if self.on else x

    torch.manual_seed(4)
    model = Late().double()
    start = parameters_of(model)
    opt, oracle = make_pair(model, LOSSES["mean"], lr=0.1, damping=0.1, refresh_every=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, micro_batches in enumerate(batches_for(model, (3,), steps=6)):
            model.on = oracle.model.on = number >= 3
            opt.zero_grad()
            backward(model, LOSSES["mean"], micro_batches)
            opt.step()
            expected = oracle.step(micro_batches, bases=bases_of(opt, model))
            assert_same_weights(parameters_of(model), expected, 1e-9)
            if number < 3:
                assert torch.equal(model.late.weight, start["late.weight"])


@pytest.mark.parametrize("show", [lambda model: str(summary(model)), lambda model: str(EKFAC(model).summary())])
def test_summary_names_every_parameter_and_its_block(show: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free = nn.Parameter(torch.ones(3))
            self.fc = nn.Linear(37, 11)
            self.conv = nn.Conv2d(3, 5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.conv(x * self.free).flatten(1))

    text = show(Mixed())
    for word in ("free", "fc", "conv", "38", "11", "13", "5", "diagonal"):
        assert word in text, f"{word} is not in:\n{text}"


def test_stats_is_a_dict_of_scalars() -> None:
    model = mlp(3, 4, 2)
    opt = EKFAC(model, lr=0.1, kl_clip=1e-9, refresh_every=2)
    train(model, opt, batches_for(model, (3,), steps=5))
    stats = opt.stats()
    assert all(isinstance(k, str) and isinstance(v, int | float) for k, v in stats.items()), stats
    text = " ".join(stats)
    for word in ("damping", "kl", "refresh", "skipped"):
        assert word in text, f"{word} is not in {text}"


@pytest.mark.parametrize("method", [*METHODS, "Preconditioner"])
def test_close_removes_every_hook(method: str) -> None:
    model = mlp(3, 4, 2)

    def hooks() -> int:
        on_modules = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks)
            for m in model.modules()
        )
        on_parameters = sum(
            len(p._post_accumulate_grad_hooks or {}) + len(p._backward_hooks or {}) for p in model.parameters()
        )
        return on_modules + on_parameters

    assert hooks() == 0
    make = METHODS.get(method, lambda model, **o: Preconditioner(model))
    with make(model, lr=0.1) as opt:
        assert hooks() > 0
        ((batch,),) = batches_for(model, (3,), steps=1)
        mean_loss(model, batch).backward()
        opt.step()
    assert hooks() == 0
    opt.close()  # twice does no harm
    mean_loss(model, batch).backward()
    assert hooks() == 0


def test_an_optimizer_that_is_thrown_away_can_be_collected() -> None:
    model = mlp(3, 4, 2)
    opt = EKFAC(model, lr=0.1)
    train(model, opt, batches_for(model, (3,), steps=2))
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    model(torch.zeros(2, 3, dtype=torch.float64)).sum().backward()  # the model works on without it


def test_paused_capture_counts_for_nothing() -> None:
    """A second backward that is meant for other things (an auxiliary probe, say) while capture is paused."""
    ends = []
    for pause in (False, True):
        torch.manual_seed(5)
        model = mlp(3, 4, 2)
        opt = EKFAC(model, lr=0.1, refresh_every=2)
        for (batch,) in batches_for(model, (3,), steps=4):
            opt.zero_grad()
            if pause:
                with opt.paused():
                    mean_loss(model, (batch[0][:3], batch[1][:3])).backward()
                for p in model.parameters():
                    p.grad = None
            mean_loss(model, batch).backward()
            opt.step()
        ends.append(parameters_of(model))
    assert_same_weights(*ends, 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_deepcopy_of_model_and_optimizer(method: str) -> None:
    """Copied together they go on as the original does, and neither moves the other."""
    torch.manual_seed(6)
    model = mlp(3, 4, 2)
    opt = METHODS[method](model, lr=0.1, refresh_every=3, momentum=0.9)
    steps = batches_for(model, (3,), steps=8)
    train(model, opt, steps[:4])
    model_2, opt_2 = copy.deepcopy((model, opt))
    frozen = parameters_of(model_2)
    end = train(model, opt, steps[4:])
    assert_same_weights(parameters_of(model_2), frozen, 0.0)
    assert_same_weights(train(model_2, opt_2, steps[4:]), end, 0.0)
    assert_same_weights(parameters_of(model), end, 0.0)


def test_deepcopy_of_the_model_alone_is_not_watched() -> None:
    """An averaged copy of the weights, say: its forwards and backwards are nothing to the optimizer."""
    ends = []
    for copied in (False, True):
        torch.manual_seed(7)
        model = mlp(3, 4, 2)
        opt = EKFAC(model, lr=0.1, refresh_every=2)
        for (batch,) in batches_for(model, (3,), steps=4):
            opt.zero_grad()
            mean_loss(model, batch).backward()
            if copied:
                mean_loss(copy.deepcopy(model), batch).backward()
            opt.step()
        ends.append(parameters_of(model))
    assert_same_weights(*ends, 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_torch_func_on_the_model_counts_for_nothing(method: str) -> None:
    """Per-example gradients between backward and step, say: their values are returned and are no training loss."""
    ends = []
    for looked in (False, True):
        torch.manual_seed(8)
        model = mlp(3, 4, 2)
        opt = METHODS[method](model, lr=0.1, refresh_every=2)
        for ((x, y),) in batches_for(model, (3,), steps=4):
            opt.zero_grad()
            mean_loss(model, (x, y)).backward()
            if looked:
                per_example_gradients(model, half_square, x, y)
            opt.step()
        ends.append(parameters_of(model))
    assert_same_weights(*ends, 0.0)


def test_public_names() -> None:
    for name in ("EKFAC", "KFAC", "Preconditioner", "summary"):
        assert name in ekfac.__all__ and hasattr(ekfac, name)
