"""Solvers that fail: whichever call of a decomposition raises, or gives nonsense, training goes on finitely."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fuzz.harness import Broken, Fuzzer
from fuzz.states import KINDS, network, train

SOLVERS = ("eigh", "qr", "cholesky_ex", "svd", "eigvalsh", "solve_triangular", "inv_ex", "inv")
EVERYWHERE = (*((torch.linalg, name) for name in SOLVERS), (torch, "cholesky_inverse"))
STEPS = 8


@contextlib.contextmanager
def failing(fails: Callable[[int], bool], how: str) -> Iterator[list[int]]:
    """Let every call of a decomposition for which ``fails`` says so raise, or return NaN."""
    count = [0, 0]

    def wrapped(solver: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            if not fails(count[0]):
                return solver(*arguments, **options)
            count[1] += 1
            if how == "raises":
                raise torch.linalg.LinAlgError("injected")
            result = solver(*arguments, **options)
            tensors = [result] if isinstance(result, torch.Tensor) else list(result)
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
            return result

        return call

    before = [(module, name, getattr(module, name)) for module, name in EVERYWHERE]
    for module, name, solver in before:
        setattr(module, name, wrapped(solver))
    try:
        yield count
    finally:
        for module, name, solver in before:
            setattr(module, name, solver)


def fault(chance: random.Random, folder: Path) -> str:
    name, how = chance.choice(list(KINDS)), chance.choice(("raises", "NaN"))
    with failing(lambda call: False, how) as count:
        _train(name)
    share = chance.choice((None, None, 0.1, 0.5, 1.0))
    if share is None:
        at = chance.randrange(1, count[0] + 1) if count[0] else 1
        fails, what = (lambda call: call == at), "one call"
    else:
        fails, what = (lambda call: chance.random() < share), f"{share:.0%} of calls"
    with failing(fails, how):
        try:
            parameters = _train(name)
        except Exception as error:
            raise Broken(f"{name}, {how}, {what}: {type(error).__name__}: {error}") from error
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise Broken(f"{name}, {how}, {what}: the weights are not finite")
    return f"{name}, {how}, {what}"


def _train(name: str) -> list[torch.Tensor]:
    net = network()
    with KINDS[name](net) as optimizer:
        train(net, optimizer, STEPS)
    return list(net.parameters())


FUZZERS = (Fuzzer("solvers", "a failing decomposition does not end or spoil training", 200, fault),)
