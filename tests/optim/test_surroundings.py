"""What a program may have set around an optimizer: torch's default device and dtype, its modes, warnings as errors."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac import EKFAC, KFAC
from ekfac.optim.methods import rules

KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "default": EKFAC,
    "anchored": lambda model: EKFAC(model, scaling="anchored"),
    "running": lambda model: EKFAC(model, scaling="running", lr=0.01, damping=0.01),
    "per_example": lambda model: EKFAC(model, scaling="per_example", lr=0.01, damping=0.01),
    "kfac": lambda model: KFAC(model, lr=0.01, damping=0.01),
}
kinds = pytest.mark.parametrize("kind", KINDS)
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


class Recurrent(nn.Module):
    """An LSTM over sequences of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 3, **CPU)
        self.head = nn.Linear(3, 3, **CPU)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(1, len(x) + 1, device="cpu").clamp(max=x.shape[1]).flip(0)
        packed = nn.utils.rnn.pack_padded_sequence(x.T[..., None], lengths)
        return self.head(self.cells(packed)[1][0][-1])


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, **CPU), nn.Tanh(), nn.Linear(8, 3, **CPU))


def _alike() -> nn.Module:
    """Layers of one shape, which are handled together."""
    layers = [nn.Linear(6, 6, **CPU) for _ in range(3)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(6, 3, **CPU))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1, **CPU), nn.Flatten(), nn.Linear(24, 3, **CPU)
    )


def _batch(chance: torch.Generator, n: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=chance, **CPU)
    return x, (x.sum(1) > 0).long()


def _train(model: nn.Module, opt: Any, steps: int, seed: int = 1) -> None:
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = _batch(chance)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@contextmanager
def _defaults(device: str | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def _course(make: Callable[[], nn.Module], kind: str) -> Tensor:
    """Train, save, load, train, and ask for everything that can be asked."""
    rules._REMAINING.clear()  # what earlier trainings left there would spare this one the computation
    torch.manual_seed(0)
    model = make()
    opt = KINDS[kind](model)
    _train(model, opt, 6)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    opt.load_state_dict(torch.load(file, weights_only=True))
    _train(model, opt, 6)
    assert opt.stats()["steps"] == 12
    assert str(ekfac.summary(model)) and str(ekfac.plan(model, torch.zeros(8, 6, **CPU)))
    return _weights(model)


# A model on a CPU under torch.set_default_device("cuda"), say; here it is "meta", as no GPU need be there.
# Sequences that end at unlike times have no gradient per example.
AROUND = [
    *((kind, make, "meta", torch.float32) for make in (_dense, _alike, _convolutions) for kind in KINDS),
    *((kind, Recurrent, "meta", torch.float32) for kind in KINDS if kind != "per_example"),
    *((kind, _dense, None, dtype) for dtype in (torch.float64, torch.bfloat16) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "make", "device", "dtype"), AROUND)
def test_default_device_and_dtype_change_no_bit(kind: str, make: Any, device: str | None, dtype: torch.dtype) -> None:
    plain = _course(make, kind)
    with _defaults(device, dtype):
        assert torch.equal(_course(make, kind), plain)


@pytest.mark.parametrize("approximation", ["full", "kfac", "ekfac"])
def test_operators_do_not_read_the_default_device(approximation: str, tmp_path: Any) -> None:
    chance = torch.Generator().manual_seed(0)
    model, data = _dense(), [_batch(chance) for _ in range(2)]
    v = torch.randn(sum(p.numel() for p in model.parameters()), generator=chance, **CPU)

    def results() -> list[Tensor]:
        G = ekfac.fisher(model, data, "categorical", approximation=approximation, estimate="sampled")
        G.save(tmp_path / "operator")
        again = ekfac.Curvature.load(tmp_path / "operator")
        part = G.restrict(["2"])
        G.sample(damping=0.1)
        return [G @ v, again.solve(v, damping=0.1), part.diagonal(), ekfac.correlation(G, [0, 5, 2])]

    plain = results()
    with _defaults("meta"):
        assert all(torch.equal(one, other) for one, other in zip(results(), plain, strict=True))


@kinds
def test_inference_mode_is_refused_where_it_would_leave_tensors_that_cannot_change(kind: str) -> None:
    model = _dense()
    opt = KINDS[kind](model)
    twin = copy.deepcopy(opt)
    x, y = _batch(torch.Generator().manual_seed(2))
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.inference_mode():
        model(x)
        saved = opt.state_dict()
        for forbidden in (opt.step, lambda: opt.load_state_dict(saved), lambda: KINDS[kind](_dense())):
            with pytest.raises(RuntimeError, match=r"inside torch.inference_mode\(\).*Allowed: torch.no_grad\(\)"):
                forbidden()
    opt.load_state_dict(saved)
    _train(model, opt, 4)
    _train(twin.model, twin, 4)
    assert torch.equal(_weights(model), _weights(twin.model))


@kinds
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_a_batch_without_examples_is_no_step(kind: str, reduce: Callable[[Tensor], Tensor]) -> None:
    model = _dense()
    opt = KINDS[kind](model)
    twin = copy.deepcopy(opt)
    for number in range(3):
        _train(model, opt, 2, seed=number)
        _train(twin.model, twin, 2, seed=number)
        opt.zero_grad()
        reduce(model(torch.zeros(0, 6))).backward()
        opt.step()
    assert opt.stats()["steps"] == 6
    assert torch.equal(_weights(model), _weights(twin.model))


def test_gradients_of_others_beside_an_empty_batch_are_refused() -> None:
    model = _dense()
    opt = EKFAC(model)
    model(torch.zeros(0, 6)).sum().backward()
    model[0].weight.grad.fill_(1.0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no captured examples"):
        opt.step()


@kinds
def test_warnings_as_errors_and_deterministic_algorithms(kind: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strict = _course(_dense, kind)
            _course(_convolutions, kind)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(strict, _course(_dense, kind))
