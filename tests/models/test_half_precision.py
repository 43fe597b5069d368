"""Half precision: bf16 parameters, autocast in bf16 and fp16 with a GradScaler, beside float32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paper import EKFAC, KFAC, Preconditioner
from zoo import PROBLEMS

MODES = ("bf16 parameters", "autocast bf16", "autocast fp16 + scaler")
#: The mean loss of the last 20 steps may differ from float32's by this share of the first loss.
TOLERANCE = 0.05


@functools.cache
def run(name: str, mode: str, steps: int) -> tuple[float, float, EKFAC]:
    """First loss, mean of the last 20, and the optimizer."""
    torch.manual_seed(0)
    problem = PROBLEMS[name]
    model = problem.build()
    if mode == "bf16 parameters":
        model = model.bfloat16()
    scaler = torch.amp.GradScaler("cpu") if "scaler" in mode else None
    opt = EKFAC(model, lr=0.03, momentum=0.5, kl_clip=0.01, refresh_every=10, grad_scaler=scaler)
    losses = []
    for (x, y), _ in zip(problem.batches(16 if steps < 50 else 32, 0), range(steps), strict=False):
        if mode == "bf16 parameters" and x.is_floating_point():
            x = x.bfloat16()
        opt.zero_grad()
        half = torch.float16 if "fp16" in mode else torch.bfloat16
        with torch.autocast("cpu", dtype=half, enabled="autocast" in mode):
            output = model(x)
        loss = problem.loss(output.float(), y)
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        losses.append(loss.item())
    return losses[0], sum(losses[-20:]) / len(losses[-20:]), opt


def assert_float32_state(opt: Any) -> None:
    for state in opt.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name != "count":
                assert value.dtype == torch.float32, name
                assert bool(torch.isfinite(value).all()), name


def assert_close_to_float32(name: str, mode: str, steps: int) -> None:
    first, end, opt = run(name, mode, steps)
    _, reference, plain = run(name, "float32", steps)
    assert end < 0.8 * first, "it must learn at all"
    assert abs(end - reference) < TOLERANCE * first
    assert_float32_state(opt)
    # Under autocast an input that is shared with float32 layers (norms) stays float32.
    share = opt.stats()["captured_bytes"] / plain.stats()["captured_bytes"]
    assert share < 0.51 if mode == "bf16 parameters" else share < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_steps_of_a_small_cnn_end_where_float32_ends(mode: str) -> None:
    assert_close_to_float32("cnn", mode, 200)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_steps_of_a_small_transformer_end_where_float32_ends(mode: str) -> None:
    assert_close_to_float32("gpt", mode, 200)


@pytest.mark.over_a_second
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "steps"), [("cnn", 60), ("gpt", 20)])
def test_a_few_steps_end_where_float32_ends(name: str, steps: int, mode: str) -> None:
    assert_close_to_float32(name, mode, steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(KFAC, {})] + [(kind, {"scaling": s}) for kind in (EKFAC, Preconditioner) for s in ("running", "per_example")],
)
def test_state_stays_float32_under_half_precision_parameters(
    dtype: torch.dtype, kind: Any, options: dict[str, str]
) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5)
    ).to(dtype)
    opt = kind(model, **options)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(6, 1, 4, 4).to(dtype)).float().square().mean().backward()
        opt.step()
        if kind is Preconditioner:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
    assert_float32_state(opt)
    assert all(p.dtype == dtype and not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["gpt", "vit", "mobilenet", "unet", "resnet"])
def test_rounding_in_half_precision_is_not_taken_for_a_gradient_from_elsewhere(name: str) -> None:
    """The check of the first step allows for what torch itself loses: LayerNorm's gradient, by a third on a CPU."""
    problem = PROBLEMS[name]
    for seed in range(3):
        torch.manual_seed(seed)
        model = problem.build().bfloat16()
        with EKFAC(model) as opt:
            x, y = next(problem.batches(32, seed))
            output = model(x.bfloat16() if x.is_floating_point() else x)
            problem.loss(output.float(), y).backward()
            opt.step()


# -------------------------------------------------------------------------------------------------- the scaler


def scaled_run(bad: int | None, clear: str = "optimizer", clip: float | None = None, **options: Any) -> list[Tensor]:
    """Five good batches in float64 through a scaler, and one with an infinity in it after ``bad`` of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    opt = EKFAC(model, lr=0.1, refresh_every=2, grad_scaler=scaler, **options)
    batches = [torch.randn(7, 3, dtype=torch.float64) for _ in range(5)]
    if bad is not None:
        batches.insert(bad, torch.full((9, 3), torch.inf, dtype=torch.float64))
    for x in batches:
        if clear == "optimizer":
            opt.zero_grad()
        else:
            model.zero_grad()
        scaler.scale(model(x).square().sum(1).mean()).backward()
        if clip is not None:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
    tensors = [p.detach() for p in model.parameters()]
    return tensors + [v for s in opt.state.values() for v in s.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("scaling", ["running", "per_example"])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_step_that_the_scaler_skips_leaves_no_trace(bad: int, clear: str, scaling: str) -> None:
    """Its statistics are dropped with its gradients: what follows is as if that batch had never been."""
    with_bad, without = (scaled_run(b, clear, scaling=scaling) for b in (bad, None))
    assert len(with_bad) == len(without)
    for one, two in zip(with_bad, without, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scaling", ["running", "per_example"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_scaled_is_unscaled(scaling: str, clip: float | None) -> None:
    """Through the scaler, with and without clipping after ``unscale_``, or without any scaler: the same steps."""
    scaled = scaled_run(None, clip=clip, scaling=scaling)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    opt = EKFAC(model, lr=0.1, refresh_every=2, scaling=scaling)
    for x in [torch.randn(7, 3, dtype=torch.float64) for _ in range(5)]:
        opt.zero_grad()
        model(x).square().sum(1).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    tensors = [p.detach() for p in model.parameters()]
    tensors += [v for s in opt.state.values() for v in s.values() if isinstance(v, Tensor)]
    for one, two in zip(scaled, tensors, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_a_scaler_that_the_optimizer_does_not_know_is_an_error_that_says_so() -> None:
    model = nn.Linear(3, 2)
    opt, scaler = EKFAC(model), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="grad_scaler="):
        scaler.step(opt)


class ChangedInPlace(nn.Module):
    """Under autocast the layer works on a copy of its input, so autograd does not mind what becomes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).float() * 1.0
        y = self.second(x)
        return y + x.mul_(3.0).sum(1, keepdim=True)


def test_an_input_that_is_changed_in_place_under_autocast_is_an_error_that_names_the_layer() -> None:
    model = ChangedInPlace()
    for options in ({}, {"exclude": "second"}):
        with EKFAC(model, **options) as opt:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(8, 4)).float().square().mean()
            if options:
                loss.backward()
                opt.step()
            else:
                with pytest.raises(RuntimeError, match=r"'second': its input was changed in place.*exclude="):
                    loss.backward()
            opt.zero_grad()
