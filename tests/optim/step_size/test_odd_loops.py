"""Odd training loops, made at random, against the definition of the average: x <- x + c (z - x) on plain tensors."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac import StepSize
from ekfac.optim.step_size.running_statistics import STATISTICS

#: What may happen in a step; each does with a chance of about one in ten.
ODD = (
    "freeze", "thaw", "freeze between", "thaw between", "freeze late", "keep gradients", "accumulate", "drop a batch",
    "evaluate", "evaluate amid", "exchange", "change", "not finite", "switch the norm", "copy", "load", "add a group",
)  # fmt: skip
LAYERS = (0, 1, 3, 5)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def optimizer(model: nn.Sequential, groups: int, **options: Any) -> ekfac.EKFAC:
    """The head first, whose body may be added later; without decay, whose sign rounding decides at zero."""
    parts = [{"params": part.parameters()} for part in (model[3:], model[:3])][:groups]
    return ekfac.EKFAC(model, params=parts, weight_decay=0.0, **options)


class Average:
    """The library, as users have it."""

    def __init__(self, seed: int, groups: int) -> None:
        self.seed, self.model = seed, network(seed)
        self.opt = optimizer(self.model, groups)

    def call(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def step(self) -> None:
        self.opt.step()

    def change(self, name: str) -> None:
        with torch.no_grad():
            self.model.get_parameter(name).mul_(0.9)

    def copy(self) -> None:
        old, self.opt = self.model, copy.deepcopy(self.opt)
        self.model = self.opt.model  # type: ignore[assignment]
        self._take_modes(old)

    def load(self) -> None:
        old, saved = self.model, copy.deepcopy(self.opt.state_dict())
        self.model = network(self.seed)
        self.model.load_state_dict(old.state_dict())
        self._take_modes(old)
        for p, q in zip(self.model.parameters(), old.parameters(), strict=True):
            p.grad = q.grad
        self.opt = optimizer(self.model, len(self.opt.param_groups))
        for p, q in zip(self.model.parameters(), old.parameters(), strict=True):
            p.requires_grad_(q.requires_grad)
        self.opt.load_state_dict(saved)

    def _take_modes(self, old: nn.Module) -> None:
        for new, module in zip(self.model.modules(), old.modules(), strict=True):
            new.training = module.training


class Reference(Average):
    """The same steps without an average of their own, at weights that are put in by hand."""

    def __init__(self, seed: int, groups: int) -> None:
        super().__init__(seed, groups)
        self.opt = optimizer(self.model, groups, step_size=StepSize(average=False))
        self.norm, self.parameters = self.model[1], dict(self.model.named_parameters())
        self.z = {n: t.clone() for n, t in self.model.state_dict().items() if t.is_floating_point()}
        self.x = {n: t.clone() for n, t in self.z.items()}
        self.training, self.normed = False, False
        self.resting: set[str] = set()
        self.averaged: set[str] = set()
        self.batches: list[tuple[Tensor, Tensor]] = []

    def _put(self, values: dict[str, Tensor]) -> None:
        self.model.load_state_dict(values, strict=False)

    def call(self, x: Tensor) -> Tensor:
        if not self.training:
            self.training = True
            self.resting = {n for n, p in self.parameters.items() if not p.requires_grad}
            kept = self.resting if self.norm.training else {*self.resting, *(f"1.{name}" for name in STATISTICS)}
            self._put({n: self.x[n] if n in kept else self.z[n] for n in self.z})
        if self.norm.training:
            with torch.no_grad():
                h = self.model[0](x)
            self.batches.append((h.mean(0), h.var(0)))
        return super().call(x)

    def step(self) -> None:
        known = {id(p) for p in self.opt.engine.partition.parameters}
        given = {n: p for n, p in self.parameters.items() if id(p) in known and p.grad is not None}
        finite = all(bool(p.grad.isfinite().all()) for p in given.values() if p.grad is not None)
        c = 9 / (self.opt.engine.schedule.applied_steps + 9)
        self._put({n: self.z[n] for n in given if n in self.resting})  # thawed since the forward
        self.opt.step()
        self.averaged |= given.keys()
        for n, p in given.items() if finite else ():
            self.z[n] = p.detach().clone()
            self.x[n] = self.x[n] + c * (self.z[n] - self.x[n])
        if self.norm.training:
            self._take_statistics(c if finite and given else 0.0, bool(given))
        self.training, self.batches = False, []
        self._put(self.x)

    def _take_statistics(self, c: float, steps: bool) -> None:
        """Take in what each batch had; a norm that is not averaged yet shows its own."""
        shares = [0.1 * 0.9**k for k in reversed(range(len(self.batches)))]
        for i, name in enumerate(f"1.{name}" for name in STATISTICS):
            self.z[name] = self.model.get_buffer(name).clone()
            if self.normed:
                batch = sum(w * found[i] for w, found in zip(shares, self.batches, strict=True)) / sum(shares)
                self.x[name] = self.x[name] + c * (batch - self.x[name])
            else:
                self.x[name] = self.z[name].clone()
        trained = {n for n in ("1.weight", "1.bias") if self.parameters[n].requires_grad}
        self.normed |= steps and (not trained or not trained.isdisjoint(self.averaged))

    def change(self, name: str) -> None:
        moved = -0.1 * self.x[name]
        self.x[name], self.z[name] = self.x[name] + moved, self.z[name] + moved
        self._put(self.x)

    def copy(self) -> None:
        pass

    def load(self) -> None:
        pass


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    modes = [module.training for module in model.modules()]
    model.eval()
    with torch.no_grad():
        out: Tensor = model(x)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return out


def one_step(it: Average, odd: set[str], layers: list[int], batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Take a step in which what is odd happens; returns what an evaluation before it has shown."""
    model = it.model
    (x, y), (other_x, other_y) = batches

    def freeze(layer: int, frozen: bool) -> None:
        if frozen:
            model[layer].requires_grad_(False)
        if not any(p.requires_grad for p in model[3:].parameters()):
            model[5].requires_grad_(True)

    if "thaw" in odd:
        model.requires_grad_(True)
    freeze(layers[0], "freeze" in odd)
    if "add a group" in odd and len(it.opt.param_groups) == 1:
        it.opt.add_param_group({"params": model[:3].parameters()})
    if "switch the norm" in odd:
        model[1].train(not model[1].training)
    if "change" in odd:
        it.change(f"{layers[2]}.weight")
    if "exchange" in odd:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(network(99).state_dict())
        evaluated(model, x)
        model.load_state_dict(kept)
    seen = evaluated(model, x) if "evaluate" in odd else x
    for p in model.parameters():
        if "keep gradients" not in odd or p.requires_grad:
            p.grad = None
    if "drop a batch" in odd:
        F.cross_entropy(it.call(other_x), other_y).backward()
        it.opt.zero_grad()
    (F.cross_entropy(it.call(x), y) * (torch.nan if "not finite" in odd else 1.0)).backward()
    if "evaluate amid" in odd:
        evaluated(model, other_x)
    if "thaw between" in odd:
        model.requires_grad_(True)
    freeze(layers[1], "freeze between" in odd)
    if "accumulate" in odd:
        F.cross_entropy(it.call(other_x), other_y).backward()
    freeze(layers[1], "freeze late" in odd)
    it.step()
    if "copy" in odd:
        it.copy()
    if "load" in odd:
        it.load()
    return seen


