"""Whole networks: the curvature of every layer against per-example gradients, and training that works."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle import per_example_gradients
from paper import EKFAC, Preconditioner
from zoo import PROBLEMS

MODELS = ("gpt", "vit", "mobilenet", "unet", "resnet")
#: What the mean loss of the last 20 of 200 steps has to be below, as a share of the first loss.
LEARNT = {"gpt": 0.6, "vit": 0.4, "mobilenet": 0.1, "unet": 0.2, "resnet": 0.1}


def train(
    model: nn.Module, name: str, opt: torch.optim.Optimizer, steps: int, size: int, one_batch: bool = False
) -> list[float]:
    problem = PROBLEMS[name]
    batches = problem.batches(size, 0)
    if one_batch:
        batches = itertools.repeat(next(batches))
    losses = []
    for (x, y), _ in zip(batches, range(steps), strict=False):
        opt.zero_grad()
        loss = problem.loss(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def assert_all_moved(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        assert bool(torch.isfinite(p).all()), f"{name} is not finite"
        assert not torch.equal(p, before[name]), f"{name} did not move"


@pytest.mark.parametrize("name", MODELS)
def test_every_second_moment_is_that_of_the_per_example_gradients(name: str) -> None:
    """s* of every block, tied and grouped and transposed ones too, and the direction that follows from it."""
    problem = PROBLEMS[name]
    model = problem.build().double()
    x, y = next(problem.batches(5, 3))
    x = x.double() if x.is_floating_point() else x
    y = y.double() if y.is_floating_point() else y
    with torch.no_grad():
        for _ in range(3):
            model(x)  # running statistics of batch-norm that are not the special first ones
    model.eval()  # where no example meets another
    gradients = per_example_gradients(copy.deepcopy(model), problem.loss, x, y)
    epsilon = 1e-3
    pre = Preconditioner(model, scaling="per_example", refresh_every=1, factor_decay=0.0, damping=epsilon)
    problem.loss(model(x), y).backward()
    mean = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for parameter, g in gradients.items():
        torch.testing.assert_close(g.mean(0), mean[parameter], rtol=1e-8, atol=1e-12)
    assert pre.step()
    for block in pre.engine.partition.blocks:
        names = list(block.parameter_names.values())
        G = block.stack([mean[n] for n in names])
        if not block.covered:
            expected = G.square() * len(x)  # the diagonal method, started at N g^2
            direction = G / (expected + epsilon)
            torch.testing.assert_close(pre.state[block.key]["s"], expected, rtol=1e-8, atol=1e-16)
        else:
            basis = pre.engine.method.basis(block, pre.state[block.key])
            assert basis is not None
            each = [basis.project(block.stack([gradients[n][i] for n in names])) for i in range(len(x))]
            expected = torch.stack(each).square().mean(0)
            size = float(expected.max())
            torch.testing.assert_close(pre.state[block.key]["s"], expected, rtol=1e-7, atol=1e-11 * size)
            direction = basis.unproject(basis.project(G) / (expected + epsilon))
        for n, step in zip(names, block.unstack(direction), strict=True):
            got = dict(model.named_parameters())[n].grad
            torch.testing.assert_close(got, step, rtol=1e-6, atol=1e-9 * float(step.abs().max()), msg=n)


@pytest.mark.rounding
@pytest.mark.parametrize("scaling", ["running", "per_example"])
@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_move_every_parameter(name: str, scaling: str) -> None:
    model = PROBLEMS[name].build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = EKFAC(model, lr=0.03, scaling=scaling, damping=1e-2, kl_clip=0.01, refresh_every=4)
    losses = train(model, name, opt, steps=8, size=16, one_batch=True)
    assert_all_moved(model, before)
    # Of one batch: losses of sixteen examples each differ by more than eight steps change them. The first step lowers
    # it by 11 to 42 %, of three seeds; the steps after it amplify rounding, so that only their best is asked for.
    assert losses[1] < 0.95 * losses[0]
    assert min(losses[-4:]) < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_hundred_steps_train(name: str) -> None:
    model = PROBLEMS[name].build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = EKFAC(model, lr=0.01, kl_clip=0.01, refresh_every=10)
    losses = train(model, name, opt, steps=200, size=64)
    assert_all_moved(model, before)
    assert sum(losses[-20:]) / 20 < LEARNT[name] * losses[0]


def test_summary_says_which_layers_share_a_weight() -> None:
    rows = {row.name: row for row in EKFAC(PROBLEMS["gpt"].build()).summary().rows}
    assert "tokens" not in rows
    assert "shared with tokens" in rows["head"].block


class Recurrent(nn.Module):
    """Layers that no hook can see into, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Parameter(torch.randn(8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        return self.attention(h, h, h)[0][:, -1] @ self.out


@pytest.mark.parametrize("exclude", [(), "*"])
@pytest.mark.rounding
@pytest.mark.parametrize("scaling", ["running", "per_example", "kronecker"])
def test_layers_that_no_hook_can_see_into_train_by_their_blocks_and_without_any(scaling: str, exclude: Any) -> None:
    model = Recurrent()
    opt = EKFAC(model, lr=0.03 if exclude else 0.01, scaling=scaling, damping=1e-3, kl_clip=0.01, exclude=exclude)
    assert {row.block == "diagonal" for row in opt.summary().rows} == ({True} if exclude else {True, False})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x = torch.randn(64, 5, 3)
    y = x.sum((1, 2)).tanh()
    losses = []
    for _ in range(40):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    # The key's bias shifts all scores of a query alike, so its gradient is zero but for rounding.
    assert_all_moved(model, before)
    # Fixed settings of the paper's rules are not made for these blocks: that they train at all is what is asked.
    assert losses[-1] < 0.5 * losses[0] if exclude else min(losses) < losses[0]
