"""How long a step is: pace follows how far gradients agree with the last direction, trust bounds what a layer moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac.optim.methods.rules import products
from ekfac.optim.step_size.lr_fraction import LATE_STEPS, MAX_COSINE, RATE, STEPS, LRFraction, alignment
from ekfac.optim.types import Direction

#: The rule that compares gradients with the last direction, and so can follow a pace.
ANCHORED = {"scaling": "anchored", "lr": 0.01, "anneal": 300.0, "trust": 1.0, "pace": 0.03}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def anchored(model: nn.Module, **options: Any) -> ekfac.EKFAC:
    """The rule that compares gradients, with all that bounds its steps."""
    usual = {"lr": 0.01, "scaling": "anchored", "pace": 0.03, "trust": 1.0, "anneal": 300.0}
    return ekfac.EKFAC(model, **{**usual, **options})


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(20, 6, generator=generator).double(), torch.randint(3, (20,), generator=generator)


def note_products(opt: ekfac.EKFAC) -> dict[str, Tensor]:
    """What each block's alignment was made of in the last step that compared it, by name."""
    found: dict[str, Tensor] = {}
    follow = opt.lr_fraction.follow

    def noting(directions: list[Direction], factors: Tensor | None, ok: Tensor | None) -> None:
        found.clear()
        found.update({d.block.name: d.products for d in directions if d.products is not None})
        follow(directions, factors, ok)

    opt.lr_fraction.follow = noting  # type: ignore[method-assign]
    return found


def take_step(model: nn.Module, opt: torch.optim.Optimizer, seed: int, sign: float = 1.0) -> None:
    x, y = batch(seed)
    opt.zero_grad()
    (sign * nn.functional.cross_entropy(model(x), y)).backward()
    opt.step()


def test_pace_follows_the_mean_alignment_less_and_less() -> None:
    model = network()
    opt = anchored(model, pace=0.05)
    found = note_products(opt)
    expected = 0.05
    for t in range(60):
        assert opt.stats()["pace"] == pytest.approx(expected, rel=1e-12)
        take_step(model, opt, seed=t)
        if t == 0:  # there is no last direction yet; the count begins with the first alignment
            continue
        c = sum(float(alignment(products)) for products in found.values()) / 2
        expected = min(1.0, expected * math.exp(RATE / (1 + ((t - 1) / STEPS) ** 2) * c))


@pytest.mark.parametrize(("signs", "grows"), [((1.0, 1.0), True), ((1.0, -1.0), False)])
def test_pace_grows_while_gradients_agree_and_falls_when_they_point_back(
    signs: tuple[float, float], grows: bool
) -> None:
    model = network()
    opt = anchored(model, lr=1e-6, pace=0.1)
    for t in range(6):
        take_step(model, opt, seed=0, sign=signs[t % 2])
    assert (opt.stats()["pace"] > 0.1) is grows


def test_a_layer_without_a_gradient_has_no_say_in_the_pace() -> None:
    model = network()
    opt = anchored(model, lr=1e-6, pace=0.1)
    for t in range(3):
        take_step(model, opt, seed=t)
    before = opt.stats()["pace"]
    found = note_products(opt)
    x, y = batch(3)
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    model[0].weight.grad = model[0].bias.grad = None
    opt.step()
    assert list(found) == ["2"]
    c = float(alignment(found["2"]))
    rate = RATE / (1 + (2 / STEPS) ** 2)
    assert opt.stats()["pace"] == pytest.approx(before * math.exp(rate * c), rel=1e-12)


def test_a_step_that_is_skipped_leaves_the_pace() -> None:
    model = network()
    opt = anchored(model)
    for t in range(3):
        take_step(model, opt, seed=t)
    before = opt.lr_fraction.save()
    take_step(model, opt, seed=3, sign=math.nan)
    assert opt.stats()["skipped_steps"] == 1 and opt.lr_fraction.save() == before


@pytest.mark.over_a_second
@pytest.mark.rounding
def test_steps_fade_with_gradients_that_have_become_small() -> None:
    """A loss that is multiplied by 1e-3 has the same directions; only the steps along them become shorter, in time."""

    def lengths(factor: float) -> list[float]:
        model = network()
        opt = anchored(model, lr=1e-5, pace=1.0, anneal=None, trust=None)
        compared = note_products(opt)
        found, late, long = [], 0.0, 0.0
        for t in range(160):
            before = [p.detach().clone() for p in model.parameters()]
            take_step(model, opt, seed=t, sign=factor if t >= 130 else 1.0)
            moved = (p.detach() - q for p, q in zip(model.parameters(), before, strict=True))
            found.append(math.sqrt(sum(float(change.square().sum()) for change in moved)))
            if t == 0:
                continue
            sizes = [math.log(float(products[1, 1])) for products in compared.values()]
            size = math.exp(sum(sizes) / len(sizes))
            weight = max(1 / LATE_STEPS, 1 / t)
            late += weight * (size - late)
            long += min(weight, 4 / t) * (size - long)
            assert opt.lr_fraction.save()[2:] == pytest.approx([late, long], rel=1e-9)
        return found

    plain, small = lengths(1.0), lengths(1e-3)
    assert small[:130] == pytest.approx(plain[:130], rel=1e-9)
    assert small[159] < 0.7 * plain[159]


