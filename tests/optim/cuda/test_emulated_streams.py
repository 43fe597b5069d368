"""On an emulated GPU no stream reads what another has not done, the host does not wait, and no memory is used twice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ekfac
from ekfac.curvature import factors
from ekfac.optim.cuda.nonfinite import PinnedReadback
from emulated_cuda import emulated
from emulated_trainings import MODELS, SMOOTH, Training, poisons

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.filterwarnings("error:cuda_graphs. .*recorded"),
]


@pytest.mark.parametrize("model", MODELS)
def test_the_host_waits_in_no_later_step(model: str) -> None:
    with emulated() as device:
        training = Training(model, "cuda", {"refresh_every": 4})
        for t in range(20):
            training.step(t)
        shown = len(training.shown) // 20
        before = device.waits
        for t in range(20, 30):
            training.step(t)
        assert device.waits - before == 10 * shown, "but for those who look at the weights"


def test_a_rate_that_is_put_on_the_device_is_not_read() -> None:
    with emulated() as device:
        training = Training("mlp", "cuda", SMOOTH)
        training.look = lambda: None  # type: ignore[method-assign]
        for t in range(15):
            if t == 5:
                training.opt.param_groups[0]["lr"] = torch.tensor(1e-2, dtype=torch.float64, device="cuda")
            if t == 12:
                before = device.waits
            training.step(t)
        assert device.waits == before


def refreshing(steps: int, **given: Any) -> Training:
    """Train, to a step after which bases turn beside what comes next."""
    training = Training("mlp", "cuda", {"refresh_every": 4, **SMOOTH, **given})
    for t in range(steps):
        training.step(t)
    assert training.opt.engine.executor.side._running, "under way"
    return training


def test_what_an_optimizer_leaves_is_not_used_before_its_refresh_is_done() -> None:
    with emulated():
        training = refreshing(20)
        training.opt = training.model = None
        gc.collect()
        torch.zeros(3, device="cuda").add_(1)


def test_a_mean_that_is_to_be_longer_waits_for_the_refresh() -> None:
    """Where a loss has derivatives of the network inside from some step on."""
    with emulated():
        training = Training("mlp", "cuda", {"refresh_every": 4})
        for t in range(19):
            training.step(t)
        x, _ = training.model.batch(torch.Generator().manual_seed(0), 8)
        x = x.cuda().requires_grad_()
        training.opt.zero_grad()
        (slope,) = torch.autograd.grad(training.model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
        training.opt.step()
        assert training.opt.param_groups[0]["betas"] == (0.98, 0.95)


def test_a_model_that_is_cast_waits_for_the_refresh() -> None:
    with emulated():
        training = refreshing(20)
        training.model.float()
        x, y = training.model.batch(torch.Generator().manual_seed(0), 8)
        for _ in range(3):
            training.opt.zero_grad()
            cross_entropy(training.model(x.cuda().float()), y.cuda()).backward()
            training.opt.step()


def test_a_scaler_that_comes_later_finds_all_steps_counted() -> None:
    with emulated():
        training = refreshing(20)
        training.poisons = True
        training.step(20)
        training.opt.attach_scaler(None)
        training.poisons = False
        training.step(21)
        assert training.opt.stats()["skipped_steps"] == 1 and training.opt.stats()["steps"] == 21


def test_a_default_device_changes_nothing() -> None:
    found = []
    with emulated():
        for device in ("cpu", "cuda"):
            with torch.device(device):
                training = refreshing(12)
                poisons(training, 12)
                training.step(12)
            found.append(training.shown)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_what_a_cpu_can_do_is_found_out_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default device: a generator of the CPU draws nothing elsewhere."""
    monkeypatch.setattr(factors, "capabilities", lambda: {"cpu_name": "AMD", "amx_tile": False})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    with torch.device("meta"):
        assert factors.onednn_is_faster.__wrapped__() in (True, False)


def test_an_answer_is_awaited_on_the_device_that_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one."""
    with emulated() as device:
        asked: list[Any] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: (asked.append(of), device.stream)[1])
        value = torch.ones(3, device="cuda")
        assert PinnedReadback(value).ready(wait=True) and asked == [value.device]


def test_products_on_a_gpu_ask_nothing_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekfac.optim.executor.onednn_is_faster", lambda: pytest.fail("asked"))
    with emulated():
        training = Training("mlp", "cuda", {})
        with training.opt.engine.executor.fast_products(2**30):
            pass


def test_averages_that_change_places_are_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset of one parameter comes to lie where that of another was, as soon as that one is not averaged."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
    opt = ekfac.EKFAC(model, params=[{"params": [model[0].weight]}, {"params": [model[2].weight], "lr": 1e-2}])
    monkeypatch.setattr(Tensor, "data_ptr", lambda t: id(t) if t.requires_grad else 0)
    seen: list[Any] = []
    run = opt.engine.step
    monkeypatch.setattr(opt.engine, "step", lambda rates, apply: (seen.append(rates.fixed), run(rates, apply))[1])
    groups = opt.param_groups
    for t in range(4):
        if t == 2:
            groups[0]["lr"], groups[1]["lr"], groups[1]["lr_named"] = 1e-2, opt.defaults["lr"], False
        opt.zero_grad()
        model(torch.randn(16, 6, dtype=torch.float64)).square().sum(1).mean().backward()
        opt.step()
    assert seen[0] == seen[1] != seen[2] == seen[3]
