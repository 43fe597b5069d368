"""With nothing set the model shows the average of its weights, and trains at the weights themselves."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac import StepSize


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return layers.double()


def batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(16, 6, generator=chance, dtype=torch.float64), torch.randint(3, (16,), generator=chance))
        for _ in range(steps)
    ]


def train(model: nn.Module, opt: ekfac.EKFAC, batch: tuple[Tensor, Tensor]) -> float:
    opt.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    opt.step()
    return loss.item()


def shown(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-7) -> bool:
    """Tell whether they are equal, but for rounding along a softmax's ones, where a step has nothing to say."""
    return a.keys() == b.keys() and all(bool((a[n] - b[n]).abs().max() <= tolerance) for n in a)


@pytest.mark.rounding
def test_the_model_shows_the_average_of_the_weights_that_it_would_have() -> None:
    model = network()
    twin = copy.deepcopy(model)
    # Without decay, which rounding decides where a step has nothing to say, as along a softmax's ones.
    opt = ekfac.EKFAC(model, weight_decay=0.0)
    plain = ekfac.EKFAC(twin, weight_decay=0.0, step_size=StepSize(average=False))
    expected: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    for t, batch in enumerate(batches(30)):
        assert train(model, opt, batch) == pytest.approx(train(twin, plain, batch), abs=1e-9)
        c, z = 9 / (t + 9), shown(twin)
        # Of running statistics the average takes in what the batch had.
        new = {n: before[n] + (z[n] - before[n]) / 0.1 if t and "running" in n else z[n] for n in z}
        expected = {n: z[n] if t == 0 else expected[n] + c * (new[n] - expected[n]) for n in z}
        before = z
        assert close(shown(model), expected, 1e-8)
    assert not close(shown(model), shown(twin), 1e-4)


@pytest.mark.filterwarnings("ignore:.*not only the gradient that passed")
@pytest.mark.parametrize("function", [torch.abs, torch.square])
def test_a_penalty_may_be_computed_before_the_forward(function: Callable[[Tensor], Tensor]) -> None:
    """It is then made of x; its gradient, which reads the weights again, is that of z, the weights that are trained."""
    ends = []
    for average in (True, False):
        model = network()
        opt = ekfac.EKFAC(model, weight_decay=0.0, step_size=StepSize(average=average))
        for x, y in batches(12):
            opt.zero_grad()
            penalty = sum(function(p).sum() for p in model.parameters())
            (0.01 * penalty + F.cross_entropy(model(x), y)).backward()
            opt.step()
        if average:
            opt.average.before_forward()  # shows z
        ends.append(shown(model))
    for name in ("0.weight", "0.bias", "1.weight", "3.weight", "3.bias"):
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-7, atol=1e-7)


