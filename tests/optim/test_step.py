"""Every rule, damping, sharing and reduction against the oracle, over random shapes of Linear and Conv2d."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import (
    LOSSES,
    assert_same_weights,
    backward,
    bases_of,
    batches_for,
    compare_with_oracle,
    jittered,
    make_pair,
    mlp,
    parameters_of,
)
from paper import EKFAC, KFAC

RULES: dict[str, dict[str, Any]] = {
    "per_example": {"scaling": "per_example", "scaling_decay": 0.0},
    "per_example, averaged": {"scaling": "per_example", "scaling_decay": 0.7},
    "per_example, restarted": {"scaling": "per_example", "scaling_decay": 0.7, "on_refresh": "kronecker"},
    "running": {"scaling": "running", "scaling_decay": 0.8},
    "running, carried": {"scaling": "running", "scaling_decay": 0.8, "on_refresh": "carry"},
    "kronecker": {"scaling": "kronecker"},
}
KFACS: dict[str, dict[str, Any]] = {
    "KFAC": {"optimizer": "KFAC", "pi_correction": True},
    "KFAC without pi": {"optimizer": "KFAC", "pi_correction": False},
}
DAMPINGS = ["plain", "factored", "relative"]
# Three steps, the basis renewed at the first and the third: starting, using and carrying are all seen.
COMMON: dict[str, Any] = {"lr": 0.1, "damping": 0.03, "refresh_every": 2, "factor_decay": 0.6}
CASES = [(rule, mode) for rule in RULES for mode in DAMPINGS]


class Spread(nn.Module):
    """Weights every output position differently, so that positions cannot be mistaken for one another."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return flat * torch.linspace(0.5, 1.5, flat.shape[1], dtype=x.dtype)


@st.composite
def linear_problems(draw: st.DrawFn) -> dict[str, Any]:
    widths = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
    middle = draw(st.lists(st.integers(1, 3), max_size=2))  # 2-D, 3-D and 4-D inputs
    return {
        "model": nn.Sequential(mlp(*widths, bias=draw(st.booleans())), Spread()),
        "shape": (*middle, widths[0]),
        "n": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 999)),
    }


@st.composite
def convolution_problems(draw: st.DrawFn) -> dict[str, Any]:
    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, stride, padding, dilation = pair(1, 3), pair(1, 2), pair(0, 2), pair(1, 2)
    channels = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [max(1, r - 2 * p) + draw(st.integers(0, 3)) for r, p in zip(reach, padding, strict=True)]
    convolution = nn.Conv2d(*channels, kernel, stride, padding, dilation, bias=draw(st.booleans()))
    return {
        "model": nn.Sequential(convolution, nn.Tanh(), Spread()),
        "shape": (channels[0], *size),
        "n": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 999)),
    }


def check(problem: dict[str, Any], **options: Any) -> None:
    torch.manual_seed(problem["seed"])
    model = jittered(problem["model"])
    steps = batches_for(model, problem["shape"], n=problem["n"], steps=3, seed=problem["seed"])
    compare_with_oracle(model, LOSSES[options.get("loss_reduction", "mean")], steps, **{**COMMON, **options})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("rule", "damping_mode"), CASES)
@settings(max_examples=5)
@given(problem=linear_problems(), loss_reduction=st.sampled_from(["mean", "sum"]))
def test_linear(rule: str, damping_mode: str, sharing: str, problem: dict[str, Any], loss_reduction: str) -> None:
    check(problem, damping_mode=damping_mode, sharing=sharing, loss_reduction=loss_reduction, **RULES[rule])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("rule", "damping_mode"), CASES)
@settings(max_examples=5)
@given(problem=convolution_problems(), loss_reduction=st.sampled_from(["mean", "sum"]))
def test_conv2d(rule: str, damping_mode: str, sharing: str, problem: dict[str, Any], loss_reduction: str) -> None:
    check(problem, damping_mode=damping_mode, sharing=sharing, loss_reduction=loss_reduction, **RULES[rule])


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", KFACS)
@settings(max_examples=6)
@given(problem=st.one_of(linear_problems(), convolution_problems()))
def test_kfac_inverse(kind: str, sharing: str, loss_reduction: str, problem: dict[str, Any]) -> None:
    check(problem, sharing=sharing, loss_reduction=loss_reduction, **KFACS[kind])


