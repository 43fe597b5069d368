"""One number that is far too large, a fill value say, in a batch: no rule is thrown out by it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ekfac
from ekfac import StepSize
from fuzz.harness import Broken, Fuzzer

BEFORE, AFTER = 30, 100

NETWORKS = {
    "tanh": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
    "relu": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
    "no block": lambda: nn.Sequential(nn.Linear(6, 16), nn.PReLU(16), nn.Linear(16, 3)),
}
CLIPPED = StepSize(kl_clip=1e-2)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "default": (ekfac.EKFAC, {}),
    "anchored": (ekfac.EKFAC, {"scaling": "anchored", "step_size": StepSize(max_change=1.0, lr_fraction=0.03)}),
    "adam": (ekfac.EKFAC, {"scaling": "adam"}),
    "rmsprop": (ekfac.EKFAC, {"scaling": "rmsprop", "lr": 0.003}),
    "adagrad": (ekfac.EKFAC, {"scaling": "adagrad", "lr": 0.03}),
    "running": (ekfac.EKFAC, {"scaling": "running", "damping": 1e-3, "damping_mode": "plain"}),
    "per_example": (ekfac.EKFAC, {"scaling": "per_example", "damping": 1e-3, "damping_mode": "plain"}),
    "kronecker": (
        ekfac.EKFAC,
        {"scaling": "kronecker", "damping": 1e-2, "damping_mode": "plain", "step_size": CLIPPED},
    ),
    "KFAC": (ekfac.KFAC, {}),
    "the paper's": (ekfac.EKFAC, ekfac.PAPER),
    "the paper's, each batch": (ekfac.EKFAC, {**ekfac.PAPER, "scaling": "per_example"}),
}

TRUTH = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def batch(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(number))
    return x, (x @ TRUTH).argmax(1)


def losses(
    network: str, optimizer: str, size: float, at: int, place: tuple[int, int], steps: int
) -> tuple[list[float], list[bool]]:
    """The loss on other data after every step, and whether all weights and all of the state are finite."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    make, options = OPTIMIZERS[optimizer]
    opt = make(model, **options)
    found, finite = [], []
    for t in range(steps):
        x, y = batch(t)
        if t == at:
            x[place] = size
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        with torch.no_grad():
            x, y = batch(10**6)
            found.append(float(nn.functional.cross_entropy(model(x), y)))
        kept = [v for p in model.parameters() for v in (p, *opt.state.get(p, {}).values()) if isinstance(v, Tensor)]
        finite.append(all(bool(torch.isfinite(v).all()) for v in kept))
    return found, finite


def spike(chance: random.Random, folder: Path) -> str:
    network, optimizer = chance.choice(sorted(NETWORKS)), chance.choice(sorted(OPTIMIZERS))
    size = chance.choice((1.0, -1.0)) * 10 ** chance.uniform(3, 38.5)
    at, place = chance.choice((0, BEFORE, BEFORE)), (chance.randrange(32), chance.randrange(6))
    found, finite = losses(network, optimizer, size, at, place, at + AFTER)
    what = f"{optimizer}, {network}"
    if not all(finite):
        raise Broken(f"{what}, {size:.0e} at step {at}: something is not finite")
    if at == 0 and not all(map(math.isfinite, found)):
        raise Broken(f"{what}, {size:.0e} at step 0: the loss is not finite")
    if at and not found[-1] <= 5 * found[at - 1]:
        raise Broken(f"{what}, {size:.0e} at step {at}: the loss went from {found[at - 1]:.2g} to {found[-1]:.2g}")
    return optimizer


FUZZERS = (Fuzzer("spikes", "after one number that is far too large, training goes on", 576, spike),)