def test_gradients_that_grow_or_vanish_do_not_lengthen_a_step() -> None:
    model = network()
    opt = anchored(model, lr=1e-5, pace=1.0, anneal=None)
    for t, factor in enumerate((1.0, 1.0, 1e6, 0.0, 0.0, 1.0)):
        take_step(model, opt, seed=t, sign=factor)
        rate = opt.lr_fraction.take([], None)
        assert rate == opt.stats()["pace"] <= 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_checkpoint_from_before_steps_could_fade_is_taken() -> None:
    pace = LRFraction(0.1)
    pace.load([0.5, 20.0], torch.device("cpu"))
    assert pace.save() == [0.5, 20.0, 0.0, 0.0]


def test_stats_tell_the_pace_before_the_first_step() -> None:
    assert anchored(network(), pace=0.2).stats()["pace"] == 0.2
    assert anchored(network(), pace=None).stats()["pace"] == 1.0
    assert ekfac.EKFAC(network(), scaling="running", pace=0.2).stats()["pace"] == 1.0, "that rule has no alignment"


def test_trust_holds_where_the_parameters_of_a_layer_have_learning_rates_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    groups = [{"params": [model.weight], "lr": 1e-9}, {"params": [model.bias], "lr": 10.0}]
    opt = anchored(model, params=groups, trust=0.1, pace=None)
    before = torch.cat([p.detach().clone().reshape(-1) for p in (model.weight, model.bias)])
    take_step(model, opt, seed=0)
    after = torch.cat([p.detach().reshape(-1) for p in (model.weight, model.bias)])
    assert float((after - before).norm()) == pytest.approx(0.1 * float(before.norm()), rel=1e-6)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_may_be_a_tensor_of_one_number(shape: tuple[int, ...]) -> None:
    weights = []
    for lr in (0.01, torch.full(shape, 0.01, dtype=torch.float64)):
        model = network()
        groups = [{"params": list(model[0].parameters()), "lr": lr}, {"params": list(model[2].parameters())}]
        opt = anchored(model, params=groups)
        for t in range(3):
            take_step(model, opt, seed=t)
        weights.append(model[0].weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-14)


def test_late_in_training_trust_takes_little_from_the_pace() -> None:
    paces = []
    for late in (False, True):
        model = network()
        opt = anchored(model, lr=1e-6, anneal=None)
        for t in range(4):
            take_step(model, opt, seed=t)
        opt.lr_fraction.load([0.5, 1000.0 if late else 10.0], torch.device("cpu"))
        opt.param_groups[0]["lr"] = 1e3  # one step that trust cuts to next to nothing
        take_step(model, opt, seed=5)
        paces.append(opt.stats()["pace"])
    early, late_pace = paces
    assert early < 0.05
    assert 0.45 < late_pace < 0.55


@pytest.mark.rounding
@pytest.mark.parametrize("bounded", ["both", "one", "still"])
def test_the_pace_does_not_wind_up_while_trust_bounds_all_steps(monkeypatch: pytest.MonkeyPatch, bounded: str) -> None:
    def pace(lr: float) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        groups = [{"params": list(model[0].parameters()), "lr": {"both": lr, "one": 1e-12, "still": 0.0}[bounded]}]
        groups += [{"params": list(model[2].parameters()), "lr": lr}]
        opt = anchored(model, params=groups, anneal=None, trust=1e-3)
        for _ in range(6):  # gradients of one batch, which steps this short leave parallel
            take_step(model, opt, seed=0)
        return opt.stats()["pace"]

    found = pace(0.1), pace(1.0)
    follow = LRFraction.follow
    monkeypatch.setattr(LRFraction, "follow", lambda self, directions, factors, ok: follow(self, directions, None, ok))
    wound = pace(0.1), pace(1.0)
    assert wound == (1.0, 1.0)
    if bounded == "one":
        # Half the blocks take steps as long as the pace says, and it grows for these.
        assert found[0] > 0.3 and found[1] == pytest.approx(found[0], rel=1e-9)
    else:
        assert found[0] < 0.1
        assert found[1] == pytest.approx(found[0] / 10, rel=0.1)


def aligned(g: torch.Tensor, m: torch.Tensor, root: torch.Tensor) -> float:
    return float(alignment(products(g, m, root)))


def test_alignment_is_the_whitened_cosine_and_more_where_gradients_are_parallel() -> None:
    g, m = torch.tensor([3.0, 4.0]).double(), torch.tensor([4.0, -3.0]).double()
    root = torch.tensor([1.0, 1.01]).double()
    whitened = (12 - 12 / 1.0201) / math.sqrt((9 + 16 / 1.0201) * (16 + 9 / 1.0201))
    assert 0 < whitened < MAX_COSINE
    assert aligned(g, m, root) == pytest.approx(whitened)  # cos(g, m) = 0
    assert aligned(g, -m, root) == pytest.approx(-whitened)
    assert aligned(g, 2 * g, root) == pytest.approx(MAX_COSINE + 0.5)
    assert aligned(g, -g, root) == pytest.approx(-MAX_COSINE)
    assert aligned(g, torch.zeros_like(g), root) == 0.0


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_alignment_does_not_depend_on_the_size_of_gradients(size: float) -> None:
    g, m = size * torch.tensor([3.0, 4.0]), size * torch.tensor([4.0, 4.0])
    assert aligned(g, m, torch.ones(2)) == pytest.approx(MAX_COSINE + 0.98995 - 0.5, rel=1e-4)