@pytest.mark.parametrize(
    "seeds", [range(8), *(pytest.param(range(k, k + 8), marks=pytest.mark.slow) for k in range(8, 64, 8))]
)
def test_the_average_of_an_odd_loop_is_that_of_its_definition(seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        groups = chance.choice((1, 2))
        pair = Average(seed, groups), Reference(seed, groups)
        changed = False
        for t in range(25):
            odd = {name for name in ODD if chance.random() < 0.1}
            odd -= {"change"} if changed or t < 2 else set()  # a second change would end the average
            odd -= {"not finite"} if t < 2 else set()
            changed |= "change" in odd
            layers = [chance.choice(LAYERS) for _ in range(3)]
            numbers = torch.Generator().manual_seed(1000 * seed + t)
            batches = [
                (torch.randn(12, 4, generator=numbers, dtype=torch.float64), torch.randint(3, (12,), generator=numbers))
                for _ in range(2)
            ]
            seen = [one_step(it, odd, layers, batches) for it in pair]
            where = f"seed {seed}, step {t}: {sorted(odd)}"
            torch.testing.assert_close(*seen, rtol=0, atol=1e-6, msg=lambda text, at=where: f"{at}: {text}")
            for (name, one), two in zip(
                pair[0].model.state_dict().items(), pair[1].model.state_dict().values(), strict=True
            ):
                error = float((one - two).abs().max())
                assert error < 1e-6, f"{where}: {name} is off by {error:.3g}"
        assert pair[0].opt.average.offsets
