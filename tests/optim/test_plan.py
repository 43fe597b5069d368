"""What a plan says before anything is there is what there is then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ekfac
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import factor_sums


class Small(nn.Module):
    """An embedding, attention's products, a normalisation and an output layer of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.n = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 40, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(self.n(self.e(tokens)) * self.scale)))
        return out


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    return nn.Sequential(*layers)


MODELS = {
    "tokens": (Small, lambda: torch.randint(11, (4, 7))),
    "pictures": (convolutional, lambda: torch.randn(8, 3, 4, 4)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scaling", ["belief", "running", "rmsprop"])
def test_it_is_the_summary_and_what_is_allocated(name: str, scaling: str) -> None:
    make, batch = MODELS[name]
    model, x = make(), batch()
    plan = ekfac.plan(model, x, scaling=scaling)
    opt = ekfac.EKFAC(model, scaling=scaling)
    assert str(plan.summary) == str(opt.summary()) and plan.bytes == opt.summary().bytes
    for _ in range(4):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    blocks = {row.row.name: row.row.bytes for row in plan.blocks}
    for block in opt.engine.partition.blocks:
        found = sum(t.nbytes for t in opt.state[block.key].values() if isinstance(t, Tensor))
        assert 0 <= found - blocks[block.name] <= 8 * 10, "counts alone are not in the table"


@pytest.mark.parametrize("name", MODELS)
def test_nothing_has_to_be_there(name: str) -> None:
    make, batch = MODELS[name]
    real = ekfac.plan(make(), batch())
    with torch.device("meta"):
        model = make()
    planned = ekfac.plan(model, batch().to("meta"))
    assert str(planned) == str(real) and real.model and real.share == pytest.approx(real.price.total / real.model)
    assert all(p.is_meta for p in model.parameters())
    without = ekfac.plan(model)
    assert without.bytes == real.bytes and without.price.projection == real.price.projection and without.share is None


def test_arithmetic_is_what_torch_counts() -> None:
    model, n = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 10, bias=False)), 50
    plan = ekfac.plan(model, torch.randn(n, 20), refresh_every=8)
    opt = ekfac.EKFAC(model)
    model(torch.randn(n, 20)).square().mean().backward()
    opt.step()
    with opt.paused(), FlopCounterMode(display=False) as own:
        model(torch.randn(n, 20)).square().mean().backward()
    assert plan.model == own.get_total_flops()
    for block, planned in zip(opt.engine.partition.blocks, plan.blocks, strict=True):
        o, i = block.shape.out, block.shape.inputs
        with FlopCounterMode(display=False) as counted:
            factor_sums(block, [Call(block.layer, torch.randn(n, i), torch.randn(n, o))], n, "expand", 2**28)
        assert planned.price.statistics == counted.get_total_flops() / 4, "every fourth step takes its batch in"
        basis = opt.engine.method.basis(block, opt.state[block.key])
        assert basis is not None
        with FlopCounterMode(display=False) as counted:
            basis.unproject(basis.project(torch.randn(1, o, i)))
        assert planned.price.projection == counted.get_total_flops()


def test_it_says_what_is_kept_of_a_side_and_why() -> None:
    plan = ekfac.plan(Small(), coverage=ekfac.Coverage(max_factor_dim=20))
    sides = {block.row.name: (block.A, block.B) for block in plan.blocks}
    assert sides["e"] == ("11 diagonal (tokens)", "8 whole")
    assert sides["b"] == ("12 whole", "40 diagonal (over 20)")
    assert sides["scale"] == ("-", "-")
    assert "diagonal (over 20)" in str(plan)
    identity = ekfac.plan(Small(), coverage=ekfac.Coverage(basis="identity"))
    (linear,) = [block for block in identity.blocks if block.row.name == "a"]
    assert linear.A == "9 diagonal (basis='identity')" and identity.price.projection == 0


def test_a_model_that_reads_its_numbers_is_told_so() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    with pytest.raises(ValueError, match="batch: the model cannot run on the 'meta' device"):
        ekfac.plan(nn.Sequential(Reads(3, 3), nn.Linear(3, 2)), torch.randn(4, 3))


def test_planning_leaves_a_training_alone() -> None:
    model = nn.Linear(3, 2)
    opt = ekfac.EKFAC(model)
    hooks = len(model._forward_hooks)
    ekfac.plan(model, {"input": torch.randn(4, 3)})
    assert len(model._forward_hooks) == hooks and model.weight.grad is None
    assert not opt.engine.collector.capture.examples and not opt.engine.collector.capture.forwards.records
