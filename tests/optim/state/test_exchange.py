"""Between optimizer and operator: ``opt.curvature()`` and ``opt.seed(operator)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac import Curvature, fisher
from fisher_cases import Mixed
from paper import EKFAC, KFAC, Preconditioner

DOUBLE = torch.float64


def network() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    return model, [(torch.randn(20, 1, 3, 3, dtype=DOUBLE), torch.randint(3, (20,))) for _ in range(3)]


def step(opt: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    opt.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    opt.step()


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    error = float((got - expected).norm() / expected.norm())
    assert error <= tolerance, f"relative error {error:.3g}"


@pytest.mark.parametrize("sua", [False, True])
@pytest.mark.parametrize(("scaling", "approximation"), [("per_example", "ekfac"), ("kronecker", "kfac")])
def test_one_step_over_all_data_is_the_fisher(scaling: str, approximation: str, sua: bool) -> None:
    """One implementation serves both: the optimizer's state after one batch is ``fisher`` of that batch."""
    model, data = network()
    opt = EKFAC(model, lr=0.0, scaling=scaling, sua=sua, refresh_every=1)
    step(opt, model, data[0])
    G = fisher(model, data[:1], "categorical", approximation=approximation, sua=sua)
    H = opt.curvature()
    assert H.approximation == approximation and H.layout == G.layout and H.layers == G.layers
    assert H.examples == 20
    close(H.dense(), G.dense())
    snapshot = H.dense()
    step(opt, model, data[1])
    assert torch.equal(H.dense(), snapshot)
    assert not torch.allclose(opt.curvature().dense(), snapshot)


def test_the_preconditioner_and_kfac_hand_out_theirs() -> None:
    model, data = network()
    G = fisher(model, data[:1], "categorical", approximation="kfac")
    kfac = KFAC(model, lr=0.0)
    step(kfac, model, data[0])
    close(kfac.curvature().dense(), G.dense())
    kfac.close()
    pre = Preconditioner(model, scaling="kronecker")
    step(pre, model, data[0])
    close(pre.curvature().dense(), G.dense())


def test_the_direction_is_a_damped_solve() -> None:
    model, data = network()
    pre = Preconditioner(model, scaling="per_example", damping=0.01)
    pre.zero_grad()
    F.cross_entropy(model(data[0][0]), data[0][1]).backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    pre.step()
    solved = pre.curvature().solve(gradient, 0.01)
    for name, p in model.named_parameters():
        close(p.grad, solved[name])


def test_parameters_without_a_layer() -> None:
    torch.manual_seed(0)
    model = Mixed(5, 3, 4).double()
    data = (torch.randint(5, (12, 4)), torch.randint(4, (12,)))
    opt = EKFAC(model, lr=0.0)
    with pytest.raises(RuntimeError, match="learnt in the first step"):
        opt.curvature()
    step(opt, model, data)
    H = opt.curvature()
    (scale,) = (part for part in H.parts if part.name == "scale")
    torch.testing.assert_close(scale.diagonal(), 12 * model.scale.grad.square())
    # Names and order are those of the model.
    assert H.layout.names == tuple(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("scaling", ["per_example", "running", "kronecker"])
def test_seeding_counts_as_a_batch_of_its_examples(scaling: str) -> None:
    model, data = network()
    whole = fisher(model, data, "categorical", approximation="kfac" if scaling == "kronecker" else "ekfac")
    assert whole.examples == 60
    opt = EKFAC(model, lr=0.0, scaling=scaling, factor_decay=0.5)
    opt.seed(whole)
    close(opt.curvature().dense(), whole.dense())
    step(opt, model, data[0])
    batch = fisher(model, data[:1], "categorical", approximation="kfac")
    for block in opt.engine.partition.blocks:
        state = opt.state[block.key]
        (part,) = whole.restrict(block.name).parts
        (own,) = batch.restrict(block.name).parts
        for name, seeded, fresh in zip("AB", part.factors(), own.factors(), strict=True):  # type: ignore[attr-defined]
            expected = (0.5 * 60 * seeded + 20 * fresh) / (0.5 * 60 + 20)
            close(state[name] / state["factor_weight"], expected)


def test_seeding_kfac_and_the_preconditioner(tmp_path: Path) -> None:
    model, data = network()
    G = fisher(model, data, "categorical")
    G.save(tmp_path / "G.safetensors")
    G = Curvature.load(tmp_path / "G.safetensors")
    opt = KFAC(model, lr=0.0, factor_decay=0.9)
    opt.seed(G)
    close(opt.curvature().dense(), fisher(model, data, "categorical", approximation="kfac").dense())
    step(opt, model, data[0])
    opt.close()
    pre = Preconditioner(model)
    pre.seed(G)
    close(pre.curvature().dense(), G.dense())
    step(pre, model, data[0])


def test_what_cannot_be_a_seed() -> None:
    model, data = network()
    opt = EKFAC(model, lr=0.0)
    step(opt, model, data[0])
    before = opt.curvature().dense()
    other = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3, bias=False)).double()
    broken = fisher(model, data, "categorical")
    broken.parts[-1].tensors()["U_A"][0, 0, 0] = torch.nan
    for operator, message in (
        (fisher(model, data, "categorical", approximation="diagonal"), "block '0' does not fit"),
        (fisher(model, data, "categorical", approximation="block"), "block '0' does not fit"),
        (fisher(model, data, "categorical", sua=True), "block '0' does not fit.*same sua"),
        (fisher(model, data, "categorical", max_factor_dim=4), "does not fit"),
        (fisher(other, data, "categorical"), "no block for '3'"),
        (fisher(model, data, "categorical").restrict("0"), "no block for '3'"),
        (broken, "block '3', 'U_A': is not finite"),
        (None, "operator is of type NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.seed(operator)
    assert torch.equal(opt.curvature().dense(), before)
    opt.close()
    model[3].requires_grad_(False)
    part = EKFAC(model, lr=0.0)
    model[3].requires_grad_(True)
    whole = fisher(model, data, "categorical")
    model[3].requires_grad_(False)
    with pytest.raises(ValueError, match="not trained here: 3"):
        part.seed(whole)
