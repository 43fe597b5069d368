"""Arguments that make no sense: refused by an error that names the argument, or borne."""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ekfac
from ekfac import EKFAC, KFAC, Preconditioner, fisher
from ekfac.curvature.operators.measures import correlation, relative_error, spectrum_distance
from ekfac.optim.options import FLAT, RULE_OPTIONS
from fuzz.harness import Broken, Fuzzer

SOURCES = str(Path(ekfac.__file__).parent)


class Odd:
    """An object that nothing expects."""

    def __repr__(self) -> str:
        return "Odd()"


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**70, 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), 1j, Odd(), Odd),
    *(
        "",
        "abc",
        "running",
        "cpu",
        b"x",
        [],
        [0.9],
        ["a"],
        (),
        (0.9,),
        (0.9, 0.999),
        (1, 2, 3),
        {},
        {"a": 1},
        {1},
        object(),
    ),
    *(torch.tensor(0.5), torch.tensor(float("nan")), torch.zeros(0), torch.ones(3), torch.ones(2, 2), torch.float16),
    *(torch.nn.Linear(2, 2), torch.device("cpu"), len, print, range(3), iter([])),
)


def model(chance: random.Random) -> nn.Module:
    return chance.choice(
        (
            lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
            lambda: nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)),
            lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2), nn.Flatten()),
        )
    )()


def odd_model(chance: random.Random) -> Any:
    """Models that are not quite models."""
    frozen = nn.Linear(4, 2)
    frozen.requires_grad_(False)
    return chance.choice(
        (
            lambda: nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 2)),
            lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 0)),
            lambda: nn.Linear(0, 2),
            lambda: nn.Sequential(),
            lambda: frozen,
            lambda: nn.Linear(4, 2).to(torch.complex64),
            lambda: nn.Linear(4, 2, device="meta"),
            lambda: nn.Linear(4, 2).half(),
            lambda: nn.LazyLinear(2),
            lambda: chance.choice(VALUES),
        )
    )()


# Words by which an error may name an argument that has parts of its own.
WORDS = {
    "model": ("model", "parameter", "layer"),
    "batches": ("batch", "label", "target", "loss", "output"),
    "loss": ("loss", "output"),
}


def named(call: Callable[[], Any], name: str, given: Any) -> str:
    """Make a call; an error must come from the library, be of an expected kind, and name the argument."""
    try:
        call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{name}={type(given).__name__}"
        if not isinstance(error, (TypeError, ValueError, RuntimeError, NotImplementedError)):
            raise Broken(f"{what}: {type(error).__name__}: {error}") from error
        if not last.filename.startswith(SOURCES) and "unexpected keyword" not in str(error):
            raise Broken(f"{what}: raw {type(error).__name__} from {Path(last.filename).name}: {error}") from error
        if not any(word in str(error) for word in WORDS.get(name, (name,))):
            raise Broken(f"{what}: not named: {error}") from error
        return f"{name} refused"
    return f"{name} borne"


def constructor(chance: random.Random, folder: Path) -> str:
    kind = chance.choice((EKFAC, KFAC, Preconditioner))
    names = [n for n in inspect.signature(kind.__init__).parameters if n not in ("self", "model", "old")]
    if chance.random() < 0.3:
        names = [*FLAT, *RULE_OPTIONS]  # as they were called before
    if chance.random() < 0.15:
        odd = odd_model(chance)
        return named(lambda: step(kind(odd), odd), "model", odd)
    net = model(chance)
    name, value = chance.choice(names), chance.choice(VALUES)
    if name == "damping" and callable(value):
        return "a function that fails is its author's"
    return named(lambda: step(kind(net, **{name: value}), net), name, value)


def step(optimizer: Any, net: nn.Module) -> None:
    """Take two steps and put everything back."""
    try:
        for _ in range(2):
            if optimizer is not None and isinstance(net, nn.Module):
                optimizer.zero_grad()
                first = next(iter(net.parameters()))
                width = first.shape[1] if isinstance(net, nn.Linear) else 4
                net(torch.randn(6, width, dtype=first.dtype, device=first.device)).square().sum(1).mean().backward()
                optimizer.step()
    finally:
        optimizer.close()


def odd_batches(chance: random.Random) -> Any:
    x, y = torch.randn(5, 4), torch.randint(2, (5,))
    return chance.choice(
        (
            [],
            [()],
            [[]],
            [x],
            [(x, y[:3])],
            [(x, y + 7)],
            [(x, y.float())],
            [(x[:, :2], y)],
            [(x * float("nan"), y)],
            [(x, None)],
            [(x, "y")],
            [("x", y)],
            [{"x": x, "y": y, "label": y}],
            [{"y": y}],
            [(x[:0], y[:0])],
            [(x.long(), y)],
            [(x, y, y)],
            [(torch.tensor(1.0), y)],
            x,
            {"x": x},
            lambda: [(x, y)],
            chance.choice(VALUES),
        )
    )


