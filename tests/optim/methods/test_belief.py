"""The default rule: equal to the oracle's, bounded whatever the gradients are, and as fast as AdamW from zeros."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from helpers import (
    LOSSES,
    Batch,
    assert_same_weights,
    batches_for,
    compare_with_oracle,
    jittered,
    mean_loss,
    mlp,
    parameters_of,
)

#: The rule's own settings as the oracle is told them; with this eps rounding in a zero gradient stays rounding.
BELIEF: dict[str, Any] = {"scaling": "belief", "betas": (0.95, 0.95), "eps": 1e-5, "lr": 0.01, "weight_decay": 0.0}

NETWORKS = {
    "linear": lambda: (mlp(4, 5, 3), (4,)),
    "convolution": lambda: (
        jittered(nn.Sequential(nn.Conv2d(2, 3, 2, groups=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))),
        (2, 3, 3),
    ),
    "norm": lambda: (jittered(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))), (4,)),
    "no block": lambda: (jittered(nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 2))), (4,)),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_it_is_the_oracles_in_a_basis_that_turns(network: str, refresh_every: int) -> None:
    model, shape = NETWORKS[network]()
    steps = batches_for(model, shape, n=40, steps=8)
    compare_with_oracle(model, mean_loss, steps, tolerance=1e-8, refresh_every=refresh_every, **BELIEF)


@pytest.mark.parametrize(
    "own",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": False},
        {"maximize": True, "lr": 1e-4},
        {"momentum": 0.9, "nesterov": True},
        {"betas": (0.5, 0.99)},
        {"loss_reduction": "sum"},
        {"basis": "identity"},
        {"max_factor_dim": 4},
    ],
    ids=str,
)
def test_it_is_the_oracles_with_every_option_of_the_update(own: dict[str, Any]) -> None:
    model = mlp(4, 5, 3)
    steps = batches_for(model, (4,), n=40, steps=6)
    loss = LOSSES[own.get("loss_reduction", "mean")]
    compare_with_oracle(model, loss, steps, tolerance=1e-8, **{**BELIEF, "refresh_every": 2, **own})


@pytest.mark.parametrize("scale", [1e-7, 1e-25])
def test_it_is_the_oracles_where_gradients_are_faint(scale: float) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * mean_loss(output, target)

    model = mlp(4, 5, 3)
    compare_with_oracle(model, loss, batches_for(model, (4,), n=40, steps=6), tolerance=1e-8, refresh_every=3, **BELIEF)


def test_a_loss_far_smaller_trains_as_well() -> None:
    """eps goes with a block's gradients where these are below 1e-6; with 1e-8 whatever they are, nothing moved here."""
    torch.manual_seed(0)
    x, model = torch.randn(256, 4), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    y, twin = x[:, :1] * x[:, 1:2], copy.deepcopy(model)
    ends = []
    for network, scale in ((model, 1.0), (twin, 1e-12)):
        opt = ekfac.EKFAC(network)
        for _ in range(100):
            opt.zero_grad()
            (scale * (network(x) - y).square().mean()).backward()
            opt.step()
        ends.append(float((network(x) - y).square().mean()))
    assert max(ends) < 0.2 < float(y.square().mean())


@pytest.mark.parametrize("size", [30.0, 1e6])
def test_a_spike_is_shortened_as_the_oracle_shortens_it(size: float) -> None:
    model = mlp(4, 5, 3)
    steps = batches_for(model, (4,), n=40, steps=8)
    ((x, y),) = steps[5]
    steps[5] = [(x, y * size)]
    compare_with_oracle(model, mean_loss, steps, tolerance=1e-8, refresh_every=4, **BELIEF)


def test_the_second_moment_is_of_the_clipped_gradients_that_m_averages() -> None:
    def halved(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: g / 2 for name, g in gradients.items()}

    model = mlp(4, 5, 3)
    steps = batches_for(model, (4,), n=40, steps=6)
    compare_with_oracle(model, mean_loss, steps, tolerance=1e-8, transform=halved, refresh_every=3, **BELIEF)


