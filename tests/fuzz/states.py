"""Changed states of optimizers: load_state_dict refuses them before anything changes, or training goes on finitely."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ekfac import EKFAC, KFAC, Batch, Preconditioner, StepSize
from fuzz.harness import Broken, Fuzzer
from fuzz.junk import JSON, paths

KINDS: dict[str, Any] = {
    "default": lambda net: EKFAC(net),
    "running": lambda net: EKFAC(net, scaling="running", damping=1e-2, refresh_every=2),
    "per_example": lambda net: EKFAC(net, scaling="per_example", damping=1e-2, refresh_every=2),
    "kfac": lambda net: KFAC(net, lr=0.01),
    "anchored": lambda net: EKFAC(net, scaling="anchored", step_size=StepSize(max_change=1.0, lr_fraction=0.03)),
    "adam": lambda net: EKFAC(net, scaling="adam", momentum=0.9),
    "kfac, momentum": lambda net: KFAC(net, lr=0.01, momentum=0.9, damping=lambda t: 1e-2 / (1 + t)),
    "preconditioner": lambda net: Preconditioner(net),
    "sum": lambda net: EKFAC(net, batch=Batch(reduction="sum")),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def train(net: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()


def changed_tensor(t: Tensor, chance: random.Random) -> tuple[Any, str]:
    kinds = (
        "shape",
        "transposed",
        "NaN",
        "infinity",
        "dtype",
        "empty",
        "huge",
        "large",
        "one",
        "negative",
        "none",
        "0",
    )
    how = chance.choice(kinds)
    values: dict[str, Any] = {
        "shape": lambda: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]),
        "transposed": lambda: t.mT.contiguous() if t.dim() > 1 and t.shape[-1] != t.shape[-2] else t[None],
        "NaN": lambda: torch.full_like(t, float("nan")) if t.is_floating_point() else t.new_full(t.shape, -(2**62)),
        "infinity": lambda: torch.full_like(t, float("inf")) if t.is_floating_point() else t[None],
        "dtype": lambda: t.to(torch.complex64),
        "empty": lambda: t.new_zeros(0),
        "huge": lambda: torch.full_like(t, 1e38) if t.is_floating_point() else t[None],
        "large": lambda: t * 1e20,
        "one": lambda: t.index_fill(0, torch.tensor([0]), 1e30) if t.dim() else t * 1e30,
        "0": lambda: t * 0,
        "negative": lambda: -t.abs() - 1,
        "none": lambda: None,
    }
    return values[how](), how


def mutate(state: dict[str, Any], chance: random.Random) -> str:
    """Change one place of a state, in place."""
    at = chance.choice([path for path in paths(state) if path])
    inner: Any = state
    for key in at[:-1]:
        inner = inner[key]
    old = inner[at[-1]]
    kind = chance.random()
    if isinstance(old, Tensor) and kind < 0.75:
        inner[at[-1]], how = changed_tensor(old, chance)
        return f"tensor, {how}"
    if kind < 0.85:
        inner[at[-1]] = copy.deepcopy(chance.choice(JSON))
        return "junk"
    del inner[at[-1]]
    return "removed"


def snapshot(net: nn.Module, optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    return [copy.deepcopy(net.state_dict()), [(p, _frozen(state, p)) for p in paths(state) if p]]


def _frozen(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state.clone() if isinstance(state, Tensor) else state if isinstance(state, (int, float, str, bool)) else None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or a is b


def load(chance: random.Random, folder: Path) -> str:
    name = chance.choice(list(KINDS))
    net = network()
    with KINDS[name](net) as optimizer:
        train(net, optimizer, 4)
        if chance.random() < 0.2:  # it is saved amid a pass
            net(torch.randn(8, 4))
        state = copy.deepcopy(optimizer.state_dict())
    how = "another rule" if chance.random() < 0.1 else mutate(state, chance)
    if chance.random() < 0.3:  # of the network, when it is loaded
        freeze = chance.choice(([0], [3], [4], [0, 4]))
        how += ", frozen" if how != "another rule" else ""
    else:
        freeze = []
    twin = network()
    for index in freeze:
        twin[index].requires_grad_(False)
    others = [k for k in KINDS if k.split(",")[0] != name.split(",")[0]]
    kind = chance.choice(others) if how == "another rule" else name
    with KINDS[kind](twin) as optimizer:
        train(twin, optimizer, 2)
        before = snapshot(twin, optimizer)
        try:
            optimizer.load_state_dict(state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            if not same(before, snapshot(twin, optimizer)):
                raise Broken(f"{how}: raised after having changed the optimizer: {error}") from error
            if isinstance(error, KeyError):
                raise Broken(f"{how}: a bare KeyError: {error}") from error
            return f"{how}: refused"
        except Exception as error:
            raise Broken(f"{how}: {type(error).__name__} from load_state_dict: {error}") from error
        if how == "another rule":
            raise Broken(f"state of {name} was taken by {kind} without a word")
        try:
            train(twin, optimizer, 2)
            twin.requires_grad_(True)
            train(twin, optimizer, 4)
        except Exception as error:
            raise Broken(f"{how}: accepted, and crashed later: {type(error).__name__}") from error
    if not all(bool(torch.isfinite(t).all()) for p in twin.parameters() for t in (p, p.grad)):
        raise Broken(f"{how}: accepted, and the weights are not finite")
    return f"{how}: borne"


FUZZERS = (Fuzzer("states", "a changed state is refused whole, or borne", 600, load),)