def fishers(chance: random.Random, folder: Path) -> str:
    net = model(chance)
    data = [(torch.randn(5, 4), torch.randint(2, (5,)))]
    given: dict[str, Any] = {"model": net, "batches": data, "loss": "categorical"}
    names = list(inspect.signature(fisher).parameters)
    name = chance.choice([*names, "batches", "batches", "model", "loss"])
    if name == "batches":
        given[name] = odd_batches(chance)
    elif name == "model":
        given[name] = odd_model(chance)
    elif name == "loss":
        given[name] = chance.choice((lambda o, t: o, lambda o, t: 1.0, lambda o, t: o.sum(), lambda o: o, *VALUES))
    else:
        given[name] = chance.choice(VALUES)
    given.setdefault("approximation", chance.choice(("full", "block", "diagonal", "kfac", "ekfac")))
    given.setdefault("estimate", chance.choice(("empirical", "sampled", "exact")))
    try:
        return named(lambda: fisher(**given), name, given[name])
    except Broken as error:
        # What a model or a loss does with its inputs is its own affair: its errors pass as they are.
        inside = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else None)
        arity = name == "loss" and "argument" in str(error)
        if arity or any("nn/modules" in one.filename or one.name == "<lambda>" for one in inside[2:]):
            return f"{name}: the model's or the loss's own error"
        raise


def operators(chance: random.Random, folder: Path) -> str:
    net = model(chance)
    data = [(torch.randn(9, 4), torch.randint(2, (9,)))]
    kind = chance.choice(("full", "block", "diagonal", "kfac", "ekfac"))
    G = fisher(net, data, "categorical", approximation=kind)
    v = torch.randn(G.shape[0])
    as_dict: dict[str, Tensor] = G.unflatten(v)
    one = chance.choice(list(as_dict))
    junk = chance.choice(
        (
            *VALUES,
            v[:-1],
            torch.randn(2, G.shape[0]),
            v.long(),
            v.to(torch.complex64),
            {**as_dict, one: chance.choice(VALUES)},
            {**as_dict, one: as_dict[one][None][:, :0]},
            {n: t for n, t in as_dict.items() if n != one},
            {**as_dict, "more": v},
            {},
            G,
        )
    )
    odd_number = chance.choice(VALUES)
    calls: dict[str, tuple[str, Callable[[], Any], Any]] = {
        "@": ("vector", lambda: G @ junk, junk),
        "solve": ("vector", lambda: G.solve(junk, 0.1), junk),
        "quadratic": ("vector", lambda: G.quadratic(junk), junk),
        "project": ("vector", lambda: G.project(junk), junk),
        "unproject": ("vector", lambda: G.unproject(junk), junk),
        "flatten": ("vector", lambda: G.flatten(junk), junk),
        "unflatten": ("vector", lambda: G.unflatten(junk), junk),
        "solve damping": ("damping", lambda: G.solve(v, odd_number), odd_number),
        "logdet": ("damping", lambda: G.logdet(odd_number), odd_number),
        "power": ("p", lambda: G.power(odd_number, 0.1), odd_number),
        "power damping": ("damping", lambda: G.power(0.5, odd_number), odd_number),
        "sample n": ("n", lambda: G.sample(odd_number, 0.1), odd_number),
        "sample damping": ("damping", lambda: G.sample(1, odd_number), odd_number),
        "sample scale": ("scale", lambda: G.sample(1, 0.1, odd_number), odd_number),
        "sample generator": ("generator", lambda: G.sample(1, 0.1, 1.0, odd_number), odd_number),
        "restrict": ("layers", lambda: G.restrict(odd_number), odd_number),
        "relative_error": ("H", lambda: relative_error(G, odd_number), odd_number),
        "spectrum_distance": ("H", lambda: spectrum_distance(G, odd_number), odd_number),
        "correlation": ("coordinates", lambda: correlation(G, odd_number), odd_number),
        "correlation basis": ("basis", lambda: correlation(G, [0], odd_number), odd_number),
        "load": ("path", lambda: ekfac.Curvature.load(odd_number), odd_number),
    }
    which = chance.choice(list(calls))
    name, call, value = calls[which]
    if which == "load" and isinstance(value, str):
        return "load: a file that is not there"
    try:
        return which + " " + named(call, name, value)
    except Broken as error:
        raise Broken(f"{which}: {error}") from error.__cause__


FUZZERS = (
    Fuzzer("constructors", "a senseless argument of an optimizer is named, or borne", 600, constructor),
    Fuzzer("fisher", "a senseless argument of fisher is named, or borne", 600, fishers),
    Fuzzer("operators", "a senseless argument of an operator is named, or borne", 600, operators),
)
