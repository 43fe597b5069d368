"""memory_limit: the same numbers within fewer bytes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ekfac
from helpers import LOSSES, assert_same_weights, backward, bases_of, batches_for, jittered, make_pair, parameters_of
from paper import EKFAC, KFAC

COMMON: dict[str, Any] = {"lr": 0.05, "damping": 0.05, "refresh_every": 2, "factor_decay": 0.6}


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of all tensors that operations have given out and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, list[int]] = {}  # address -> [bytes, tensors alive]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                entry = self._storages.get(storage.data_ptr())
                if entry is None:
                    entry = self._storages[storage.data_ptr()] = [storage.nbytes(), 0]
                    self.now += entry[0]
                    self.peak = max(self.peak, self.now)
                entry[1] += 1
                weakref.finalize(tensor, self._gone, storage.data_ptr(), entry)
        return out

    def _gone(self, address: int, entry: list[int]) -> None:
        entry[1] -= 1
        if entry[1] == 0:
            self.now -= entry[0]
            if self._storages.get(address) is entry:
                del self._storages[address]


def build() -> nn.Module:
    torch.manual_seed(0)
    return jittered(nn.Sequential(nn.Conv2d(4, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, 4, 3), nn.Flatten()), 0.1)


METHODS: dict[str, Any] = {
    "per_example": (EKFAC, {"scaling": "per_example"}),
    "running": (EKFAC, {"scaling": "running"}),
    "SUA": (EKFAC, {"scaling": "per_example", "sua": True}),
    "KFAC": (KFAC, {}),
}


def peak(method: str | None, limit: int) -> int:
    """Most bytes alive at once in two steps on 32 pictures of 10 x 10, the first of which renews the basis."""
    model = build()
    steps = batches_for(model, (4, 10, 10), n=32, steps=2)
    opt: Any = None
    if method is not None:
        kind, own = METHODS[method]
        opt = kind(model, memory_limit=limit, **COMMON, **own)
    with LiveBytes() as live:
        for (batch,) in steps:
            model.zero_grad()
            loss = LOSSES["mean"](model, batch)
            loss.backward()
            if opt is not None:
                opt.step()
            del loss
    return live.peak


@pytest.mark.parametrize("method", METHODS)
def test_peak_memory_stays_under_the_limit(method: str) -> None:
    """Beyond what plain training takes and the optimizer's state, everything fits into the limit."""
    limit = 400_000  # one batch's receptive fields alone are 32 x 64 x 109 x 8 = 1.8 MB and 32 x 100 x 37 x 8 = 0.9 MB
    bare = peak(None, limit)
    model = build()
    kind, own = METHODS[method]
    opt = kind(model, **COMMON, **own)
    ((batch,),) = batches_for(model, (4, 10, 10), n=2, steps=1)
    LOSSES["mean"](model, batch).backward()
    opt.step()
    state = sum(v.nbytes for s in opt.state.values() for v in s.values() if isinstance(v, Tensor))
    # The state exists, and what replaces it is made beside it.
    allowed = bare + 2 * state + limit
    assert peak(method, limit) <= allowed
    assert peak(method, 10**9) > allowed, "the problem is too small for the limit to matter"


@pytest.mark.parametrize("limit", [1, 3000, 10**9])
@pytest.mark.parametrize(
    ("method", "sharing"), [(m, s) for m in METHODS for s in ("expand", "reduce") if (m, s) != ("SUA", "reduce")]
)
def test_the_limit_changes_no_number(method: str, limit: int, sharing: str) -> None:
    kind, own = METHODS[method]
    options = {**COMMON, **own, "sharing": sharing}
    ends = []
    for given in ({}, {"memory_limit": limit}):
        torch.manual_seed(1)
        model = jittered(nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten()), 0.1)
        opt = kind(model, **options, **given)
        # More examples than columns: inside a null eigenvalue a basis would depend on rounding.
        for (batch,) in batches_for(model, (2, 4, 5), n=30, steps=4):
            opt.zero_grad()
            LOSSES["mean"](model, batch).backward()
            opt.step()
        ends.append(parameters_of(model))
    assert_same_weights(*ends, 1e-10)


def test_chunked_statistics_against_the_oracle() -> None:
    model = build()
    opt, oracle = make_pair(model, LOSSES["mean"], **COMMON, scaling="per_example")
    opt.close()
    opt = EKFAC(model, scaling="per_example", memory_limit=5000, **COMMON)
    for micro_batches in batches_for(model, (4, 4, 4), n=5, steps=3):
        opt.zero_grad()
        backward(model, LOSSES["mean"], micro_batches)
        opt.step()
        assert_same_weights(parameters_of(model), oracle.step(micro_batches, bases=bases_of(opt, model)), 1e-9)


KEPT: dict[str, Any] = {
    "default": (ekfac.EKFAC, {"refresh_every": 2}),
    **METHODS,
    "adam": (EKFAC, {"scaling": "adam"}),
    "KFAC, SUA": (KFAC, {"sua": True}),
}


@pytest.mark.parametrize("method", KEPT)
def test_state_is_what_the_summary_says_and_within_its_bound(method: str) -> None:
    """2 (in^2 + out^2) + 2 in out numbers a layer, and counts; a SUA bias has a matrix of its own in KFAC."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3), nn.Flatten(), nn.Linear(20 * 4, 30), nn.Tanh(), nn.Linear(30, 7)
    ).double()
    kind, own = KEPT[method]
    opt = kind(model, **own)
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(8, 3, 4, 4, dtype=torch.float64)).square().sum(1).mean().backward()
        opt.step()
    said = {row.name: row for row in opt.summary().rows}
    for block in opt.engine.partition.blocks:
        tensors = [t for t in opt.state[block.key].values() if isinstance(t, Tensor)]
        found = sum(t.nbytes for t in tensors)
        assert 0 <= found - said[block.name].bytes <= 8 * 10, "counts and sums of products alone are not in the table"
        A, B = block.factor_numbers()
        spare = block.shape.inputs + block.shape.out + 10
        assert found / 8 <= 2 * (A + B) + 2 * block.shape.numel + spare
