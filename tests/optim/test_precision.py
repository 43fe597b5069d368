"""Half precision: parameters, autocast and torch.amp.GradScaler."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from helpers import assert_same_weights, batches_for, mean_loss, mlp, parameters_of
from paper import EKFAC, KFAC

METHODS: dict[str, Any] = {
    "EKFAC": lambda model, **o: EKFAC(model, scaling="per_example", **o),
    "EKFAC-ra": lambda model, **o: EKFAC(model, scaling="running", **o),
    "KFAC": lambda model, **o: KFAC(model, **o),
}
COMMON: dict[str, Any] = {"lr": 0.05, "damping": 0.05, "refresh_every": 3, "momentum": 0.5}


def pair(method: str, **scaled: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    torch.manual_seed(1)
    model = mlp(3, 5, 2)
    twin = copy.deepcopy(model)
    return model, METHODS[method](model, **COMMON), twin, METHODS[method](twin, **COMMON, **scaled)


@pytest.mark.parametrize("unscale", ["by step", "by hand, clipped"])
@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_scaler_changes_nothing(method: str, unscale: str) -> None:
    """Statistics are unscaled, whether the gradients are unscaled inside scaler.step or before, by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, opt, twin, other = pair(method, grad_scaler=scaler)
    scales = set()
    for (batch,) in batches_for(model, (3,), n=9, steps=9):
        opt.zero_grad()
        mean_loss(model, batch).backward()
        other.zero_grad()
        scales.add(scaler.get_scale())
        scaler.scale(mean_loss(twin, batch)).backward()
        if unscale != "by step":
            scaler.unscale_(other)
            for net in (model, twin):
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        scaler.step(other)
        scaler.update()
        assert_same_weights(parameters_of(twin), parameters_of(model), 1e-7)
    assert len(scales) > 1, "the scale has changed on the way"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_scaled_step_with_infinite_gradients_did_not_happen(method: str, at: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    model, opt, twin, other = pair(method, grad_scaler=scaler)
    for number, ((x, y),) in enumerate(batches_for(model, (3,), n=9, steps=7)):
        other.zero_grad()
        if number == at:
            y = y.clone()
            y[0, 0] = float("inf")
            before = parameters_of(twin)
            scaler.scale(mean_loss(twin, (x, y))).backward()
            scaler.step(other)
            scaler.update()
            assert_same_weights(parameters_of(twin), before, 0.0)
            assert scaler.get_scale() == 128.0
            continue
        opt.zero_grad()
        mean_loss(model, (x, y)).backward()
        opt.step()
        scaler.scale(mean_loss(twin, (x, y))).backward()
        scaler.step(other)
        scaler.update()
        assert_same_weights(parameters_of(twin), parameters_of(model), 1e-7)


# -------------------------------------------------------------------------------------------- whole trainings


class SmallConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class SmallTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1))
        h = self.norm(x)
        attended = F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))
        return self.head(torch.relu(x + self.out(attended)).flatten(1))


def images(n: int = 512) -> tuple[Tensor, Tensor]:
    """Four classes: where in an 8 x 8 picture a bright bar lies; half of the pixels are noise."""
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(4, (n,), generator=generator)
    x = torch.randn(n, 1, 8, 8, generator=generator)
    for i in range(n):
        x[i, 0, 2 * int(y[i])] += 1.5
    return x, y


def train(build: type[nn.Module], mode: str, method: str, steps: int = 200) -> tuple[float, Any]:
    torch.manual_seed(3)
    model = build()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16", init_scale=1024.0)
    options = {"grad_scaler": scaler} if mode == "fp16" else {}
    if mode == "bf16 parameters":
        model = model.to(torch.bfloat16)
    opt = METHODS[method](model, lr=0.02, damping=0.03, refresh_every=20, **options)
    x, y = images()
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        pick = torch.randint(len(x), (64,), generator=generator)
        opt.zero_grad()
        given = x[pick].to(next(model.parameters()).dtype) if mode == "bf16 parameters" else x[pick]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(given).float(), y[pick])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    with torch.no_grad():
        return float(F.cross_entropy(model.float()(x), y)), opt


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [SmallConvNet, SmallTransformer])
def test_200_steps_in_every_precision_end_near_each_other(build: type[nn.Module], method: str) -> None:
    """The loss starts at log 4 = 1.39; autocast ends within 0.1 of float32, bfloat16 parameters within 0.2."""
    exact, _ = train(build, "float32", method)
    assert exact < 0.5, exact
    for mode, allowed in (("bf16", 0.1), ("fp16", 0.1), ("bf16 parameters", 0.2)):
        loss, opt = train(build, mode, method)
        assert abs(loss - exact) <= allowed, (mode, loss, exact)
        for state in opt.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and key != "momentum_buffer":
                    assert value.dtype == torch.float32, (mode, key)


@pytest.mark.over_a_second
@pytest.mark.parametrize("mode", ["bf16", "fp16", "bf16 parameters"])
@pytest.mark.parametrize("build", [SmallConvNet, SmallTransformer])
def test_half_precision_learns(build: type[nn.Module], mode: str) -> None:
    loss, opt = train(build, mode, "EKFAC-ra", steps=60)
    assert loss < 1.0, loss
    assert opt.stats()["skipped_steps"] == 0


def steps_under_autocast(opt: Any, model: nn.Module) -> None:
    for t in range(6):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(t))
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        opt.step()


def test_inputs_are_kept_in_the_dtype_that_autocast_computes_in() -> None:
    """Two layers read one input in float32. Kept are one copy of half its size and, once, what a third layer reads."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.third((self.first(x).tanh() * self.second(x)).float())

    torch.manual_seed(2)
    model = Gated()
    twin = copy.deepcopy(model)
    opt, other = ekfac.EKFAC(model), ekfac.EKFAC(twin)
    other.engine.collector.capture.casts.may_keep = lambda block: False
    steps_under_autocast(opt, model)
    steps_under_autocast(other, twin)
    assert_same_weights(parameters_of(model), parameters_of(twin), tolerance=0)
    inputs = 12 * 8 + 12 * 6
    assert other.stats()["captured_bytes"] - opt.stats()["captured_bytes"] == inputs * (4 - 2)


def test_inference_tensors_are_inputs_under_autocast() -> None:
    """Features of a frozen network, say, which autocast copies, so that autograd accepts them."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    twin = copy.deepcopy(model)
    opt, other = ekfac.EKFAC(model), ekfac.EKFAC(twin)
    buffer = torch.empty(0)
    for t in range(4):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(t))
        with torch.inference_mode():
            buffer = x.clone() if t == 0 else buffer.copy_(x)
        for of, network, inputs in ((opt, model, buffer), (other, twin, x)):
            of.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = network(inputs).float().square().mean()
            loss.backward()
            of.step()
    assert_same_weights(parameters_of(model), parameters_of(twin), tolerance=0)


def test_what_a_layer_reads_is_not_kept_alive_for_derivatives_that_no_one_takes() -> None:
    """In float32 autograd keeps the input too; under autocast it keeps a copy, and the input itself can go."""
    seen: list[weakref.ref[Tensor]] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).float().sin().detach().requires_grad_() * 1.0
            seen.append(weakref.ref(hidden))
            return self.second(hidden)

    model = Net()
    opt = ekfac.EKFAC(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(12, 8)).float().square().mean()
    assert seen[0]() is None
    loss.backward()
    opt.step()
