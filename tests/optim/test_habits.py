"""Ordinary ways of writing a training loop, in which the optimizer must do what torch's own would."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ekfac
from ekfac import EKFAC, KFAC, Preconditioner
from ekfac.optim.refresh import START

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class Twice(nn.Module):
    """Its first layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))
        return out


class Checkpointed(Twice):
    """The same, with activations computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(checkpoint(lambda h: torch.tanh(self.a(torch.tanh(self.a(h)))), x, use_reentrant=False))
        return out


class Stopped(nn.Sequential):
    """A forward that somebody interrupts while ``stop`` is set."""

    stop = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if self.stop:
            raise KeyboardInterrupt
        return out


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def usual(model: nn.Module, opt: Any, **backward: bool) -> None:
    opt.zero_grad()
    loss_of(model).backward(**backward)
    opt.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [mlp, Twice, Checkpointed])
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_may_be_cleared_after_the_forward(build: Callable[[], nn.Module], keep: bool) -> None:
    models = [build(), build()]
    opts = [EKFAC(m, refresh_every=2) for m in models]
    for _ in range(5):
        usual(models[0], opts[0])
        loss = loss_of(models[1])
        opts[1].zero_grad()
        loss.backward(retain_graph=keep)
        opts[1].step()
    assert_same(*models)


def test_a_graph_whose_gradients_were_cleared_can_be_used_again() -> None:
    models = [Twice(), Twice()]
    opts = [EKFAC(m) for m in models]
    for _ in range(3):
        usual(models[0], opts[0])
        loss = loss_of(models[1])
        for _ in range(2):
            opts[1].zero_grad()
            loss.backward(retain_graph=True)
        opts[1].step()
    assert_same(*models)


def test_an_interrupted_forward_is_forgotten() -> None:
    model, twin = Stopped(*mlp()), mlp()
    opts = EKFAC(model), EKFAC(twin)
    usual(model, opts[0])
    usual(twin, opts[1])
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(X[:4])
    model.stop = False
    for _ in range(3):
        usual(model, opts[0])
        usual(twin, opts[1])
    assert_same(model, twin)


def test_a_whole_model_can_be_checkpointed_reentrantly_after_a_validation_with_gradients_on() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m) for m in models]
    x = X.clone().requires_grad_()
    for _ in range(3):
        usual(models[0], opts[0])
        opts[1].zero_grad()
        models[1](X[:8])
        F.cross_entropy(checkpoint(models[1], x, use_reentrant=True), Y).backward()
        assert opts[1].engine.capture.examples == 16
        opts[1].step()
    assert_same(*models)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 12)])
def test_a_body_checkpointed_reentrantly_under_a_frozen_head(sizes: tuple[int, int]) -> None:
    """No parameter that is trained is in the outer graph, and two forwards come before the backward pass."""

    class Body(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.head = nn.Linear(5, 5), nn.Linear(5, 3).requires_grad_(False)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.a, x, use_reentrant=True) if self.reentrant else self.a(x)
            out: Tensor = self.head(torch.tanh(h))
            return out

    models = [Body(False), Body(True)]
    opts = [EKFAC(m) for m in models]
    for _ in range(3):
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            parts = [X[:size].clone().requires_grad_() for size in sizes]
            sum(F.cross_entropy(model(x), Y[: len(x)], reduction="sum") for x in parts).div(sum(sizes)).backward()
            assert opt.engine.capture.examples == sum(sizes)
            opt.step()
    assert_same(*models)


@pytest.mark.parametrize("gradients", [True, False])
def test_an_interrupted_forward_is_noticed_by_the_next(gradients: bool) -> None:
    model = Stopped(*mlp())
    opt = EKFAC(model)
    model.stop = True
    with torch.set_grad_enabled(gradients), pytest.raises(KeyboardInterrupt):
        model(X[:4])
    model.stop = False
    loss_of(model).backward()
    assert opt.engine.capture.examples == 16
    opt.step()


def test_micro_batches_are_not_held_until_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    held = []
    for count in (2, 16):
        opt = EKFAC(model)
        for _ in range(count):
            model(torch.randn(4, 64)).square().sum(1).mean().backward()
        held.append(opt.stats()["captured_bytes"])
        opt.close()
    assert held[0] == held[1]


# --- gradients that are not the loss's --------------------------------------------------------------------------------


def attack(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), Y), x)
        x = x + 0.01 * slope.sign()
    return x.detach()


@pytest.mark.parametrize("to_none", [True, False])
def test_examples_of_an_attack_do_not_count(to_none: bool) -> None:
    model = mlp()
    opt = EKFAC(model)
    for _ in range(3):
        opt.zero_grad(set_to_none=to_none)
        F.cross_entropy(model(attack(model, X)), Y).backward()
        assert opt.engine.capture.examples == 16
        opt.step()


def test_fast_weights_do_not_count() -> None:
    model = mlp()
    opt = EKFAC(model)
    loss_of(model).backward()
    fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, fast, (X,)).sum().backward()
    assert opt.engine.capture.examples == 16
    opt.step()


@pytest.mark.parametrize("approximation", ["full", "block", "diagonal", "kfac", "ekfac"])
def test_curvature_taken_between_backward_and_step_does_not_count(approximation: str) -> None:
    models = [mlp(), mlp()]
    for model in models:
        opt = EKFAC(model)
        loss_of(model).backward()
        if model is models[1]:
            ekfac.fisher(model, [(X, Y)], "categorical", approximation=approximation)
        opt.step()
    assert_same(*models)


def test_gradients_put_there_by_hand_do_count() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m) for m in models]
    for _ in range(3):
        usual(models[0], opts[0])
        opts[1].zero_grad()
        parameters = list(models[1].parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss_of(models[1]), parameters), strict=True):
            p.grad = g
        opts[1].step()
    assert_same(*models)


def test_a_layer_called_by_itself_is_refused_only_when_a_gradient_comes_to_it() -> None:
    model = mlp()
    opt = EKFAC(model)
    hidden = model[0](X)
    usual(model, opt)
    with pytest.raises(RuntimeError, match="layer '0' was called outside a forward of the model"):
        hidden.sum().backward()


def test_parameters_may_get_new_memory() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m) for m in models]
    for step in range(4):
        if step == 2:
            for p in models[1].parameters():
                p.data = p.data.double().float()
        for model, opt in zip(models, opts, strict=True):
            usual(model, opt)
    assert_same(*models)


# --- what a guard notices ---------------------------------------------------------------------------------------------


def test_a_penalty_on_the_weights_is_refused_again_and_again() -> None:
    model = mlp().double()
    opt = EKFAC(model)
    for _ in range(5):
        opt.zero_grad()
        loss = F.cross_entropy(model(X.double()), Y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        with pytest.raises(RuntimeError, match=r"its \.grad is not"):
            opt.step()


def test_a_penalty_is_noticed_also_where_the_first_gradients_were_clipped() -> None:
    model = mlp().double()
    opt = EKFAC(model)
    for step in range(4):
        opt.zero_grad()
        loss = F.cross_entropy(model(X.double()), Y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        if step < 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            opt.step()
    with pytest.raises(RuntimeError, match=r"its \.grad is not"):
        opt.step()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_scaler_that_is_not_known_is_refused(kind: Any, clip: bool) -> None:
    model = mlp()
    opt = kind(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    if clip:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = weights(model)
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(opt)
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("clip", [False, True])
def test_a_known_scaler_changes_nothing(clip: bool) -> None:
    models = [mlp(), mlp()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opts = [EKFAC(models[0]), EKFAC(models[1], grad_scaler=scaler)]
    for _ in range(4):
        opts[0].zero_grad()
        opts[1].zero_grad()
        loss_of(models[0]).backward()
        scaler.scale(loss_of(models[1])).backward()
        if clip:
            scaler.unscale_(opts[1])
            for model in models:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        opts[0].step()
        scaler.step(opts[1])
        scaler.update()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_step_that_a_scaler_found_infinite_changes_nothing() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = EKFAC(model, grad_scaler=scaler)
    usual_loss = scaler.scale(loss_of(model))
    usual_loss.backward()
    model[0].weight.grad[0, 0] = torch.inf
    before = weights(model)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)


def test_a_refused_scaler_is_forgotten() -> None:
    model = mlp()
    opt = EKFAC(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(opt)
    usual(model, opt)


def test_entries_that_were_clipped_or_masked_stand_for_themselves() -> None:
    """s is g^2 of the gradient as it stands, from the second such step on: then it is known to be no rescaling."""
    model = mlp().double()
    opt = EKFAC(model, scaling="rmsprop", alpha=0.0, basis="identity")
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(X.double()), Y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        opt.step()
    s = opt.state[model[0].weight]["s"].reshape(8, 6)
    torch.testing.assert_close(s[:, :5], model[0].weight.grad.square())


# --- freezing ---------------------------------------------------------------------------------------------------------


def test_a_discriminator_that_is_frozen_for_the_generators_step_keeps_its_state() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m, refresh_every=3) for m in models]
    for _ in range(6):
        for model, opt in zip(models, opts, strict=True):
            usual(model, opt)
        models[1].requires_grad_(False)
        models[1](X.clone().requires_grad_()).sum().backward()
        models[1].requires_grad_(True)
    assert_same(*models)


def test_a_layer_that_is_frozen_for_a_while_gets_its_state_back() -> None:
    model = mlp()
    opt = EKFAC(model)
    for _ in range(5):
        usual(model, opt)
    known = dict(opt.state[model[0].weight])
    model[0].bias.requires_grad_(False)
    usual(model, opt)
    assert opt.state[model[0].weight]["A"].shape[-1] == 5
    model[0].bias.requires_grad_(True)
    opt.zero_grad()
    loss_of(model).backward()
    assert opt.state[model[0].weight]["A"] is known["A"] and opt.state[model[0].weight]["count"] == known["count"]
    opt.step()
    assert opt.state[model[0].weight]["count"] == 6


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_layer_that_was_frozen_at_first_is_trained_once_it_is_not(kind: Any) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = kind(model)
    start = model[0].weight.detach().clone()
    usual(model, opt)
    assert torch.equal(model[0].weight, start)
    model[0].requires_grad_(True)
    usual(model, opt)
    assert not torch.equal(model[0].weight, start)


def test_a_preconditioner_follows_too() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    pre = Preconditioner(model)
    model[0].requires_grad_(True)
    loss_of(model).backward()
    before = model[0].weight.grad.clone()
    pre.step()
    assert not torch.equal(model[0].weight.grad, before)


def test_a_checkpoint_of_a_partly_frozen_model_goes_into_the_whole() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = EKFAC(model)
    usual(model, opt)
    other = mlp()
    new = EKFAC(other)
    new.load_state_dict(opt.state_dict())
    usual(other, new)
    assert new.engine.applied_steps == 2


def test_state_of_a_frozen_layer_is_in_checkpoints_and_copies() -> None:
    model = mlp()
    opt = EKFAC(model, momentum=0.9, refresh_every=3)
    for _ in range(5):
        usual(model, opt)
    model[0].requires_grad_(False)
    usual(model, opt)
    copied = copy.deepcopy(opt)
    other = copy.deepcopy(model)
    loaded = EKFAC(other, momentum=0.9, refresh_every=3)
    loaded.load_state_dict(opt.state_dict())
    for net, o in ((model, opt), (copied.model, copied), (other, loaded)):
        net[0].requires_grad_(True)
        for _ in range(4):
            usual(net, o)
    assert_same(model, copied.model)
    assert_same(model, other)


def test_a_checkpoint_replaces_the_state_of_frozen_layers_too() -> None:
    model = mlp()
    opt = EKFAC(model)
    for _ in range(3):
        usual(model, opt)
    early = copy.deepcopy(opt.state_dict())
    for _ in range(5):
        usual(model, opt)
    model[0].requires_grad_(False)
    usual(model, opt)
    opt.load_state_dict(early)
    model[0].requires_grad_(True)
    loss_of(model).backward()
    assert opt.state[model[0].weight]["count"] == 3


def test_statistics_around_the_first_forward_after_freezing_keep_the_gradients() -> None:
    model = mlp()
    opt = EKFAC(model)
    loss_of(model).backward()
    before = [p.grad.clone() for p in model.parameters()]
    model[0].requires_grad_(False)
    with opt.statistics():
        loss_of(model).backward()
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def test_an_optimizer_of_frozen_parameters_waits() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = EKFAC(model, params=list(model[0].parameters()))
    usual(model, opt)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    usual(model, opt)
    assert not torch.equal(model[0].weight, before)


def test_freezing_between_backward_and_step_waits_for_the_next_forward() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m) for m in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, opt in zip(models, opts, strict=True):
            usual(model, opt)
            opt.zero_grad()
            loss_of(model).backward()
            if model is models[1]:
                model[0].bias.requires_grad_(False)
            opt.step()
            model[0].bias.requires_grad_(True)
            usual(model, opt)
    assert_same(*models)


def test_damping_must_agree_within_a_layer_that_is_unfrozen() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[0].bias], "damping": 0.1}, {"params": [model[0].weight, *model[2].parameters()]}]
    opt = EKFAC(model, params=groups)
    usual(model, opt)
    model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="within layer '0'"):
        usual(model, opt)


# --- layers without statistics ----------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(5, 6), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 1)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.heads[which](torch.tanh(self.body(x)))
        return out


def test_statistics_that_leave_a_layer_out_are_refused_before_anything_changes() -> None:
    model = Heads()
    opt = EKFAC(model)
    with opt.statistics():
        F.cross_entropy(model(X, 0), Y).backward()
    (F.cross_entropy(model(X, 0), Y) + model(X, 1).square().mean()).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"layer 'heads.1' has a gradient, but no backward pass .* exclude="):
        opt.step()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)


def test_a_head_whose_gradient_is_zero_is_left_alone() -> None:
    model = Heads()
    opt = EKFAC(model)
    model(X, 1).square().mean().backward()
    opt.zero_grad(set_to_none=False)
    F.cross_entropy(model(X, 0), Y).backward()
    before = model.heads[1].weight.detach().clone()
    opt.step()
    assert torch.equal(model.heads[1].weight, before)
    opt.zero_grad()
    model(X, 1).square().mean().backward()
    opt.step()
    assert not torch.equal(model.heads[1].weight, before)


# --- autocast, dtypes, memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [EKFAC, KFAC, lambda m: EKFAC(m, **ekfac.PAPER), lambda m: EKFAC(m, scaling="per_example")],
    ids=["default", "KFAC", "paper", "per_example"],
)
def test_the_step_may_be_taken_inside_autocast(build: Callable[[nn.Module], Any]) -> None:
    models = [mlp(), mlp()]
    opts = [build(m) for m in models]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            opts[0].zero_grad()
            loss = loss_of(models[0])
            loss.backward()
            opts[0].step()
        opts[1].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(models[1])
        loss.backward()
        opts[1].step()
    assert_same(*models)


@pytest.mark.parametrize("start", [torch.float32, torch.float64])
@pytest.mark.parametrize("end", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_checkpoint_goes_into_another_dtype(kind: Any, start: torch.dtype, end: torch.dtype) -> None:
    model = mlp().to(start)
    opt = kind(model, momentum=0.9)

    def step(model: nn.Module, opt: Any, dtype: torch.dtype) -> None:
        opt.zero_grad()
        F.cross_entropy(model(X.to(dtype)).float(), Y).backward()
        opt.step()

    for _ in range(3):
        step(model, opt, start)
    other = mlp().to(end)
    other.load_state_dict(model.state_dict())
    new = kind(other, momentum=0.9)
    new.load_state_dict(opt.state_dict())
    step(other, new, end)
    step(model, opt, start)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q.float(), rtol=0.05, atol=0.02)


def test_kfac_goes_on_with_the_factors_of_its_last_refresh() -> None:
    def build(model: nn.Module) -> KFAC:
        return KFAC(model, damping=lambda t: 1e-2 * 0.5 ** ((t + 5) // 10), refresh_every=4)

    model = mlp().double()
    opt = build(model)

    def steps(model: nn.Module, opt: Any, count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            F.cross_entropy(model(X.double()), Y).backward()
            opt.step()

    steps(model, opt, 7)
    other = copy.deepcopy(model)
    new = build(other)
    new.load_state_dict(opt.state_dict())
    steps(model, opt, 20)
    steps(other, new, 20)
    assert_same(model, other)


def test_the_second_look_of_adaptive_damping_is_inside_autocast_too() -> None:
    model = mlp()
    opt = EKFAC(model, **{**ekfac.PAPER, "damping": ekfac.AdaptiveDamping(start=1.0, every=1)})
    dtypes = []

    def closure() -> Tensor:
        opt.zero_grad()
        out = model(X)
        dtypes.append(out.dtype)
        loss = F.cross_entropy(out.float(), Y)
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        opt.step(closure)
    assert dtypes == [torch.bfloat16] * 2


def test_a_checkpoint_with_other_groups_changes_nothing() -> None:
    model = mlp()
    two = EKFAC(model, params=[{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    usual(model, two)
    other = mlp()
    one = EKFAC(other)
    with pytest.raises(ValueError, match="state_dict has groups of 2, 2 parameters, this optimizer of 4"):
        one.load_state_dict(two.state_dict())
    assert one.stats()["steps"] == 0 and not one.state


def test_checkpoints_of_the_other_method_are_refused() -> None:
    model = mlp()
    opt = KFAC(model)
    usual(model, opt)
    with pytest.raises(ValueError, match="state_dict is of KFAC, this is EKFAC"):
        EKFAC(mlp()).load_state_dict(opt.state_dict())


def test_an_optimizer_says_that_it_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"save opt\.state_dict"):
        pickle.dumps(EKFAC(mlp()))
    copy.deepcopy(EKFAC(mlp()))


def test_optimizers_that_are_gone_leave_no_hooks() -> None:
    model = mlp()
    for _ in range(3):
        opt = EKFAC(model)
        usual(model, opt)
        del opt
    gc.collect()
    assert not model[0]._forward_hooks and not model._forward_hooks and not model._forward_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_an_input_whose_square_overflows_is_not_remembered(kind: Any) -> None:
    model = mlp()
    opt = kind(model, refresh_every=5)
    usual(model, opt)
    opt.zero_grad()
    x = X.clone()
    x[0] = 1e25
    F.cross_entropy(model(x), Y).backward()
    opt.step()
    for _ in range(20):
        usual(model, opt)
    assert torch.isfinite(opt.state[model[0].weight]["A"]).all()
    assert loss_of(model) < 1.2


def test_many_skipped_steps_in_a_row_are_said_once() -> None:
    model = mlp()
    opt = EKFAC(model)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            usual(model, opt)
    assert [w for w in caught if "steps were skipped" in str(w.message)][1:] == []
    assert any("the last 20 steps were skipped" in str(w.message) for w in caught)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [lambda m: m.parameters(), lambda m: list(m.named_parameters())])
def test_params_takes_plain_parameters(given: Callable[[nn.Module], Any]) -> None:
    model = mlp()
    opt = EKFAC(model, params=given(model))
    assert [len(group["params"]) for group in opt.param_groups] == [4]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (lambda m: {"params": m.parameters()}, TypeError, "params is of type dict. Allowed: a list of dicts"),
        (lambda m: m[0].weight, TypeError, "params is of type Parameter"),
        (lambda m: 3, TypeError, "params is of type int"),
        (lambda m: [{"lr": 0.1}], ValueError, r"params holds a group of keys \['lr'\]"),
        (lambda m: [{"params": m.parameters()}, 3], ValueError, "params holds a group of type int"),
        (lambda m: [{"params": m.parameters(), "refresh_every": 5}], ValueError, "a refresh_every of its own"),
    ],
)
def test_bad_params(given: Callable[[nn.Module], Any], kind: type[Exception], message: str) -> None:
    model = mlp()
    with pytest.raises(kind, match=message):
        EKFAC(model, params=given(model))


def test_wide_convolutions_are_taken_tap_by_tap_and_very_wide_sides_diagonal() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 64, 3), nn.Conv2d(64, 8, 3), nn.ConvTranspose2d(8, 4, 3), nn.ConvTranspose2d(64, 4, 3),
        nn.Conv2d(600, 4, 1), nn.Linear(600, 2), nn.Linear(2, 10_001, bias=False),
    )  # fmt: skip
    rows = EKFAC(model).summary().rows
    assert ["taps" in row.block for row in rows] == [False, True, False, True, False, False, False]
    assert [row.B for row in rows][-1] == "10001"
    assert [(row.A, row.B) for row in ekfac.summary(model).rows] == [(row.A, row.B) for row in rows]
    assert not any("taps" in row.block for row in EKFAC(model, sua=False, max_factor_dim=None).summary().rows)
    assert not any("taps" in row.block for row in EKFAC(model, sharing="reduce").summary().rows)


def test_numbers_of_numpy_are_numbers() -> None:
    opt = EKFAC(mlp(), lr=np.float32(0.1), refresh_every=np.int64(5))
    usual(opt.model, opt)


def test_an_input_without_examples_is_refused() -> None:
    model = mlp()
    opt = EKFAC(model)
    with pytest.raises(ValueError, match=r"layer '0': its input has shape \(5,\), without a dimension .* x\[None\]"):
        model(X[0])
    usual(model, opt)


def test_a_lazy_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet"):
        EKFAC(nn.Sequential(nn.LazyLinear(3)))


def test_curvature_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ekfac.fisher(mlp(), [(X, Y)], "categorical", approximation="kfac")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"exclude": 3}, "exclude=3"), ({"max_factor_dim": 0}, "max_factor_dim=0"), ({"sua": "x"}, "sua='x'")],
)
def test_bad_arguments_of_fisher(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ekfac.fisher(mlp(), [(X, Y)], "categorical", **options)


class Branches(nn.Module):
    """Two convolutions side by side and one of both; what the second gives is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Conv1d(n, 2, 3, padding=1) for n in (2, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        a, self.kept = self.a(x), self.b(x)
        out: Tensor = self.c(torch.cat([a, self.kept], 1))
        return out


def branched(by: str, hook_all: bool = False) -> tuple[list[Tensor], list[int]]:
    """Weights after steps of which few take statistics, and how many examples each counted."""
    model, x = Branches().double(), torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0)).double()
    opt = EKFAC(model, factor_every=5, refresh_every=1000)
    opt.engine.applied_steps = START
    examples = []
    for step in range(12):
        opt.zero_grad()
        for part in {"output": "o", "branch": "ob"[step > 0], "turns": "ob"[step % 2], "both": "ob"}[by]:
            if hook_all:
                opt.engine.capture.fired.clear()
            output = model(x)
            (output if part == "o" else model.kept).square().sum((1, 2)).mean().backward()
        examples.append(opt.engine.capture.examples)
        if hook_all:
            opt.engine.capture.fired.update(opt.engine.blocks)
        opt.step()
    return [p.detach() for p in model.parameters()], examples


@pytest.mark.parametrize("by", ["output", "branch", "turns", "both"])
def test_steps_that_want_nothing_of_their_layers_count_all_examples(by: str) -> None:
    """Wherever in the model the backward pass begins."""
    (found, examples), (expected, _) = branched(by), branched(by, hook_all=True)
    assert examples == [16 if by == "both" else 8] * 12
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)
