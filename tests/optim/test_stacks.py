"""Blocks of one shape are handled as one: the same numbers, whoever is stacked, and each with a state of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ekfac
from ekfac.curvature.layers.linear import LinearLayer
from ekfac.optim.stacks import Stack
from ekfac.optim.statistics.schedule import DENSE


def equal_layers() -> nn.Module:
    """Five linear layers, of which three have one shape, with norms between them."""
    torch.manual_seed(0)
    inner = [m for _ in range(3) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 6), *inner, nn.Linear(6, 3)).double()


def grouped_convolutions() -> nn.Module:
    torch.manual_seed(0)
    inner = [m for _ in range(3) for m in (nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Tanh())]
    return nn.Sequential(nn.Unflatten(1, (4, 1, 1)), *inner, nn.Flatten(), nn.Linear(4, 3)).double()


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stack nothing."""
    monkeypatch.setattr(Stack, "gather", lambda self, states: False)


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int, first: int = 0, hook: Any = None) -> list[Tensor]:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (24,), generator=generator)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if hook is not None:
            hook(step)
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "adam": {"scaling": "adam"},
    "rmsprop": {"scaling": "rmsprop"},
    "adagrad": {"scaling": "adagrad"},
    "solves": {"refresh": ekfac.Refresh(deterministic=True), "refresh_every": 2},
    "often": {"refresh_every": 3},
    "penalty": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "identity": {"coverage": ekfac.Coverage(basis="identity")},
}


class Counted(TorchDispatchMode):
    """Counts the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step(layers: int) -> int:
    """Return how many operations of torch's a step takes that takes in no statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).double()
    opt = ekfac.EKFAC(model, lr=0.01)
    train(model, opt, DENSE + 2)
    nn.functional.cross_entropy(model(torch.randn(24, 4).double()), torch.randint(3, (24,))).backward()
    with Counted() as counted:
        opt.step()
    return counted.operations


def test_a_step_of_small_layers_is_few_operations_whether_they_are_alone_or_stacked() -> None:
    """On a CPU, where the time of a small network's step is their number."""
    assert operations_of_a_step(1) <= 75
    assert operations_of_a_step(2) <= 85
    assert operations_of_a_step(4) <= 97


@pytest.mark.parametrize("network", [equal_layers, grouped_convolutions])
@pytest.mark.parametrize("name", OPTIONS)
def test_stacked_or_alone_the_steps_are_the_same(
    name: str, network: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for stacked in (True, False):
        if not stacked:
            alone(monkeypatch)
        model = network()
        opt = ekfac.EKFAC(model, **OPTIONS[name])
        found.append(train(model, opt, 9))
        sizes = {len(s.blocks) for s in opt.engine.stacks.of(opt.engine.partition.blocks, lambda block: 0)}
        assert (max(sizes) == 3) == stacked
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def clip(model: nn.Module) -> Callable[[int], None]:
    def change(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return change


def halve_one(model: nn.Module) -> Callable[[int], None]:
    def change(step: int) -> None:
        if step % 2:
            model[4].weight.grad.mul_(0.5)

    return change


def leave_one_out(model: nn.Module) -> Callable[[int], None]:
    def change(step: int) -> None:
        if step in (5, 6, 9):
            model[4].weight.grad = model[4].bias.grad = None

    return change


def freeze_one(model: nn.Module) -> Callable[[int], None]:
    def change(step: int) -> None:
        model[4].requires_grad_(step not in (6, 7, 8))

    return change


@pytest.mark.parametrize("disturb", [clip, halve_one, leave_one_out, freeze_one])
def test_blocks_that_go_their_own_way_for_a_while(
    disturb: Callable[[nn.Module], Callable[[int], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for stacked in (True, False):
        if not stacked:
            alone(monkeypatch)
        model = equal_layers()
        found.append(train(model, ekfac.EKFAC(model), 14, hook=disturb(model)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_groups_may_have_rates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for stacked in (True, False):
        if not stacked:
            alone(monkeypatch)
        model = equal_layers()
        own = [{"params": list(model[1].parameters()), "betas": (0.5, 0.9)}, {"params": list(model[4].parameters())}]
        taken = {id(p) for group in own for p in group["params"]}
        rest = {"params": [p for p in model.parameters() if id(p) not in taken], "lr": 1e-3}
        found.append(train(model, ekfac.EKFAC(model, params=[*own, rest]), 14))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_each_block_has_its_own_state_and_a_checkpoint_goes_on_exactly() -> None:
    model = equal_layers()
    opt = ekfac.EKFAC(model)
    train(model, opt, 12)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    shared = {opt.state[model[i].weight]["s"].untyped_storage().data_ptr() for i in (1, 4, 7)}
    assert len(shared) == 1, "stacked"
    expected = train(model, opt, 6, first=12)
    again = equal_layers()
    again.load_state_dict(weights)
    resumed = ekfac.EKFAC(again)
    resumed.load_state_dict(saved)
    for one, other in zip(expected, train(again, resumed, 6, first=12), strict=True):
        assert torch.equal(one, other)


def test_a_change_to_one_blocks_state_is_seen() -> None:
    model = equal_layers()
    opt = ekfac.EKFAC(model)
    train(model, opt, 3)
    opt.state[model[4].weight]["s"] = torch.full_like(opt.state[model[4].weight]["s"], 7.0)
    (stack,) = [s for s in opt.engine.stacks.of(opt.engine.partition.blocks, lambda block: 0) if model[4].weight in
                {b.key for b in s.blocks}]  # fmt: skip
    assert [float(part.mean()) == 7.0 for part in stack.parts(stack.state.s)] == [False, True, False]


class Turned(LinearLayer):
    """A linear layer whose weight is stored as (in, out)."""

    def layout(self) -> tuple[dict[str, int], list[str], int]:
        inputs, out = self.module.weight.shape
        return {"weight": inputs}, ["bias"], out

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.T


class Halved(LinearLayer):
    """A linear layer with a way of its own to put parameters together."""

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return super().stack(tensors) / 2

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return super().unstack(2 * matrix)


@pytest.mark.parametrize("kinds", [(LinearLayer,) * 3, (Turned,) * 2, (LinearLayer, Turned), (Halved,) * 2], ids=str)
@pytest.mark.parametrize("roles", [{"weight"}, {"bias"}, {"weight", "bias"}], ids=["weight", "bias", "both"])
def test_layers_that_are_put_together_are_taken_apart_again(
    kinds: tuple[type[LinearLayer], ...], roles: set[str]
) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(*((5, 3) if kind is Turned else (3, 5))) for kind in kinds]
    layers = [kind(module, frozenset(roles)) for kind, module in zip(kinds, modules, strict=True)]
    tensors = [{role: getattr(module, role).detach() for role in roles} for module in modules]
    for tensor, kind in zip(tensors, kinds, strict=True):
        if kind is Turned and "bias" in tensor:
            tensor["bias"] = torch.randn(5)
    together = layers[0].stack_all(layers, tensors)
    torch.testing.assert_close(together, torch.cat([a.stack(t) for a, t in zip(layers, tensors, strict=True)]))
    torch.testing.assert_close(layers[0].unstack_all(layers, together), tensors)


def test_layers_of_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(torch.tanh(self.one(x)).double())
            return out

    model, losses = Mixed(), []
    opt = ekfac.EKFAC(model, lr=0.01)
    for step in range(40):
        opt.zero_grad()
        loss = model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert opt.state[model.one.weight]["A"].dtype == torch.float32
    assert opt.state[model.two.weight]["A"].dtype == torch.float64
    assert losses[-1] < 0.5 * losses[0]
