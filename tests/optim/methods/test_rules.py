"""The adaptive rules: torch's own in the identity basis, carried through refreshes, and never a non-finite weight."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ekfac
from ekfac.curvature import eigensolvers
from ekfac.curvature.eigensolvers import _cholesky_qr, off_diagonal_residual, orthogonal_iteration, rayleigh
from ekfac.rules import RULES
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


# Of torch's own only RMSprop has a momentum of this kind, and only Adam a decoupled form.
HAS = [(rule, 0.0, decay) for rule in ADAPTIVE for decay in ("none", "l2")]
HAS += [("rmsprop", 0.9, "none"), ("rmsprop", 0.9, "l2"), ("adam", 0.0, "decoupled")]


@pytest.mark.parametrize(("rule", "momentum", "decay"), HAS)
def test_in_the_identity_basis_it_is_torchs_own(rule: str, momentum: float, decay: str) -> None:
    model = mlp(4, 6, 3)
    twin = copy.deepcopy(model)
    options = {"momentum": momentum} if momentum else {}
    opt = ekfac.EKFAC(
        model, scaling=rule, basis="identity", lr=3e-3, anneal=None, trust=None,
        weight_decay=0.0 if decay == "none" else 0.1, decoupled_weight_decay=decay == "decoupled", refresh_every=5,
        **options,
    )  # fmt: skip
    if decay == "decoupled":
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
    options = {
        "scaling": rule,
        "lr": 1e-2,
        "anneal": None,
        "trust": None,
        "factor_decay": 0.5,
        "deterministic": deterministic,
    }
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


@pytest.mark.parametrize("rule", ["anchored", "running"])
def test_every_step_is_the_formula_in_the_basis_in_use(rule: str) -> None:
    """With warm, staggered refreshes too: what they change is the basis, and nothing else.

    s restarts at S_B x S_A whenever the basis turns, m turns with it; the learning rate is annealed.
    """
    model = mlp(4, 3)
    opt = ekfac.EKFAC(
        model,
        scaling=rule,
        lr=0.02,
        anneal=9.0,
        trust=None,
        pace=None,
        damping=1e-3,
        refresh_every=6,
        scaling_decay=0.9,
    )
    weight, bias = model[0].weight, model[0].bias
    (block,) = opt.engine.partition.blocks
    turned = 0
    used: dict[str, Tensor] = {}
    project = opt.engine.method.project

    def noting(block: Any, state: Any, step: Any) -> None:
        used.update({k: state[k][0].clone() for k in ("U_A", "U_B", "S_A", "S_B")})
        project(block, state, step)

    opt.engine.method.project = noting  # type: ignore[method-assign]
    for t, micro in enumerate(batches_for(model, (4,), n=20, steps=30)):
        opt.zero_grad()
        mean_loss(model, micro[0]).backward()
        G = torch.cat([weight.grad, bias.grad[:, None]], 1)
        theta = torch.cat([weight, bias[:, None]], 1).detach().clone()
        before = {k: v[0].clone() for k, v in opt.state.get(weight, {}).items() if isinstance(v, Tensor) and v.dim()}
        renews = opt.engine.schedule.renews(block)
        opt.step()
        after = opt.state[weight]
        U_A, U_B, A, B = (used[k] for k in ("U_A", "U_B", "S_A", "S_B"))
        g = U_B.T @ G @ U_A
        s = 0.9 * (torch.outer(B, A) if renews else before["s"]) + 0.1 * 20 * g**2
        damped = s + torch.outer(B + 1e-3 * B.max(), A + 1e-3 * A.max()) - torch.outer(B, A)
        if rule == "running":
            p = g / damped
        else:
            m = before["m"] if "m" in before else torch.zeros_like(g)
            if renews and t:
                m = (U_B.T @ before["U_B"]) @ m @ (U_A.T @ before["U_A"]).T
            p = ((0.9 * m + 0.1 * g) / (1 - 0.9 ** (t + 1))) / (damped / 20).sqrt()
        expected = theta - 0.02 / math.sqrt(1 + t / 9.0) * (U_B @ p @ U_A.T)
        torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), expected, rtol=1e-9, atol=1e-12)
        turned += bool(before) and not torch.equal(before["U_A"], after["U_A"][0])
        identity = after["U_A"][0].T @ after["U_A"][0]
        torch.testing.assert_close(identity, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert turned >= 8


@given(trust=st.sampled_from([0.01, 0.1, 1.0]), scale=st.sampled_from([1e-3, 1.0, 1e3]), seed=st.integers(0, 9))
def test_no_layer_changes_by_more_than_its_trust(trust: float, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(4, 6, 3)
    opt = ekfac.EKFAC(model, lr=10.0, weight_decay=0.0, trust=trust)
    for micro in batches_for(model, (4,), n=9, steps=3, seed=seed):
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        (mean_loss(model, micro[0]) * scale).backward()
        opt.step()
        for layer in (0, 2):
            pair = [(p, q) for p, q in zip(model.parameters(), before, strict=True)][layer : layer + 2]
            change = torch.cat([(p - q).reshape(-1) for p, q in pair]).norm()
            size = torch.cat([q.reshape(-1) for _, q in pair]).norm()
            assert float(change.detach()) <= trust / 2 * float(size) * (1 + 1e-9)
            assert float(change.detach()) >= trust / 2 * float(size) * (1 - 1e-9), "an lr of 10 is always shortened"


def test_a_warm_basis_comes_to_the_factors_own() -> None:
    """Orthogonal iteration on factors that stay converges to their eigenbasis: the residual falls and falls."""
    torch.manual_seed(3)
    X = torch.randn(50, 8, dtype=torch.float64) * torch.logspace(0, 2, 8, dtype=torch.float64)
    A = (X.T @ X / 50)[None]
    U = torch.linalg.qr(torch.randn(1, 8, 8, dtype=torch.float64))[0]
    residuals = []
    for _ in range(12):
        warm = orthogonal_iteration(A, U)
        U = warm.U
        residuals.append(float(warm.residual))
    assert residuals[-1] < 1e-3 * residuals[0] and bool(warm.good)
    torch.testing.assert_close(warm.values[0].sort()[0], torch.linalg.eigvalsh(A)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_leaves_the_basis(broken: float) -> None:
    A = torch.eye(4, dtype=torch.float64)[None].clone()
    A[0, 1, 2] = broken
    U = torch.linalg.qr(torch.randn(1, 4, 4, dtype=torch.float64))[0]
    warm = orthogonal_iteration(A, U)
    assert not bool(warm.good)
    assert torch.equal(warm.U, U) and bool(torch.isfinite(warm.values).all())


@pytest.mark.parametrize("panel", [256, 9, 4, 1])
def test_cholesky_qr_is_qr(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that GPUs take gives the Q of Householder's QR, up to signs, however many columns come at a time."""
    monkeypatch.setattr(eigensolvers, "PANEL", panel)
    torch.manual_seed(1)
    Y = torch.randn(3, 9, 9, dtype=torch.float64) * torch.logspace(-6, 3, 9, dtype=torch.float64)
    Q, expected = _cholesky_qr(Y), torch.linalg.qr(Y)[0]
    torch.testing.assert_close(Q.abs(), expected.abs(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("panel", [256, 7])
def test_cholesky_qr_of_columns_that_are_nearly_orthogonal_needs_no_mending(
    panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass is as good as Householder's QR there; where columns depend on one another it gives NaN, not a guess."""
    monkeypatch.setattr(eigensolvers, "PANEL", panel)
    torch.manual_seed(1)
    near = torch.linalg.qr(torch.randn(2, 40, 40, dtype=torch.float64))[0] + 0.01 * torch.randn(2, 40, 40).double()
    Y = near * torch.logspace(-6, 3, 40, dtype=torch.float64)
    Y[1, :, 3] = Y[1, :, 5] * (1 + 1e-9)
    Q = _cholesky_qr(Y, passes=1, mend=False)
    torch.testing.assert_close(Q[0].abs(), torch.linalg.qr(Y[0])[0].abs(), rtol=1e-9, atol=1e-11)
    assert bool(Q[1].isnan().all())


def test_values_of_the_basis_that_was_left_cost_nothing() -> None:
    """Without ``values`` the basis is the same, the values are of the one that it started from, the residual is new."""
    torch.manual_seed(2)
    for width, tolerance in ((12, 1e-9), (300, 0.2)):  # of wide ones the residual is an estimate
        X = torch.randn(900, width, dtype=torch.float64) * torch.logspace(-1, 1, width, dtype=torch.float64)
        A = (X.T @ X / 900)[None]
        noise = torch.randn(1, width, width, dtype=torch.float64) * 0.3 / width**0.5
        U = torch.linalg.qr(torch.linalg.eigh(A)[1] + noise)[0]
        quick, full = orthogonal_iteration(A, U, values=False), orthogonal_iteration(A, U)
        assert torch.equal(quick.U, full.U)
        torch.testing.assert_close(quick.values, rayleigh(A, U), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(quick.residual, full.residual, rtol=tolerance, atol=1e-9)
        assert float(full.residual) < float(off_diagonal_residual(A, U))
