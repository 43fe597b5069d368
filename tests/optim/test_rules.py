"""The adaptive rules: torch's own in the identity basis, carried through refreshes, and never a non-finite weight."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ekfac
from ekfac.optim.rules import RULES
from helpers import batches_for, compare_with_oracle, mean_loss, mlp

TORCH = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}
ADAPTIVE = tuple(TORCH)


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 12) -> None:
    for micro in batches_for(model, (4,), n=9, steps=steps):
        opt.zero_grad()
        mean_loss(model, micro[0]).backward()
        opt.step()


def same(model: nn.Module, twin: nn.Module) -> None:
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("decay", ["none", "l2", "decoupled"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rule", ADAPTIVE)
def test_in_the_identity_basis_it_is_torchs_own(rule: str, momentum: float, decay: str) -> None:
    if momentum and rule != "rmsprop":
        pytest.skip("only RMSprop has a momentum of this kind in torch")
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    options = {"momentum": momentum} if momentum else {}
    opt = ekfac.EKFAC(
        model, scaling=rule, basis="identity", lr=3e-3, anneal=None, weight_decay=0.0 if decay == "none" else 0.1,
        decoupled_weight_decay=decay == "decoupled", refresh_every=5, **options,
    )  # fmt: skip
    if decay == "decoupled":
        if rule != "adam":
            pytest.skip("torch has a decoupled form of Adam only")
        rival: torch.optim.Optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-3, weight_decay=0.1)
    else:
        rival = TORCH[rule](twin.parameters(), lr=3e-3, weight_decay=0.0 if decay == "none" else 0.1, **options)
    train(model, opt)
    train(twin, rival)
    same(model, twin)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("rule", ADAPTIVE)
def test_a_refresh_that_leaves_the_basis_changes_nothing(rule: str, deterministic: bool) -> None:
    """Factors that stay as they are give the same basis again, and the moments are carried to themselves."""
    options = {"scaling": rule, "lr": 1e-2, "anneal": None, "factor_decay": 0.5, "deterministic": deterministic}
    model = mlp(4, 3)
    twin = copy.deepcopy(model)
    often, once = ekfac.EKFAC(model, refresh_every=1, **options), ekfac.EKFAC(twin, refresh_every=1000, **options)
    x, y = batches_for(model, (4,), n=30, steps=1)[0][0]
    frozen = nn.functional.mse_loss
    for _ in range(6):
        for net, opt in ((model, often), (twin, once)):
            opt.zero_grad()
            with opt.statistics():  # the same statistics at every step
                torch.manual_seed(0)
                frozen(net(x) * 0 + net(x) - net(x).detach(), y).backward()
            mean_loss(net, (x, y)).backward()
            opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("rule", ADAPTIVE)
def test_it_equals_the_oracle_through_refreshes(rule: str, refresh_every: int) -> None:
    model = mlp(4, 5, 3)
    compare_with_oracle(
        model,
        mean_loss,
        batches_for(model, (4,), n=40, steps=7),
        scaling=rule,
        refresh_every=refresh_every,
        lr=1e-2,
        eps=1e-8,
    )


@given(
    rule=st.sampled_from(sorted(RULES)),
    scale=st.sampled_from([0.0, 1e-20, 1e-10, 1.0, 1e10, 1e20]),
    n=st.sampled_from([1, 2, 7]),
    mode=st.sampled_from(["plain", "factored", "relative", "spectral"]),
    seed=st.integers(0, 5),
)
def test_finite_gradients_give_finite_weights(rule: str, scale: float, n: int, mode: str, seed: int) -> None:
    """Extreme scales, no gradient at all, dead units, rank-one batches, a single example; in float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].bias[:3] = -1e3  # dead units
    opt = ekfac.EKFAC(model, scaling=rule, damping_mode=mode, damping=1e-3, refresh_every=2, lr=1e-3)
    x = torch.randn(1, 5).expand(n, 5) if seed % 2 else torch.randn(n, 5)
    weights = [torch.randn(n, 3) for _ in range(5)]
    for weight in weights:
        opt.zero_grad()
        loss = (model(x) * weight).sum(1).mean() * scale
        loss.backward()
        if not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None):
            return
        opt.step()
        for name, p in model.named_parameters():
            assert bool(torch.isfinite(p).all()), f"{name} at scale {scale}"


def state_of(opt: ekfac.EKFAC, model: nn.Module) -> dict[str, Tensor]:
    return opt.state[model[0].weight]


def test_anchored_is_the_step_its_docstring_says() -> None:
    """m / sqrt(damped s / N) in the basis in use, s from S_B x S_A on, and the annealed lr."""
    model = mlp(4, 3)
    opt = ekfac.EKFAC(model, lr=0.05, anneal=2.0, damping=1e-3, refresh_every=1000, scaling_decay=0.9)
    m = s = None
    for t, micro in enumerate(batches_for(model, (4,), n=20, steps=4)):
        opt.zero_grad()
        mean_loss(model, micro[0]).backward()
        G = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)
        before = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().clone()
        fresh = "s" not in opt.state.get(model[0].weight, {})
        held = {k: v.clone() for k, v in opt.state.get(model[0].weight, {}).items() if isinstance(v, Tensor)}
        opt.step()
        state = held if not fresh else state_of(opt, model)
        U_A, U_B = state["U_A"][0], state["U_B"][0]
        g = U_B.T @ G @ U_A
        start = state["S_B"][0][:, None] * state["S_A"][0][None] if fresh else held["s"][0]
        s = 0.9 * start + 0.1 * 20 * g**2
        m = 0.1 * g if fresh else 0.9 * held["m"][0] + 0.1 * g
        A, B = state["S_A"][0], state["S_B"][0]
        lifted = torch.outer(B + 1e-3 * B.max(), A + 1e-3 * A.max()) - torch.outer(B, A)
        p = (m / (1 - 0.9 ** (t + 1))) / ((s + lifted) / 20).sqrt()
        expected = before - 0.05 / math.sqrt(1 + t / 2.0) * (U_B @ p @ U_A.T)
        after = torch.cat([model[0].weight, model[0].bias[:, None]], 1)
        torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-12)