def test_gradients_that_are_always_clipped_take_the_steps_of_gradients_that_are_not() -> None:
    found = []
    for factor in (1.0, 2.0**-10):
        torch.manual_seed(0)
        model = mlp(4, 5, 3)
        opt = ekfac.EKFAC(model, **{**BELIEF, "eps": 1e-30})
        for (batch,) in batches_for(model, (4,), n=40, steps=6):
            opt.zero_grad()
            mean_loss(model, batch).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(factor)
            opt.step()
        found.append(parameters_of(model))
    assert_same_weights(*found, 1e-9)


def test_nothing_set_is_the_oracles_with_the_built_in_course_and_decay() -> None:
    """With ``deterministic``: the oracle knows no other schedule of refreshes than Algorithm 1's.

    And without the average of the weights, of which step_size/test_averaging.py tells.
    """
    model = mlp(4, 5, 3)
    steps = batches_for(model, (4,), n=40, steps=12)
    compare_with_oracle(
        model, mean_loss, steps, tolerance=1e-8, oracle_options={
            "lr": lambda t: 0.02 * min(1, (t + 1) / 10) / math.sqrt(1 + t / 100), "weight_decay": 0.3,
            "decay_vectors": False, "cautious_decay": True, "betas": (0.95, 0.95),
        }, scaling="belief", eps=1e-5, lr=None, weight_decay=None, anneal="auto", refresh_every=5, average=False,
    )  # fmt: skip