class Norms(nn.Module):
    """Calls one norm twice in a forward, another once, a third without momentum, a fourth never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.twice, self.once = nn.BatchNorm1d(8, momentum=0.3), nn.BatchNorm1d(8)
        self.mean, self.never = nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8)
        self.inputs: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name in ("twice", "twice", "once", "mean"):
            self.inputs.setdefault(name, []).append(x.detach())
            x = torch.tanh(getattr(self, name)(x) + x)
        return self.last(x)


@pytest.mark.parametrize("forwards", [1, 2])
def test_running_statistics_of_the_average_are_those_of_batches(forwards: int) -> None:
    torch.manual_seed(0)
    model = Norms().double()
    opt = ekfac.EKFAC(model)
    expected: dict[str, Tensor] = {}
    given = iter(batches(8 * forwards))
    for t in range(8):
        opt.zero_grad()
        model.inputs.clear()
        for _ in range(forwards):
            x, y = next(given)
            F.cross_entropy(model(x), y).backward()
        opt.step()
        for name, momentum in (("twice", 0.3), ("once", 0.1)):
            seen = [(h.mean(0), h.var(0)) for h in model.inputs[name]]
            weights = [momentum * (1 - momentum) ** k for k in reversed(range(len(seen)))]
            means = [sum(w * s[i] for w, s in zip(weights, seen, strict=True)) / sum(weights) for i in (0, 1)]
            for statistic, new in zip(("running_mean", "running_var"), means, strict=True):
                there = getattr(getattr(model, name), statistic)
                key = f"{name}.{statistic}"
                expected[key] = there.clone() if t == 0 else expected[key] + 9 / (t + 9) * (new - expected[key])
                torch.testing.assert_close(there, expected[key], rtol=1e-7, atol=1e-7)
    assert torch.equal(model.never.running_var, torch.ones(8, dtype=torch.float64))
    assert bool(model.mean.running_var.isfinite().all())


def test_a_network_with_batch_norm_is_right_in_evaluation_after_few_steps() -> None:
    """The running statistics that it shows are as good as new ones: not those of other weights, nor of the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64),
                          nn.ReLU(), nn.Linear(64, 3)).double()  # fmt: skip
    teacher = torch.randn(6, 3, dtype=torch.float64)
    opt, x = ekfac.EKFAC(model), 5 + 20 * torch.randn(512, 6, dtype=torch.float64)
    y = (x @ teacher).argmax(1)
    for t in range(12):
        at = torch.randperm(512, generator=torch.Generator().manual_seed(t))[:64]
        train(model, opt, (x[at], y[at]))
    model.eval()
    found = F.cross_entropy(model(x), y).item()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
            module.momentum = 1.0
    model.train()
    with torch.no_grad():
        model(x)
    model.eval()
    assert found < 1.3 * F.cross_entropy(model(x), y).item()


def test_evaluation_sees_the_average_and_training_does_not() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(20):
        train(model, opt, batch)
    x, before = batches(1)[0][0], shown(model)
    model.eval()
    with torch.no_grad():
        model(x)
    model(x)  # and where no_grad is forgotten
    assert close(shown(model), before, 0.0)
    model.train()
    model(x)
    assert not close(shown(model), before, 1e-6)


def test_a_known_end_alone_averages_as_nothing_set_does() -> None:
    models = [network() for _ in range(2)]
    optimizers = [ekfac.EKFAC(models[0]), ekfac.EKFAC(models[1], total_steps=100)]
    for batch in batches(20):
        for model, opt in zip(models, optimizers, strict=True):
            train(model, opt, batch)
    assert optimizers[1].average.offsets
    assert close(shown(models[0]), shown(models[1]), 0.0)


def test_a_rate_of_ones_own_or_a_scheduler_averages_nothing() -> None:
    def last(**options: object) -> tuple[nn.Module, ekfac.EKFAC]:
        model = network()
        return model, ekfac.EKFAC(model, **options)  # type: ignore[arg-type]

    for options in ({"lr": 0.01}, {"lr": 0.01, "total_steps": 12}, {"scaling": "running", "total_steps": 12}):
        model, opt = last(**options)
        twin = copy.deepcopy(model)
        off = ekfac.EKFAC(twin, step_size=StepSize(average=False), **options)  # type: ignore[arg-type]
        for batch in batches(12):
            train(model, opt, batch)
            train(twin, off, batch)
        assert close(shown(model), shown(twin), 0.0)
    model, opt = last()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
    for batch in batches(12):
        train(model, opt, batch)
        scheduler.step()
    assert not opt.average.offsets


def test_a_scheduler_that_comes_later_goes_on_from_the_weights() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(20):
        train(model, opt, batch)
    model(batches(1)[0][0])
    at_training = {n: p.detach().clone() for n, p in model.named_parameters()}
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.0)
    train(model, opt, batches(1)[0])
    scheduler.step()
    assert all(torch.allclose(p, at_training[n], atol=1e-12) for n, p in model.named_parameters())