@pytest.mark.parametrize("basis", ["identity", None])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=4)
@given(problem=st.one_of(linear_problems(), convolution_problems()))
def test_basis_may_be_the_identity(rule: str, basis: str | None, problem: dict[str, Any]) -> None:
    check(problem, **RULES[rule], **({} if basis is None else {"basis": basis}))


# ------------------------------------------------------------------------------- what the update is made of


UPDATES: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "decoupled weight decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "L2": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "L2 and momentum": {"weight_decay": 0.1, "decoupled_weight_decay": False, "momentum": 0.9},
    "KL clip": {"kl_clip": 1e-3},
    "KL clip and momentum": {"kl_clip": 1e-3, "momentum": 0.9, "nesterov": True},
    "KL clip that never binds": {"kl_clip": 1e9},
    "maximize": {"maximize": True},
    "maximize with L2": {"maximize": True, "weight_decay": 0.1, "decoupled_weight_decay": False},
    "factors of one batch alone": {"factor_decay": 0.0},
    "scaling of one batch alone": {"scaling_decay": 0.0},
}


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
@pytest.mark.parametrize("update", UPDATES)
def test_update(update: str, rule: str, loss_reduction: str) -> None:
    options = {**COMMON, **({**RULES, **KFACS}[rule]), **UPDATES[update], "loss_reduction": loss_reduction}
    if rule == "KFAC":
        options.pop("scaling_decay", None)
    model = mlp(3, 5, 4)
    compare_with_oracle(model, LOSSES[loss_reduction], batches_for(model, (3,), n=7, steps=6), **options)


class WithFreeParameters(nn.Module):
    """A Linear layer between parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.inner = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.inner(x + self.shift))


@pytest.mark.parametrize("damping_mode", DAMPINGS)
@pytest.mark.parametrize("rule", ["running", "per_example, averaged", "kronecker", "KFAC"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_parameters_without_a_block(rule: str, damping_mode: str, loss_reduction: str) -> None:
    options = {**COMMON, **({**RULES, **KFACS}[rule]), "loss_reduction": loss_reduction, "kl_clip": 0.01}
    if rule != "KFAC":
        options["damping_mode"] = damping_mode
    model = jittered(WithFreeParameters())
    compare_with_oracle(model, LOSSES[loss_reduction], batches_for(model, (3,), steps=5), **options)


@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_groups_have_their_own_options(rule: str) -> None:
    model = mlp(3, 5, 4)
    groups = [
        (["0.weight"], {"lr": 0.2, "damping": 0.1, "weight_decay": 0.2}),
        (["0.bias"], {"lr": 0.05, "damping": 0.1, "momentum": 0.9}),
        (["2.weight", "2.bias"], {}),
    ]
    options = {**COMMON, **({**RULES, **KFACS}[rule])}
    compare_with_oracle(model, LOSSES["mean"], batches_for(model, (3,), steps=5), groups=groups, **options)


def test_kl_clip_takes_each_groups_own_learning_rate() -> None:
    model = mlp(3, 5, 4)
    groups = [(["0.weight", "0.bias"], {"lr": 1.0}), (["2.weight", "2.bias"], {"lr": 0.01})]
    steps = batches_for(model, (3,), steps=4)
    compare_with_oracle(model, LOSSES["mean"], steps, groups=groups, kl_clip=1e-3, **COMMON)


# ------------------------------------------------------------------- what counts as an example, and gradients


@pytest.mark.parametrize("rule", ["running", "per_example", "per_example, averaged", "kronecker", "KFAC"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_batch_sizes_may_change_and_batches_may_come_in_pieces(rule: str, loss_reduction: str) -> None:
    """Undivided mean losses of micro-batches too: N counts all examples, whatever the loss is divided by."""
    model = mlp(3, 5, 2)
    draw = batches_for(model, (3,), n=20, steps=4)
    sizes = [[4], [9, 2], [1, 1, 1], [20]]
    steps = []
    for ((x, y),), cut in zip(draw, sizes, strict=True):
        total = sum(cut)
        steps.append(list(zip(x[:total].split(cut), y[:total].split(cut), strict=True)))
    compare_with_oracle(
        model,
        LOSSES[loss_reduction],
        steps,
        loss_reduction=loss_reduction,
        **COMMON,
        **({**RULES, **KFACS}[rule]),
    )


@pytest.mark.parametrize("scale", [0.1, 1e-3, 3.0])
@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_a_rescaled_gradient_moves_the_weights_and_not_s(rule: str, scale: float) -> None:
    """The oracle feeds s with the gradient as backward left it and preconditions what the user made of it."""
    model = mlp(3, 5, 4)
    compare_with_oracle(
        model,
        LOSSES["mean"],
        batches_for(model, (3,), steps=5),
        transform=lambda grads: {name: scale * g for name, g in grads.items()},
        **COMMON,
        **({**RULES, **KFACS}[rule]),
    )


@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_flattened_sequences(rule: str) -> None:
    """A layer that sees [N k, D] sees N examples of k positions each."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(3, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    model = jittered(Flattened())
    options = {**COMMON, **({**RULES, **KFACS}[rule])}
    _, oracle = compare_with_oracle(model, LOSSES["mean"], batches_for(model, (5, 3), steps=4), **options)
    assert oracle.blocks["inner.0.weight"].a.shape == (1, 4, 4)