@given(
    scales=st.lists(st.sampled_from([0.0, 1e-30, 1e-12, 1e-3, 1.0, 1e3, 1e12]), min_size=6, max_size=6),
    seed=st.integers(0, 9),
)
def test_the_mean_square_of_a_direction_is_never_above_one(scales: list[float], seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    pre = ekfac.Preconditioner(model)
    for scale in scales:
        model.zero_grad()
        (scale * model(torch.randn(9, 5)).square().sum(1).mean()).backward()
        pre.step()
        for layer in (model[0], model[2]):
            direction = torch.cat([p.grad.reshape(-1) for p in layer.parameters()])
            assert bool(torch.isfinite(direction).all())
            assert float(direction.square().mean()) <= 1 + 1e-5


@pytest.mark.over_a_second
def test_where_gradients_agree_steps_are_longer_than_adams_and_where_they_do_not_they_are_adams() -> None:
    """On one coordinate: a gradient that stays gives 1 / sqrt(kappa), cut to 1; noise gives about what Adam does."""
    torch.manual_seed(0)
    quiet, noisy = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    rule = ekfac.rules.Belief(cautious=False)
    pre = [ekfac.Preconditioner(m, basis="identity", scaling=rule) for m in (quiet, noisy)]
    adam = ekfac.Preconditioner(copy.deepcopy(noisy), basis="identity", scaling="adam", betas=(0.95, 0.95))
    sizes, plain = [], []
    for _ in range(400):
        for model, p, factor in ((quiet, pre[0], 1.0), (noisy, pre[1], float(torch.randn(())))):
            model.zero_grad()
            (factor * model(torch.ones(4, 1).double())).mean().backward()
            if model is noisy:
                adam.model.zero_grad()
                (factor * adam.model(torch.ones(4, 1).double())).mean().backward()
                adam.step()
            p.step()
        assert float(quiet.weight.grad) == pytest.approx(1.0)
        sizes.append(float(noisy.weight.grad) ** 2)
        plain.append(float(adam.model.weight.grad) ** 2)
    assert sum(sizes[100:]) == pytest.approx(sum(plain[100:]), rel=0.25)


def test_coordinates_wait_where_the_gradient_points_back_and_the_direction_stays_as_long() -> None:
    """On eight coordinates without a basis: in two of them the gradient turns round against the mean."""
    model = nn.Linear(8, 1, bias=False).double()
    x = torch.tensor([[1.0, -1.0, 2.0, 0.5, 1.0, -3.0, 1.0, 1.0]], dtype=torch.float64)
    pre = [
        ekfac.Preconditioner(m, basis="identity", scaling=ekfac.rules.Belief(cautious=cautious))
        for m, cautious in ((model, True), (copy.deepcopy(model), False))
    ]
    for t in range(12):
        now = x.clone()
        now[0, :2] *= -1 if t == 11 else 1
        now += 0.3 * torch.randn(1, 8, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        for p in pre:
            p.model.zero_grad()
            p.model(now).mean().backward()
            p.step()
    cautious, plain = (p.model.weight.grad for p in pre)
    assert cautious[0, :2].tolist() == [0.0, 0.0] and bool((plain[0, :2] != 0).all())
    ratio = cautious[0, 2:] / plain[0, 2:]
    assert float(ratio.max() - ratio.min()) < 1e-9 and float(ratio[0]) >= 1


class LowRank(nn.Module):
    """A frozen layer with a product of two small ones beside it, one of them zero at the start: LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(20, 10, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(20, 3, bias=False), nn.Linear(3, 10, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


@pytest.mark.parametrize("lr", [0.003, 0.01])
def test_weights_that_start_at_zero_train_as_fast_as_with_adamw(lr: float) -> None:
    torch.manual_seed(0)
    start = LowRank()
    target = start.frozen.weight + 0.3 * torch.randn(10, 3) @ torch.randn(3, 20) / 3

    def steps_to_a_tenth(make: Any) -> int:
        model = copy.deepcopy(start)
        opt, first = make(model), math.inf
        for t in range(300):
            x = torch.randn(64, 20, generator=torch.Generator().manual_seed(t))
            opt.zero_grad()
            loss = (model(x) - x @ target.T).square().sum(1).mean()
            loss.backward()
            opt.step()
            first = min(first, loss.item()) if t == 0 else first
            if loss.item() < first / 10:
                return t
        raise AssertionError("it does not train")

    adamw = steps_to_a_tenth(lambda m: torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0))
    assert steps_to_a_tenth(lambda m: ekfac.EKFAC(m, lr=lr, weight_decay=0.0)) <= 1.1 * adamw


def test_two_batch_sizes_in_turn() -> None:
    """s of the default is of g^2 alone: examples count for nothing but the factors and what stats and curvature say."""
    model = mlp(4, 5, 3)
    large, small = batches_for(model, (4,), n=40, steps=4), batches_for(model, (4,), n=9, steps=4, seed=3)
    steps: list[list[Batch]] = [b for pair in zip(large, small, strict=True) for b in pair]
    opt, _ = compare_with_oracle(model, mean_loss, steps, tolerance=1e-8, refresh_every=1, **BELIEF)
    for p in (model[0].weight, model[2].weight):
        assert float(opt.state[p]["examples"]) == 9


def worst_and_last(seed: int, steps: int = 40, **options: Any) -> tuple[float, float]:
    """Train a small rectifier auto-encoder at a large rate: its worst and last loss, as multiples of the first."""
    torch.manual_seed(seed)
    sizes = [24, 32, 16, 3, 16, 32, 24]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    mix = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    losses = []
    with ekfac.EKFAC(model, lr=0.3, **options) as opt:
        for step in range(steps):
            codes = torch.rand(64, 3, generator=torch.Generator().manual_seed(step))
            x = torch.sigmoid(3 * (codes - 0.5) @ mix)
            opt.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x), x, reduction="none").sum(1).mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return max(losses) / losses[0], losses[-1] / losses[0]


@pytest.mark.over_a_second
def test_an_autoencoder_of_rectifiers_holds_where_restarts_diverge() -> None:
    """s that restarts at KFAC's eigenvalues in every basis is too small where these are off, and one step ends it."""
    held = [worst_and_last(seed) for seed in range(4)]
    assert max(worst for worst, _ in held) < 50 and max(last for _, last in held) < 1.2
    restarted = [worst_and_last(seed, scaling="anchored") for seed in range(4)]
    assert max(worst for worst, _ in restarted) > 1000
