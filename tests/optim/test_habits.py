"""Ordinary ways of writing a training loop, in which the optimizer must do what torch's own would."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ekfac
from ekfac import EKFAC, KFAC, Coverage
from ekfac.optim.statistics.schedule import START
from loops import X, Y, assert_same, loss_of, mlp, usual, weights


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


@pytest.mark.parametrize("to_none", [True, False])
def test_a_batch_whose_gradients_were_cleared_after_the_next_forward_is_not_counted(to_none: bool) -> None:
    """As where a scaler has skipped a step in a loop that clears between forward and backward."""
    models = [mlp(), mlp()]
    opts = [EKFAC(m, scaling="running") for m in models]
    for _ in range(3):
        usual(models[0], opts[0])
        loss_of(models[1]).mul(3).backward()
        loss = loss_of(models[1])
        models[1].zero_grad(set_to_none=to_none)
        loss.backward()
        assert opts[1].engine.collector.capture.examples == len(X)
        opts[1].step()
    assert_same(*models)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_graph_that_is_used_again_after_its_gradients_were_cleared_counts_once(to_none: bool) -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m, scaling="running") for m in models]
    for _ in range(3):
        usual(models[0], opts[0])
        models[1].zero_grad()
        loss = loss_of(models[1])
        loss.backward(retain_graph=True)
        models[1].zero_grad(set_to_none=to_none)
        loss.backward()
        assert opts[1].engine.collector.capture.examples == len(X)
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
        assert opts[1].engine.collector.capture.examples == 16
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
            assert opt.engine.collector.capture.examples == sum(sizes)
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
    assert opt.engine.collector.capture.examples == 16
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
        assert opt.engine.collector.capture.examples == 16
        opt.step()


def test_fast_weights_do_not_count() -> None:
    model = mlp()
    opt = EKFAC(model)
    loss_of(model).backward()
    fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, fast, (X,)).sum().backward()
    assert opt.engine.collector.capture.examples == 16
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


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("forwards", [0, 3])
def test_gradients_that_the_last_step_used_are_told_and_change_nothing(clip: bool, forwards: int) -> None:
    """Lightning's averaging of weights ends with forwards alone, and one more step."""
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    opt = EKFAC(model)
    for _ in range(3):
        usual(model, opt)
    before = weights(model)
    for _ in range(forwards):
        loss_of(model)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.warns(RuntimeWarning, match="gradients that the last step used"):
        opt.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with pytest.raises(RuntimeError, match="no captured examples"):
        opt.step()
    usual(model, opt)
    assert opt.stats()["steps"] == 4


def test_a_layer_called_by_itself_is_captured_when_a_gradient_comes_to_it() -> None:
    """Its examples are those of its own input."""
    model = mlp()
    opt = EKFAC(model)
    hidden = model[0](X)
    usual(model, opt)
    opt.zero_grad()
    hidden = model[0](X[:5])
    assert opt.engine.collector.capture.examples == 0
    hidden.sum().backward()
    assert opt.engine.collector.capture.examples == 5
    opt.step()


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


def test_layers_with_many_rows_are_left_alone_between_statistics() -> None:
    """A product of so many rows is dearer than the gradient, so nobody waits for them."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    opt, x = EKFAC(model), torch.randn(4, 50, 6)
    quiet = []
    for _ in range(40):
        opt.zero_grad()
        loss = model(x).square().mean()
        latest = opt.engine.collector.capture.forwards.latest
        quiet.append(latest is not None and latest.quiet)
        loss.backward()
        opt.step()
    assert sum(quiet) >= 10


class Bare(nn.Module):
    """Has parameters, and no layer; the model itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Parameter(torch.ones(5, 3))

    def energy(self) -> Tensor:
        return F.cross_entropy(X @ self.field, Y)


class Fitted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(16, 2)), nn.Parameter(torch.ones(2, 5))

    def forward(self) -> Tensor:
        return self.left @ self.right


def test_parameters_of_no_layer_need_no_call_of_the_model() -> None:
    opt = EKFAC(model := Bare(), lr=0.1)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = model.energy()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0] and opt.stats()["steps"] == 20