@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_batch_dim_names_the_dimension_of_examples(rule: str) -> None:
    """Sequence-first data and layers give the weights of the same data with examples first."""
    model, twin = mlp(3, 4, 2), mlp(3, 4, 2)
    twin.load_state_dict(model.state_dict())
    options = {**COMMON, **({**RULES, **KFACS}[rule])}
    kind = KFAC if options.pop("optimizer", "EKFAC") == "KFAC" else EKFAC
    first, second = kind(model, batch_dim=1, **options), kind(twin, **options)
    for ((x, y),) in batches_for(twin, (5, 3), n=6, steps=5):
        for net, opt, given_x, given_y in (
            (model, first, x.transpose(0, 1), y.transpose(0, 1)),
            (twin, second, x, y),
        ):
            opt.zero_grad()
            (0.5 * (net(given_x) - given_y).square().sum() / len(x)).backward()
            opt.step()
    assert_same_weights(parameters_of(model), parameters_of(twin), 1e-12)


@pytest.mark.parametrize("rule", ["running", "per_example", "kronecker"])
def test_statistics_of_another_loss(rule: str) -> None:
    """Factors and s* from a sampled loss's backward.

    The gradient from the training loss, and `.grad` left alone.
    """
    model = mlp(3, 5, 4)
    opt, oracle = make_pair(model, LOSSES["mean"], **COMMON, **RULES[rule])
    for ((x, y),) in batches_for(model, (3,), n=9, steps=5):
        sampled = y + torch.randn_like(y)
        opt.zero_grad()
        output = model(x)
        with opt.statistics():
            (0.5 * (output - sampled).square().sum() / len(x)).backward(retain_graph=True)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        (0.5 * (output - y).square().sum() / len(x)).backward()
        opt.step()
        expected = oracle.step([(x, y)], bases=bases_of(opt, model), statistics=(LOSSES["mean"], [(x, sampled)]))
        assert_same_weights(parameters_of(model), expected, 1e-9)


def test_damping_may_be_a_function_of_the_step() -> None:
    """It takes effect at the next step, whatever the refresh; the group holds its current number."""
    model = mlp(3, 5, 4)
    schedule = {"damping": lambda step: 0.5 * 0.7**step, "refresh_every": 10, "lr": 0.1}
    opt, _ = compare_with_oracle(model, LOSSES["mean"], batches_for(model, (3,), steps=5), **schedule)
    assert opt.param_groups[0]["damping"] == pytest.approx(0.5 * 0.7**4)


@pytest.mark.parametrize("rule", ["running", "kronecker", "KFAC"])
def test_a_changed_damping_takes_effect_at_once(rule: str) -> None:
    model = mlp(3, 5, 4)
    opt, oracle = make_pair(
        model,
        LOSSES["mean"],
        **{**COMMON, "refresh_every": 100, "factor_decay": 0.0, **({**RULES, **KFACS}[rule])},
    )
    ((x, y),) = batches_for(model, (3,), steps=1)[0]
    for number in range(4):
        for group in opt.param_groups:
            group["damping"] = 0.5 / 4**number
        oracle.damping = 0.5 / 4**number
        opt.zero_grad()
        backward(model, LOSSES["mean"], [(x, y)])
        opt.step()
        bases = None if rule == "KFAC" else bases_of(opt, model)
        assert_same_weights(parameters_of(model), oracle.step([(x, y)], bases=bases), 1e-9)