def test_a_checkpoint_goes_on_exactly() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    steps = batches(24)
    for batch in steps[:12]:
        train(model, opt, batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = network()
    twin.load_state_dict(saved["model"])
    other = ekfac.EKFAC(twin)
    other.load_state_dict(saved["opt"])
    for batch in steps[12:]:
        assert train(model, opt, batch) == train(twin, other, batch)
    assert close(shown(model), shown(twin), 0.0)


def test_a_known_end_goes_on_from_a_checkpoint_without_an_average() -> None:
    """As versions wrote it in which a known end had a cosine and no average."""
    model = network()
    before = ekfac.EKFAC(model, total_steps=30, step_size=StepSize(decay_steps=None))
    for batch in batches(12):
        train(model, before, batch)
    opt = ekfac.EKFAC(model, total_steps=30)
    opt.load_state_dict(before.state_dict())
    before.close()
    at = shown(model)
    train(model, opt, batches(13)[-1])
    assert opt.average.offsets and opt.average.included.weight == 9 / (12 + 9)
    assert not close(shown(model), at)


@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_from_amid_a_pass_shows_the_same_when_all_rest(copied: bool) -> None:
    """As one that is saved between the batches of an accumulation: parameters and statistics are those of z."""
    model = network()
    opt = ekfac.EKFAC(model)
    *before, (x, y), (other_x, other_y) = batches(14)
    for batch in before:
        train(model, opt, batch)
    at_rest = shown(model)
    F.cross_entropy(model(x), y).backward()
    assert not close(shown(model), at_rest, 1e-3)
    if copied:
        other = copy.deepcopy(opt)
        twin = other.model
    else:
        twin = network()
        other = ekfac.EKFAC(twin)
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    F.cross_entropy(twin(other_x), other_y).backward()
    other.close()
    assert close(shown(twin), at_rest)
    opt.close()
    assert close(shown(model), at_rest)


@pytest.mark.parametrize(
    "damage", ["name", "shape", "nan", "huge", "flag", "kind", "offsets", "statistics", "resting", "mended"]
)
def test_a_damaged_average_is_refused_and_nothing_changes(damage: str) -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(4):
        train(model, opt, batch)
    state = copy.deepcopy(opt.state_dict())
    average = state["ekfac"]["average"]
    if damage == "name":
        average["offsets"]["other"] = average["offsets"].pop("0.weight")
    elif damage == "shape":
        average["offsets"]["0.weight"] = torch.zeros(2, dtype=torch.float64)
    elif damage == "nan":
        average["statistics"]["1.running_mean"].fill_(torch.nan)
    elif damage == "huge":
        average["offsets"]["0.weight"][0, 0] = 1e150
    elif damage == "flag":
        average["training"] = "yes"
    elif damage in average:
        average[damage] = [1]
    else:
        state["ekfac"]["average"] = [1]
    before, offsets = shown(model), {p: d.clone() for p, d in opt.average.offsets.items()}
    with pytest.raises(ValueError, match=r"'average'.*Nothing was loaded"):
        opt.load_state_dict(state)
    assert close(shown(model), before, 0.0)
    assert all(torch.equal(d, offsets[p]) for p, d in opt.average.offsets.items())


def test_a_step_that_is_skipped_changes_nothing() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(8):
        train(model, opt, batch)
    before = shown(model)
    x, y = batches(1)[0]
    model[1].eval()  # batch-norm would take NaN into its running statistics, as it does with any optimizer
    train(model, opt, (x * torch.nan, y))
    assert close(shown(model), before, 1e-12)


def test_what_somebody_does_to_the_weights_between_steps_stays() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(8):
        train(model, opt, batch)
    with torch.no_grad():
        model[0].weight.zero_()
    weight_decay_and_rate = opt.param_groups[0]["lr"]
    train(model, opt, batches(1)[0])
    assert float(model[0].weight.abs().max()) < 20 * weight_decay_and_rate


def clamp(weight: Tensor) -> None:
    weight.data.clamp_(min=0)


def mask(weight: Tensor) -> None:
    weight.data *= torch.ones_like(weight).tril()


def normalise(weight: Tensor) -> None:
    weight.copy_(F.normalize(weight, dim=1))


@pytest.mark.parametrize("mend", [clamp, mask, normalise])
@pytest.mark.parametrize("begin", [0, 25])
def test_weights_that_somebody_mends_after_every_step_are_trained_as_they_were_mended(
    mend: Callable[[Tensor], None], begin: int
) -> None:
    """Not clamped, masked or normalised in the average alone, with gradients computed at weights that are not."""
    model = network()
    opt = ekfac.EKFAC(model)
    for t, batch in enumerate(batches(40)):
        if t >= begin + 13:
            model(batch[0])  # shows what is trained
            mended = model[0].weight.detach().clone()
            with torch.no_grad():
                mend(mended)
            torch.testing.assert_close(model[0].weight.detach(), mended, rtol=0, atol=1e-12)
        train(model, opt, batch)
        if t >= begin:
            with torch.no_grad():
                mend(model[0].weight)
    assert not opt.average.offsets
    twin = network()
    twin.load_state_dict(model.state_dict())
    other = ekfac.EKFAC(twin)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(twin, other, batches(1)[0])
    assert not other.average.offsets


@pytest.mark.parametrize(("every", "begin"), [(2, 0), (5, 0), (10, 0), (2, 41), (5, 41), (7, 41), (10, 41)])
def test_weights_that_somebody_changes_every_few_steps_are_trained_on_from_there(every: int, begin: int) -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for t, batch in enumerate(batches(25 if begin == 0 else 100)):
        train(model, opt, batch)
        if t % every == 1 and t >= begin:
            weight, averaged = model[0].weight, bool(opt.average.offsets)
            weight.data.clamp_(-0.1, 0.1)
            clamped = weight.detach().clone()
            model(batch[0])
            if not (averaged and opt.average.offsets):  # those that are trained are clamped too
                assert torch.equal(weight, clamped)
    assert not opt.average.offsets


def test_weights_that_are_clamped_from_the_first_step_on_are_trained_so_at_once() -> None:
    model, twin = network(), network()
    opt, plain = ekfac.EKFAC(model), ekfac.EKFAC(twin, step_size=StepSize(average=False))
    for t, batch in enumerate(batches(5)):
        for one, its in ((model, opt), (twin, plain)):
            train(one, its, batch)
            one[0].weight.data.clamp_(-0.1, 0.1)
        assert bool(opt.average.offsets) == (t < 2)
    assert (model[0].weight - twin[0].weight).abs().max() < plain.param_groups[0]["lr"]


def test_weights_that_are_exchanged_for_evaluation_or_loaded_once_are_averaged_all_the_same() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    best = copy.deepcopy(model.state_dict())
    for t, batch in enumerate(batches(25)):
        train(model, opt, batch)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(best)
        if t != 4:
            model.load_state_dict(kept)
    assert opt.average.offsets.keys() == set(model.parameters())


def test_a_training_that_is_loaded_is_not_taken_for_weights_that_somebody_changes() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    saved = None
    for batch in batches(16):
        train(model, opt, batch)
        saved = saved or copy.deepcopy((model.state_dict(), opt.state_dict()))
        model.load_state_dict(saved[0])
        opt.load_state_dict(copy.deepcopy(saved[1]))
    assert opt.average.offsets


def test_a_layer_that_is_frozen_stays_what_it_was_shown_to_be() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    steps = batches(20)
    for batch in steps[:10]:
        train(model, opt, batch)
    frozen = model[0].weight.clone()
    model[0].requires_grad_(False)
    for batch in steps[10:]:
        train(model, opt, batch)
        assert torch.equal(model[0].weight, frozen)


@pytest.mark.parametrize("begin", [0, 1, 8])
@pytest.mark.parametrize("when", ["before the forward", "between two"])
def test_a_frozen_layer_that_has_an_old_gradient_is_neither_stepped_nor_averaged(begin: int, when: str) -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    steps = batches(begin + 8)
    for batch in steps[:begin]:
        train(model, opt, batch)
    frozen = model[0].weight.detach().clone()
    for p in model[0].parameters():
        p.grad = torch.ones_like(p)
    for x, y in steps[begin:]:
        for p in model[1:].parameters():
            p.grad = None
        if when == "between two":
            F.cross_entropy(model(x), y).backward()
        model[0].requires_grad_(False)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert torch.equal(model[0].weight, frozen)
    assert (model[0].weight in opt.average.offsets) == (begin > 0)


def test_a_layer_that_is_thawed_goes_on_from_where_it_was_frozen() -> None:
    """What it had learnt and its average had not taken in yet is not lost; it was, at every turn of such a training."""
    ends = []
    for average in (True, False):
        model = network()
        opt = ekfac.EKFAC(model, weight_decay=0.0, step_size=StepSize(average=average))
        steps = batches(24)
        for batch in steps[:8]:
            train(model, opt, batch)
        opt.average.before_forward()  # shows z
        before = model[0].weight.clone()
        opt.average.rest()
        model[0].requires_grad_(False)
        for batch in steps[8:16]:
            train(model, opt, batch)
        model[0].requires_grad_(True)
        opt.average.before_forward()
        torch.testing.assert_close(model[0].weight.detach(), before.detach(), rtol=0, atol=1e-12)
        ends.append(before.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("when", ["before the forward", "after the forward", "after backward"])
def test_layers_may_be_frozen_and_thawed_at_any_moment(when: str) -> None:
    """What is shown after a step is x, within reach of what was shown before."""
    model = network()
    opt = ekfac.EKFAC(model)
    steps = iter(batches(12))
    for _ in range(8):
        train(model, opt, next(steps))
    weight = model[0].weight
    for trained in (False, True, False, True):
        x, y = next(steps)
        before = weight.detach().clone()
        opt.zero_grad()
        if when == "before the forward":
            model[0].requires_grad_(trained)
        loss = F.cross_entropy(model(x), y)
        if when == "after the forward":
            model[0].requires_grad_(trained)
        loss.backward()
        if when == "after backward":
            model[0].requires_grad_(trained)
        if trained and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        taken = weight.grad is not None  # by any optimizer, frozen or not
        opt.step()
        assert torch.equal(weight, before) or (taken and (weight - before).abs().max() <= opt.param_groups[0]["lr"])


def test_a_checkpoint_from_amid_a_pass_knows_what_rests() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    *before, (x, y) = batches(12)
    for batch in before:
        train(model, opt, batch)
    model[0].requires_grad_(False)
    at_rest = shown(model)
    F.cross_entropy(model(x), y).backward()
    twin = network()
    other = ekfac.EKFAC(twin)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    other.close()
    assert close(shown(twin), at_rest)


def adversaries(freeze: bool, steps: range, state: list[dict[str, Any]] | None = None) -> tuple[Any, ...]:
    """Train two networks against each other, each frozen, or not, while the other takes its step."""
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)).double()
    d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    opts = [ekfac.EKFAC(g), ekfac.EKFAC(d)]
    for model, opt, saved in zip((g, d), opts, state or [], strict=False):
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
    for t in steps:
        chance = torch.Generator().manual_seed(t)
        real, z = (torch.randn(16, n, generator=chance, dtype=torch.float64) for n in (6, 3))
        g.requires_grad_(not freeze)
        opts[1].zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()).backward()
        opts[1].step()
        g.requires_grad_(True)
        d.requires_grad_(not freeze)
        opts[0].zero_grad()
        F.softplus(-d(g(z))).mean().backward()
        opts[0].step()
        d.requires_grad_(True)
    return (g, d, *opts)


