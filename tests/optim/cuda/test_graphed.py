"""Whole training steps by one call: equal to those of a loop, on an emulated GPU, a real one and a CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from emulated_cuda import emulated

pytestmark = pytest.mark.over_a_second
STEPS = 60
#: After so many some would be replayed.
ENOUGH = 36


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(
    device: Any, dtype: torch.dtype, sizes: tuple[int, ...] = (16,), steps: int = STEPS
) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(3)
    made = []
    for _, size in zip(range(steps), itertools.cycle(sizes), strict=False):
        x = torch.randn(size, 6, generator=chance, dtype=dtype)
        made.append((x.to(device), x[:, :3].argmax(1).to(device)))
    return made


def trained(
    make: Callable[[], nn.Module], device: Any, by_call: bool, dtype: torch.dtype = torch.float64,
    sizes: tuple[int, ...] = (16,), steps: int = STEPS, **options: Any,
) -> tuple[list[Tensor], list[Tensor], Any]:  # fmt: skip
    """Train, by one call a step or by a loop; what is left of the model, the losses, and what took the steps."""
    torch.manual_seed(0)
    model = make().to(device, dtype)
    opt = ekfac.EKFAC(model, refresh_every=20, **options)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    step, losses = ekfac.graphed(opt, backward), []
    for x, y in batches(device, dtype, sizes, steps):
        if by_call:
            losses.append(step(x, y).cpu())
        else:
            opt.zero_grad()
            losses.append(backward(x, y).detach().cpu())
            opt.step()
    return [t.detach().cpu() for t in model.state_dict().values()], losses, step


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(mlp, {"lr": 0.01}, id="lr-mlp"),
        pytest.param(norms, {}, id="nothing set-norms"),
        pytest.param(mlp, {}, id="nothing set-mlp", marks=pytest.mark.slow),
        pytest.param(norms, {"lr": 0.01}, id="lr-norms", marks=pytest.mark.slow),
    ],
)
def test_one_call_does_what_the_loop_does(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    with emulated():
        expected, losses, _ = trained(make, "cuda", False, **options)
    with emulated():
        found, losses_too, step = trained(make, "cuda", True, **options)
        assert step.replays > 15
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.stack(losses), torch.stack(losses_too), rtol=1e-9, atol=1e-12)


def test_batches_of_two_sizes_are_recorded_apart() -> None:
    with emulated():
        expected, _, _ = trained(mlp, "cuda", False, sizes=(16, 12))
    with emulated():
        found, _, step = trained(mlp, "cuda", True, sizes=(16, 12))
        assert len(step._recorded) == 2
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_on_a_cpu_steps_are_taken_as_ever() -> None:
    expected, losses, _ = trained(norms, "cpu", False)
    found, losses_too, step = trained(norms, "cpu", True)
    assert step.replays == 0
    assert all(map(torch.equal, expected, found)) and all(map(torch.equal, losses, losses_too))


def test_a_step_that_clips_runs_without_a_graph() -> None:
    """The optimizer has to see gradients as backward left them, which a replayed clipping would hide."""
    with emulated():
        torch.manual_seed(0)
        model = mlp().to("cuda", torch.float64)
        opt = ekfac.EKFAC(model, refresh_every=20)

        def backward(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            return loss

        step = ekfac.graphed(opt, backward)
        with pytest.warns(RuntimeWarning, match="changes gradients after its backward pass"):
            step(*batches("cuda", torch.float64)[0])
        for x, y in batches("cuda", torch.float64, steps=ENOUGH):
            step(x, y)
        assert step.replays == 0


def test_a_step_that_asks_the_device_runs_without_a_graph() -> None:
    with emulated():
        torch.manual_seed(0)
        model = mlp().to("cuda", torch.float64)
        opt = ekfac.EKFAC(model, refresh_every=20)

        def backward(x: Tensor, y: Tensor) -> float:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        step = ekfac.graphed(opt, backward)
        with pytest.warns(RuntimeWarning, match="cannot be recorded"):
            losses = [step(x, y) for x, y in batches("cuda", torch.float64, steps=ENOUGH)]
        assert step.replays == 0 and losses[-1] < losses[0]


@pytest.mark.parametrize(("optimizer", "backward"), [(torch.optim.SGD, len), (ekfac.EKFAC, 3)])
def test_wrong_arguments_are_named(optimizer: Any, backward: Any) -> None:
    model = mlp()
    made = optimizer(model.parameters(), lr=0.1) if optimizer is torch.optim.SGD else optimizer(copy.deepcopy(model))
    with pytest.raises(TypeError, match="graphed"):
        ekfac.graphed(made, backward)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [mlp, norms], ids=lambda make: make.__name__)
def test_one_call_does_what_the_loop_does_on_a_gpu(make: Callable[[], nn.Module]) -> None:
    expected, _, _ = trained(make, "cuda", False, steps=140)
    found, _, step = trained(make, "cuda", True, steps=140)
    assert step.replays > 15
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
