"""Gradients and s* projected row by row are those projected from ``.grad`` and from the calls."""

import copy

import pytest
import torch
from torch import nn

import ekfac
from ekfac.curvature import fingerprint
from ekfac.optim.statistics import collector
from ekfac.optim.statistics import factored_gradient as rows
from paper import EKFAC, KFAC

MAKERS = {
    "per_example": lambda model: EKFAC(model, lr=0.05, scaling="per_example", damping=1e-2, refresh_every=3),
    "averaged": lambda model: EKFAC(
        model, lr=0.05, scaling="per_example", scaling_decay=0.9, damping=0.1, refresh_every=3
    ),
    "running": lambda model: EKFAC(model, lr=0.05, damping=1e-2, refresh_every=3),
    "KFAC": lambda model: KFAC(model, lr=0.05, damping=1e-2, refresh_every=3),
}

#: So that small layers are taken by their rows too.
for_nothing = pytest.mark.usefixtures("calls_for_nothing")


@pytest.fixture
def calls_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CALLS", 0)


def train(make, model: nn.Module, shape: tuple[int, ...]) -> list[torch.Tensor]:
    opt = make(model)
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(*shape, 30, generator=generator, dtype=torch.float64)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


@for_nothing
@pytest.mark.rounding
@pytest.mark.parametrize("shape", [(6,), (3, 2)], ids=["one row an example", "two rows an example"])
@pytest.mark.parametrize("name", MAKERS)
def test_rows_give_the_same_steps(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 25, bias=False), nn.Tanh(), nn.Linear(25, 4)
    ).double()
    twin = copy.deepcopy(model)
    taken: list[str] = []
    for method in ("projected", "scaling_sum"):
        original = getattr(rows.Rows, method)

        def counted(self, basis, method=method, original=original):
            taken.append(method)
            return original(self, basis)

        monkeypatch.setattr(rows.Rows, method, counted)
    by_rows = train(MAKERS[name], model, shape)
    if name != "KFAC":
        assert "projected" in taken
        assert ("scaling_sum" in taken) == (name != "running" and len(shape) == 1)
    taken.clear()
    monkeypatch.setattr(collector, "may_use_rows", lambda block, options: False)
    by_gradient = train(MAKERS[name], twin, shape)
    assert not taken
    for p, q in zip(by_rows, by_gradient, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@for_nothing
@pytest.mark.rounding
@pytest.mark.parametrize("name", ["default", "running"])
def test_rows_do_not_stand_for_gradients_that_were_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows_possible in (True, False):
        if not rows_possible:
            monkeypatch.setattr(collector, "may_use_rows", lambda block, options: False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4)).double()
        opt = ekfac.EKFAC(model) if name == "default" else MAKERS[name](model)
        for step in range(6):
            opt.zero_grad()
            model(torch.randn(6, 30, generator=torch.Generator().manual_seed(step)).double()).square().mean().backward()
            model[0].weight.grad[::2] = 0.0
            opt.step()
        # The default needs no norms of gradients at the end of backward: what clipping did is not undone.
        assert opt.engine.collector.watch.lengths_wanted == (name == "running")
        found.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


#: Who clears the gradients, and how.
CLEARED = {
    f"{'opt' if by_optimizer else 'model'}, {to_none}": (by_optimizer, to_none)
    for by_optimizer in (True, False)
    for to_none in (True, False)
}


@for_nothing
@pytest.mark.rounding
@pytest.mark.parametrize("when", ["before the forward", "after it"])
@pytest.mark.parametrize("cleared", CLEARED)
@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_takes_the_same_rows(name: str, cleared: str, when: str) -> None:
    """Bit for bit: the first step after loading must not be computed another way than it would have been."""
    by_optimizer, to_none = CLEARED[cleared]

    def steps(opt, model: nn.Module, which: range) -> None:
        for step in which:
            clear = (opt if by_optimizer else model).zero_grad
            generator = torch.Generator().manual_seed(step)
            if when == "before the forward":
                clear(set_to_none=to_none)
            loss = model(torch.randn(6, 30, generator=generator)).square().mean()
            if when == "after it":
                clear(set_to_none=to_none)
            loss.backward()
            assert opt.engine.collector.watch.single_pass
            opt.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 25))
    opt = MAKERS[name](model)
    steps(opt, model, range(5))
    twin = copy.deepcopy(model)
    again = MAKERS[name](twin)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(opt, model, range(5, 9))
    steps(again, twin, range(5, 9))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("width", "by_rows"), [(64, False), (400, True)])
def test_only_wide_layers_are_worth_the_calls_that_rows_need(width: int, by_rows: bool) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    opt = EKFAC(model, lr=0.05, damping=1e-2, refresh_every=50, factor_every=50)
    kept, quiet = [], []
    for _ in range(25):
        opt.zero_grad()
        loss = model(torch.randn(8, width)).square().mean()
        latest = opt.engine.collector.capture.forwards.latest
        quiet.append(latest is not None and latest.quiet)
        loss.backward()
        kept.append(bool(opt.engine.collector.calls))
        opt.step()
    assert kept == [by_rows] * 25
    assert quiet[-1] != by_rows


@for_nothing
@pytest.mark.parametrize("name", MAKERS)
def test_a_scalers_rows_are_never_taken_for_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the fingerprints of both are zero, as they may be by chance: rows are larger by its scale."""
    monkeypatch.setattr(fingerprint, "same", lambda one, other, size: True)
    ends = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))
        opt = MAKERS[name](model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        opt.attach_scaler(scaler)
        for step in range(8):
            x = torch.randn(6, 30, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
        ends.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
