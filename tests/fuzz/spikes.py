"""One number that is far too large, a fill value say, in a batch: no rule is thrown out by it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
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


Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def losses(network: str, optimizer: str, change: Change, steps: int, way: str = "") -> tuple[list[float], list[bool]]:
    """The loss on other data after every step, and whether all weights and all of the state are finite."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    make, options = OPTIMIZERS[optimizer]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way == "scaler" else None
    opt = make(model, **options, **({} if scaler is None else {"grad_scaler": scaler}))
    found, finite, others = [], [], batch(10**6)
    for t in range(steps):
        x, y = change(t, *batch(t))
        opt.zero_grad()
        pieces = 4 if way.startswith("accumulated") else 1
        for inputs, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = nn.functional.cross_entropy(model(inputs), targets) / pieces
            (loss if scaler is None else scaler.scale(loss)).backward()
        if way in ("clipped", "accumulated, clipped"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif way == "each clipped":
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
        with torch.no_grad():
            found.append(float(nn.functional.cross_entropy(model(others[0]), others[1])))
            kept = [v for p in model.parameters() for v in (p, *opt.state.get(p, {}).values()) if isinstance(v, Tensor)]
            finite.append(bool(torch.isfinite(torch.cat([v.flatten() for v in kept])).all()))
    return found, finite


def spiked(size: float, at: int, place: tuple[int, int]) -> Change:
    """One number of that size, at one step."""

    def change(t: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if t == at:
            x[place] = size
        return x, y

    return change


def spike(chance: random.Random, folder: Path) -> str:
    network, optimizer = chance.choice(sorted(NETWORKS)), chance.choice(sorted(OPTIMIZERS))
    size = chance.choice((1.0, -1.0)) * 10 ** chance.uniform(3, 38.5)
    at, place = chance.choice((0, BEFORE, BEFORE)), (chance.randrange(32), chance.randrange(6))
    found, finite = losses(network, optimizer, spiked(size, at, place), at + AFTER)
    what = f"{optimizer}, {network}"
    if not all(finite):
        raise Broken(f"{what}, {size:.0e} at step {at}: something is not finite")
    if at == 0 and not all(map(math.isfinite, found)):
        raise Broken(f"{what}, {size:.0e} at step 0: the loss is not finite")
    if at and not found[-1] <= 5 * found[at - 1]:
        raise Broken(f"{what}, {size:.0e} at step {at}: the loss went from {found[at - 1]:.2g} to {found[-1]:.2g}")
    return optimizer


#: Ways to come from a loss to a step.
WAYS = ("scaler", "accumulated", "accumulated, clipped", "autocast", "clipped", "each clipped")


def at_any_moment(chance: random.Random, folder: Path) -> str:
    """At the first steps, during warm-up, and around a refresh; numbers that are not finite too."""
    network, optimizer, way = (chance.choice(sorted(names)) for names in (NETWORKS, OPTIMIZERS, WAYS))
    size = chance.choice(
        (math.inf, -math.inf, math.nan, *6 * [chance.choice((1.0, -1.0)) * 10 ** chance.uniform(3, 38.5)])
    )
    at, place = chance.choice((0, 1, 5, 9, 29, 48, 49, 50, 51)), (chance.randrange(32), chance.randrange(6))
    found, finite = losses(network, optimizer, spiked(size, at, place), at + AFTER, way)
    what = f"{optimizer}, {network}, {way}, {size:.0e} at step {at}"
    if not all(finite) or not all(map(math.isfinite, found)):
        raise Broken(f"{what}: something is not finite")
    before = min(found[at - 1], math.log(3)) if at else math.log(3)
    if not found[-1] <= 5 * before:
        raise Broken(f"{what}: the loss went from {before:.2g} to {found[-1]:.2g}")
    return way


ODD: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "zeros": lambda x, y: (x * 0, y),
    "all alike": lambda x, y: (x[:1].expand_as(x).clone(), y),
    "denormal": lambda x, y: (x * 1e-40, y),
    "1e-30": lambda x, y: (x * 1e-30, y),
    "one class": lambda x, y: (x, y * 0),
    "one example": lambda x, y: (x[:1], y[:1]),
    "none": lambda x, y: (x[:0], y[:0]),
    "far away": lambda x, y: (x + 1e6, y),
}


def odd_batches(chance: random.Random, folder: Path) -> str:
    """Whole batches without information, one or thirty of them, amid training or before it."""
    network, optimizer = chance.choice(sorted(NETWORKS)), chance.choice(sorted(OPTIMIZERS))
    kind, many, at = chance.choice(sorted(ODD)), chance.choice((1, 30)), chance.choice((0, BEFORE, BEFORE))
    found, finite = losses(
        network, optimizer, lambda t, x, y: ODD[kind](x, y) if at <= t < at + many else (x, y), at + many + AFTER
    )
    what = f"{optimizer}, {network}: {many} of {kind} from step {at}"
    if not all(finite) or not all(map(math.isfinite, found)):
        raise Broken(f"{what}: something is not finite")
    # Thirty batches of one class teach that class; what counts is that it comes back.
    before = found[at - 1] if at else math.log(3)
    if not found[-1] <= 5 * before:
        raise Broken(f"{what}: the loss went from {before:.2g} to {found[-1]:.2g}")
    return kind


FUZZERS = (
    Fuzzer("spikes", "after one number that is far too large, training goes on", 576, spike),
    Fuzzer("moments", "the same at any moment, accumulated, clipped, scaled, under autocast", 400, at_any_moment),
    Fuzzer("batches", "after batches of zeros, of one class, of one example, training goes on", 300, odd_batches),
)
