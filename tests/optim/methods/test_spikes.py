"""One number that is far too large, as a fill value is: no rule is thrown out by it, and the default comes back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ekfac
from fuzz.spikes import AFTER, BEFORE, NETWORKS, OPTIMIZERS, TRUTH, batch, losses, spiked

SPIKES = {
    "network": st.sampled_from(sorted(NETWORKS)),
    "size": st.sampled_from([-1e37, 1e6, 1e10, 1e15, 1e19, 1e20, 1e25, 1e30, 1e37, 3.4e38]),
    "place": st.tuples(st.integers(0, 31), st.integers(0, 5)),
}


@pytest.mark.over_a_second
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=2)  # make fuzz makes 576 tries
@given(**SPIKES)
def test_training_goes_on_after_a_spike(optimizer: str, network: str, size: float, place: tuple[int, int]) -> None:
    found, finite = losses(network, optimizer, spiked(size, BEFORE, place), BEFORE + AFTER)
    assert all(finite)
    before = found[BEFORE - 1]
    assert found[-1] <= 5 * before
    if optimizer == "default":
        assert found[BEFORE + 50] <= 1.2 * before, "it has come back"


@pytest.mark.parametrize(("at", "place"), [(48, (20, 4)), (50, (3, 1))])
def test_kfac_bears_a_spike_just_before_and_at_new_inverses(at: int, place: tuple[int, int]) -> None:
    found, _ = losses("relu", "KFAC", spiked(1e9, at, place), at + AFTER)
    assert found[-1] <= 5 * found[at - 1]


@pytest.mark.over_a_second
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=3)
@given(**SPIKES)
def test_a_spike_at_the_start_leaves_nothing_that_is_not_finite(
    optimizer: str, network: str, size: float, place: tuple[int, int]
) -> None:
    found, finite = losses(network, optimizer, spiked(size, 0, place), 12)
    assert all(finite) and all(map(math.isfinite, found))


@pytest.mark.parametrize("optimizer", ["default", "running", "per_example", "KFAC"])
@pytest.mark.parametrize("size", [1e19, 1e37])
def test_a_fill_value_in_every_batch_leaves_nothing_that_is_not_finite(optimizer: str, size: float) -> None:
    torch.manual_seed(0)
    model = NETWORKS["relu"]()
    make, options = OPTIMIZERS[optimizer]
    opt = make(model, **options)
    for t in range(20):
        x, y = batch(t)
        x[t % 32, t % 6] = size
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_target_that_is_far_too_large_is_a_spike_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = ekfac.EKFAC(model)
    found = []
    for t in range(BEFORE + 60):
        x, _ = batch(t)
        y = x @ TRUTH
        if t == BEFORE:
            y[3, 1] = 1e15
        opt.zero_grad()
        (model(x) - y).square().sum(1).mean().backward()
        opt.step()
        with torch.no_grad():
            x, _ = batch(10**6)
            found.append(float((model(x) - x @ TRUTH).square().sum(1).mean()))
    assert found[-1] < found[BEFORE - 1]