def test_parameters_of_no_layer_need_no_input_of_the_model() -> None:
    """As of splats, or of anything that is fitted to one target."""
    opt = EKFAC(model := Fitted(), lr=0.1)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = F.mse_loss(model(), X)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0] and opt.stats()["steps"] == 20


@pytest.mark.parametrize("options", [{"scaling": "running"}, {"batch": ekfac.Batch(reduction="sum")}])
def test_nobody_guesses_how_many_examples_they_have(options: dict[str, Any]) -> None:
    opt = EKFAC(model := Bare(), **options)
    model.energy().backward()
    with pytest.raises(RuntimeError, match="no captured examples"):
        opt.step()


def test_a_loss_with_derivatives_by_torch_func_is_told_of_another_way() -> None:
    model = mlp()
    opt = EKFAC(model)

    def output(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    slopes = torch.func.vmap(torch.func.grad(output, argnums=1), (None, 0))(dict(model.named_parameters()), X)
    slopes.square().mean().backward()
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(..., create_graph=True\), but not with torch.func"):
        opt.step()


def test_forms_of_a_model_that_run_no_hooks_are_told_apart() -> None:
    model = mlp()
    opt = EKFAC(model)
    F.cross_entropy(torch.jit.trace(model, X)(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"as model\(x\): not a copy, a traced or exported form, nor layer.forward"):
        opt.step()


def test_it_says_that_steps_are_not_private_where_opacus_is_at_work() -> None:
    """Opacus marks the parameters; tests/integrations has it itself."""
    model = mlp()
    for p in model.parameters():
        p.grad_sample = None
    opt = EKFAC(model)
    with pytest.warns(UserWarning, match="not differentially private.*such as torch's AdamW"):
        usual(model, opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual(model, opt)


# --- what a guard notices ---------------------------------------------------------------------------------------------


class TiedByHand(nn.Module):
    """A language model whose logits are products with the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(10, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.embedding(x))) @ self.embedding.weight.T


def penalised(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X.double()), Y) + 1e-3 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize(
    "options", [{"scaling": "running"}, {"scaling": "per_example"}, {"coverage": Coverage(unsupported="error")}]
)
def test_a_penalty_on_the_weights_is_refused_where_curvature_has_to_match(options: dict[str, Any]) -> None:
    model = mlp().double()
    opt = EKFAC(model, **options)
    for _ in range(5):
        opt.zero_grad()
        penalised(model).backward()
        with pytest.raises(RuntimeError, match=r"its \.grad is not"):
            opt.step()


def test_a_penalty_on_the_weights_is_told_once_and_trained() -> None:
    model = mlp().double()
    opt, losses = EKFAC(model), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(30):
            opt.zero_grad()
            loss = penalised(model)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert [str(w.message) for w in told if "not only the gradient" in str(w.message)] == [str(told[0].message)]
    assert "layers 0, 2: their .grad" in str(told[0].message) and "exclude=['0', '2']" in str(told[0].message)
    assert losses[-1] < losses[0]


def test_an_embedding_that_is_the_output_too_is_trained_by_its_whole_gradient() -> None:
    torch.manual_seed(0)
    model, x = TiedByHand().double(), torch.randint(0, 10, (16, 5))
    opt, losses = EKFAC(model), []

    def step() -> None:
        opt.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), (x + 1).flatten() % 10)
        loss.backward()
        opt.step()
        losses.append(loss.item())

    with pytest.warns(RuntimeWarning, match=r"layer 'embedding': its \.grad is not only .*x @ embedding\.weight\.T"):
        step()
    for _ in range(40):
        step()
    assert losses[-1] < 0.2 * losses[0]


RESCALE = {
    "clipped at 1e9": lambda ps: nn.utils.clip_grad_norm_(ps, 1e9),
    "clipped": lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3),
    "clipped by value": lambda ps: nn.utils.clip_grad_value_(ps, 1e-3),
    "divided": lambda ps: [p.grad.div_(3.0) for p in ps],
    "replaced": lambda ps: [setattr(p, "grad", p.grad * 0.5) for p in ps],
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", RESCALE)
def test_a_penalty_is_noticed_whatever_was_done_to_the_gradients_since(how: str, scaled: bool) -> None:
    model = mlp().double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    opt = EKFAC(model, grad_scaler=scaler, coverage=Coverage(unsupported="error"))
    penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())
    scaler.scale(F.cross_entropy(model(X.double()), Y) + penalty).backward()
    scaler.unscale_(opt)
    RESCALE[how](list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"its \.grad is not"):
        scaler.step(opt)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", RESCALE)
def test_what_is_done_to_good_gradients_is_no_reason_to_refuse_them(how: str, scaled: bool) -> None:
    model = mlp().double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    opt = EKFAC(model, grad_scaler=scaler)
    for _ in range(2):  # accumulation too
        scaler.scale(F.cross_entropy(model(X.double()), Y)).backward()
    scaler.unscale_(opt)
    RESCALE[how](list(model.parameters()))
    scaler.step(opt)
    assert not opt.engine.collector.fingerprints.unverified
    assert opt.stats()["steps"] == 1


@pytest.mark.parametrize("clear", [lambda m: m.zero_grad(set_to_none=False), lambda m: m.zero_grad()])
def test_a_batch_that_was_dropped_is_not_counted(clear: Any) -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m, scaling="running") for m in models]
    for _ in range(3):
        F.cross_entropy(models[1](X[:3]), Y[:3]).backward()
        clear(models[1])
        for model, opt in zip(models, opts, strict=True):
            loss_of(model).backward()
            assert opt.engine.collector.capture.examples == len(X)
            opt.step()
            model.zero_grad(set_to_none=False)
    assert_same(*models)


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


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_scaler_that_is_made_later_can_be_attached(kind: Any) -> None:
    models = [mlp(), mlp()]
    opts = [kind(model, lr=1e-3) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opts[1].attach_scaler(scaler)
    for step in range(4):
        for opt in opts:
            opt.zero_grad()
        loss_of(models[0]).backward()
        scaler.scale(loss_of(models[1])).backward()
        if step == 2:
            scaler.unscale_(opts[1])
            for model in models:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        opts[0].step()
        scaler.step(opts[1])
        scaler.update()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="grad_scaler=3 must be a"):
        opts[0].attach_scaler(3)


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


def test_a_framework_that_asks_is_not_told_that_gradients_cannot_be_clipped() -> None:
    """As Lightning asks: an optimizer that unscales gradients by itself would have to be given them unclipped."""
    assert not getattr(EKFAC(mlp()), "_step_supports_amp_scaling", False)


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
    with pytest.raises(RuntimeError, match=r"layer 'heads.1' has a gradient, but no captured backward .* exclude="):
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


# --- wherever a backward pass begins ---------------------------------------------------------------------------------


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
    opt.engine.schedule.applied_steps = START
    examples = []
    for step in range(12):
        opt.zero_grad()
        for part in {
            "output": "o",
            "branch": "ob"[step > 0],
            "turns": "ob"[step % 2],
            "both": "ob",
            "other way round": "bo",
        }[by]:
            if hook_all:
                opt.engine.collector.capture.fired.clear()
            output = model(x)
            (output if part == "o" else model.kept).square().sum((1, 2)).mean().backward()
        opt.engine.collector.watch.catch_up()  # as the step does
        examples.append(opt.engine.collector.capture.examples)
        if hook_all:
            opt.engine.collector.capture.fired.update(opt.engine.partition.blocks)
        opt.step()
    return [p.detach() for p in model.parameters()], examples


@pytest.mark.rounding
@pytest.mark.parametrize("by", ["output", "branch", "turns", "both", "other way round"])
def test_steps_that_want_nothing_of_their_layers_count_all_examples(by: str) -> None:
    """Wherever in the model the backward pass begins."""
    (found, examples), (expected, _) = branched(by), branched(by, hook_all=True)
    assert examples == [16 if by in ("both", "other way round") else 8] * 12
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)