def test_adversaries_that_are_frozen_in_turn_meet_each_other_s_weights_and_not_their_average() -> None:
    whole = adversaries(True, range(24))
    for model, other in zip(whole[:2], adversaries(False, range(24))[:2], strict=True):
        assert close(shown(model), shown(other))
    begun = adversaries(True, range(12))
    state = [
        copy.deepcopy({"model": m.state_dict(), "opt": o.state_dict()})
        for m, o in zip(begun[:2], begun[2:], strict=True)
    ]
    gone_on = adversaries(True, range(12, 24), state)
    for model, other in zip(whole[:2], gone_on[:2], strict=True):
        assert close(shown(model), shown(other), 0.0)


def test_a_model_that_is_frozen_for_good_shows_its_average() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(10):
        train(model, opt, batch)
    before = shown(model)
    model.requires_grad_(False)
    student = nn.Linear(3, 3).double()
    F.mse_loss(student(model(batches(1)[0][0])), torch.zeros(16, 3, dtype=torch.float64)).backward()
    assert all(torch.equal(shown(model)[n], before[n]) for n in before if "running" not in n)


def shared_norms(opts: int, affine: bool, freeze: bool = False) -> dict[str, Tensor]:
    """Train a network whose body and head have an optimizer each, or one together; return what it shows."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.Tanh())
    head = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5, affine=affine), nn.Tanh(), nn.Linear(5, 3))
    model = nn.Sequential(body, head).double()
    body[1].requires_grad_(not freeze)
    parts = [model] if opts == 1 else [head, body]
    optimizers = [ekfac.EKFAC(model, params=part.parameters(), weight_decay=0.0) for part in parts]
    for t, (x, y) in enumerate(batches(14)):
        for opt in optimizers:
            opt.zero_grad()
        if t == 7:
            body[1].requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        for opt in optimizers:
            opt.step()
    return shown(model)


@pytest.mark.parametrize(("affine", "freeze"), [(True, False), (True, True), (False, False)])
def test_two_optimizers_of_one_model_average_its_norms_as_one_does(affine: bool, freeze: bool) -> None:
    one, two = (shared_norms(opts, affine, freeze) for opts in (1, 2))
    assert close(one, two, 1e-7)


@pytest.mark.parametrize("later", [False, True])
def test_statistics_of_norms_whose_weights_are_not_averaged_are_the_modules_own(later: bool) -> None:
    """They belong to the weights that are shown, which are those that are trained."""
    model = network()
    model.insert(3, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double())
    found = []
    for one, average in ((copy.deepcopy(model), None), (model, False)):
        groups = [{"params": part.parameters(), "weight_decay": 0.0} for part in (one[:3], one[3:])]
        opt = ekfac.EKFAC(one, params=groups, step_size=StepSize(average=average))
        for t, batch in enumerate(batches(16)):
            if t == 8 * later:
                opt.param_groups[0]["lr"] = 0.01
            train(one, opt, batch)
        found.append(shown(one))
    for name, value in found[0].items():
        same = bool((value - found[1][name]).abs().max() < 1e-8)
        assert same == (not name.startswith("3.") and not name.startswith("4.")), name


def test_training_in_evaluation_mode_is_averaged_too() -> None:
    model = network().eval()
    twin = copy.deepcopy(model)
    opt, plain = ekfac.EKFAC(model), ekfac.EKFAC(twin, step_size=StepSize(average=False))
    for batch in batches(12):
        assert train(model, opt, batch) == pytest.approx(train(twin, plain, batch), abs=1e-9)
    assert not close(shown(model), shown(twin), 1e-6)


def test_a_model_that_is_trained_by_another_method_is_not_averaged() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
            self.net = network()

        def encode(self, x: Tensor) -> Tensor:
            return self.net(x * self.scale)  # type: ignore[no-any-return]

    model = Encoder()
    opt = ekfac.EKFAC(model)
    for x, y in batches(6):
        opt.zero_grad()
        F.cross_entropy(model.encode(x), y).backward()
        opt.step()
    assert not opt.average.offsets


def test_a_model_of_which_only_parts_are_called_from_some_step_on_is_averaged_no_more() -> None:
    """Their gradients would be those of the average, far from the weights that they move."""
    model = network()
    opt = ekfac.EKFAC(model)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        F.cross_entropy(model[3](model[:3](x)), y).backward()
        opt.step()

    steps = batches(30)
    for batch in steps[:10]:
        train(model, opt, batch)
        step(*batch)
    assert opt.average.offsets
    before = shown(model)
    opt.zero_grad()
    opt.step()
    for batch in steps[10:14]:
        step(*batch)
    assert not opt.average.offsets
    moved = max(float((model.get_parameter(n) - p).abs().max()) for n, p in before.items() if "running" not in n)
    assert moved <= 4 * opt.param_groups[0]["lr"]
    before = shown(model)
    model(steps[0][0])
    after = shown(model)
    assert all(torch.equal(after[n], before[n]) for n in before if "running" not in n)


@pytest.mark.parametrize("end", ["scheduler", "mended", "parts"])
def test_where_an_average_ends_batch_norm_s_statistics_go_on(end: str) -> None:
    """Closing put those of the last average back, however long ago that was."""
    model = network()
    opt = ekfac.EKFAC(model)
    for t, (x, y) in enumerate(batches(30)):
        if t == 12 and end == "scheduler":
            torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
        opt.zero_grad()
        F.cross_entropy(model[3](model[:3](x)) if t >= 12 and end == "parts" else model(x), y).backward()
        opt.step()
        if t >= 12 and end == "mended":
            model[0].weight.data.clamp_(min=-0.01)
    before = shown(model)
    assert not opt.average.offsets and not opt.average.training
    copied = copy.deepcopy(opt)
    copied.close()
    opt.close()
    assert close(shown(model), before, 0.0) and close(shown(copied.model), before, 0.0)


def test_closing_shows_the_average() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    for batch in batches(8):
        train(model, opt, batch)
    before = shown(model)
    F.cross_entropy(model.eval()(batches(1)[0][0]), batches(1)[0][1])
    model.train()[0].register_forward_hook(lambda *args: None)
    with torch.enable_grad():
        model[1].eval()
        model(batches(1)[0][0])
    opt.close()
    assert close(shown(model), before, 1e-12)


def test_it_can_be_asked_for_beside_a_rate() -> None:
    model = network()
    twin = copy.deepcopy(model)
    opt = ekfac.EKFAC(model, lr=0.01, step_size=StepSize(average=True))
    plain = ekfac.EKFAC(twin, lr=0.01)
    for batch in batches(12):
        train(model, opt, batch)
        train(twin, plain, batch)
    assert not close(shown(model), shown(twin), 1e-6)
    with pytest.raises(ValueError, match="average"):
        StepSize(average="yes")  # type: ignore[arg-type]


def test_a_step_without_gradients_decides_and_changes_nothing() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    opt.step()
    steps = batches(9)
    for batch in steps[:8]:
        train(model, opt, batch)
    assert opt.average.offsets
    before = shown(model)
    model(steps[8][0])  # which puts the weights that are trained there, and moves batch-norm's statistics
    opt.zero_grad()
    opt.step()
    assert close(shown(model), before, 1e-12)


def test_a_step_that_is_refused_decides_and_changes_nothing() -> None:
    model, twin = network(), network()
    opt, plain = ekfac.EKFAC(model), ekfac.EKFAC(twin)
    for t, (x, y) in enumerate(batches(6)):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if t in (0, 4):
            given, opt.param_groups[0]["damping"] = opt.param_groups[0]["damping"], -1.0
            with pytest.raises(ValueError, match="damping"):
                opt.step()
            opt.param_groups[0]["damping"] = given
            assert not opt.average.training
        opt.step()
        train(twin, plain, (x, y))
    assert opt.average.offsets and not opt.average.trains_in_eval
    names = [name for name, _ in model.named_parameters()]
    assert close({n: shown(model)[n] for n in names}, {n: shown(twin)[n] for n in names}, 1e-12)


def test_a_loop_that_computes_outputs_without_gradients_first_sees_one_set_of_weights() -> None:
    """As in GradCache. After three such steps both passes use the weights; between steps the average is evaluated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = ekfac.EKFAC(model)
    equal, differs = [], []
    for t in range(12):
        if t == 8:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(t))
        with torch.no_grad():
            average = model(x)  # gradients are not cleared yet
        opt.zero_grad()
        with torch.no_grad():
            before = model(x)
        after = model(x)
        equal.append(torch.equal(before, after))
        differs.append(not torch.equal(average, after))
        after.square().mean().backward()
        opt.step()
    assert equal[:4] == [True, True, False, True] and all(equal[4:])  # the first two averages are the weights
    assert all(differs[2:])
    opt.zero_grad()
    model(x).sum().backward()  # a step without it, and the next evaluation in mid-step sees the average again
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        before = model(x)
    assert not torch.equal(before, model(x))
