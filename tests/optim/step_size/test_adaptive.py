"""Damping that adapts: it trusts the quadratic model where it holds, doubts it where it does not, and harms nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac import AdaptiveDamping
from ekfac.optim.step_size.adaptive_damping import Adaptation
from helpers import half_square, mlp
from paper import EKFAC, KFAC, Preconditioner

#: Together they take long.
pytestmark = pytest.mark.over_a_second

IN, OUT, N = 3, 2, 12
#: Outputs' gradients whose second moment is exactly the identity, so that the factors are those of the Hessian.
UNIT = math.sqrt(OUT) * torch.eye(OUT, dtype=torch.float64).repeat(N // OUT, 1)


def batch(seed: int, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, IN, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, OUT, generator=generator, dtype=torch.float64)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT).double()


def exact_closure(model: nn.Module, opt: Any, x: Tensor, y: Tensor, options: dict[str, Any]) -> Callable[[], Tensor]:
    """A quadratic loss whose exact Hessian is what the optimizer gets for its curvature."""

    def closure() -> Tensor:
        opt.zero_grad()
        output = model(x)
        with opt.statistics():
            unit = (output * UNIT).sum()
            (unit if "loss_reduction" in options else unit / N).backward(retain_graph=True)
        loss = half_square(output, y, options.get("loss_reduction", "mean"))
        loss = -loss if options.get("maximize") else loss
        loss.backward()
        if "clip" in options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        return loss

    return closure


EXACT = {"lr": 1.0, "factor_decay": 0.0, "refresh_every": 1}


def newton_step(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """The weights, bias last, that minimise the loss: by the normal equations."""
    h = torch.cat([x, x.new_ones(len(x), 1)], 1)
    return torch.linalg.solve(h.T @ h, h.T @ y).T


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_on_a_quadratic_damping_falls_to_its_floor_and_the_step_becomes_newtons(kind: Any) -> None:
    model = linear()
    own = {"scaling": "kronecker"} if kind is EKFAC else {}
    damping = AdaptiveDamping(start=1e4, least=1e-16, most=1e4, every=1)
    opt = kind(model, damping=damping, **EXACT, **own)
    for seed in range(200):
        x, y = batch(seed)
        opt.step(exact_closure(model, opt, x, y, {}))
    assert opt.stats()["damping"] == 1e-16
    x, y = batch(1000)
    opt.step(exact_closure(model, opt, x, y, {}))
    found = torch.cat([model.weight, model.bias[:, None]], 1)
    torch.testing.assert_close(found, newton_step(model, x, y), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": False},
        {"damping_mode": "factored"},
        {"damping_mode": "spectral"},
        {"kl_clip": 0.01},
        {"trust": 0.1},
        {"clip": 0.5},
        {"loss_reduction": "sum"},
        {"maximize": True},
    ],
    ids=str,
)
def test_the_ratio_is_one_whatever_the_update_where_the_model_is_exact(options: dict[str, Any]) -> None:
    model = linear()
    own = {k: v for k, v in options.items() if k != "clip"}
    opt = EKFAC(model, scaling="kronecker", damping=AdaptiveDamping(start=0.3, every=1), **{**EXACT, "lr": 0.2}, **own)
    for seed in range(5):
        opt.step(exact_closure(model, opt, *batch(seed), options))
        assert opt.stats()["reduction_ratio"] == pytest.approx(1.0, abs=1e-9)


def tanh_closure(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = half_square(model(x), y)
        loss.backward()
        return loss

    return closure


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return mlp(IN, 8, 8, OUT)


@pytest.mark.rounding
def test_where_the_model_is_bad_damping_rises_and_the_loss_falls() -> None:
    losses = {}
    for name, damping in {"adaptive": AdaptiveDamping(start=1e-8, every=1), "fixed": 1e-8}.items():
        model = network()
        opt = EKFAC(model, lr=1.0, damping=damping)
        closure = tanh_closure(model, opt, *batch(0))
        first = float(closure().detach())
        for _ in range(60):
            losses[name] = float(opt.step(closure).detach()) / first
        if name == "adaptive":
            assert opt.stats()["damping"] > 1e-4 and opt.stats()["undone_steps"] > 5
    assert losses["adaptive"] < 0.5 < losses["fixed"]


def test_a_step_that_is_undone_leaves_weights_and_momentum_as_they_were() -> None:
    model = network()
    opt = EKFAC(model, lr=1.0, momentum=0.9, damping=AdaptiveDamping(start=1e-8, every=2))
    before = copy.deepcopy(model.state_dict())
    closure = tanh_closure(model, opt, *batch(0))
    for step in range(5):
        opt.step(closure)
        assert opt.stats()["undone_steps"] == step + 1, "steps after one that was undone are all compared"
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(not opt.state[p]["momentum_buffer"].any() for p in model.parameters())


def test_a_step_that_is_undone_leaves_the_average_as_it_was() -> None:
    """It would lie on the other side of the weights, as far away as the step had gone."""
    model = network()
    opt = EKFAC(model, lr=0.02, damping=AdaptiveDamping(start=1e-1, every=1), average=True)
    closure = tanh_closure(model, opt, *batch(0))
    for _ in range(30):
        opt.step(closure)
    before, undone = copy.deepcopy(model.state_dict()), opt.stats()["undone_steps"]
    opt.param_groups[0]["lr"] = 1e4
    opt.step(closure)
    assert opt.stats()["undone_steps"] == undone + 1
    for name, p in model.state_dict().items():
        torch.testing.assert_close(p, before[name], rtol=1e-10, atol=1e-12)


@pytest.mark.over_a_second
@pytest.mark.parametrize("n", [1, 2])
def test_tiny_batches_do_not_throw_damping_about(n: int) -> None:
    model = network()
    opt = EKFAC(model, lr=0.1, damping=AdaptiveDamping(start=1e-1, every=1))
    target = network()
    seen = []
    for seed in range(250):
        x, noise = batch(seed, n)
        opt.step(tanh_closure(model, opt, x, target(x).detach() * 2 + 0.1 * noise))
        seen.append(opt.stats()["damping"])
    assert min(seen[50:]) > 1e-6 and max(seen) < 10
    assert max(seen[150:]) / min(seen[150:]) < 1e3


@pytest.mark.parametrize(
    ("outcome", "goes_on", "damping", "finally_"),
    [
        ((1.0, -2.0, 2.0), True, 0.5, 1 / 8),  # as foreseen
        ((1e9, -2.0, 2.0), True, 0.5, 1 / 8),  # better than foreseen
        ((0.5, -2.0, 2.0), True, 1.0, 1.0),  # half of what was foreseen
        ((0.1, -2.0, 2.0), True, 2.0, 64.0),
        ((-0.1, -2.0, 2.0), True, 2.0, 64.0),
        ((-1e9, -2.0, 2.0), False, 16.0, 64.0),  # far higher than foreseen: undone
        ((-math.inf, -2.0, math.inf), False, 16.0, 64.0),
        ((math.nan, math.nan, 1.0), False, 16.0, 64.0),
        ((-2.0, 2.0, 0.1), True, 2.0, 64.0),  # a rise that was foreseen: momentum went uphill
        ((2.0, 2.0, 0.1), True, 1.0, 1.0),  # a fall where none was foreseen
        ((0.0, 0.0, 0.0), True, 1.0, 1.0),  # nothing has moved
    ],
)
def test_what_one_comparison_does(
    outcome: tuple[float, float, float], goes_on: bool, damping: float, finally_: float
) -> None:
    """By how much the loss fell, G.d and d^T C d: then damping after one such step, and after many."""
    adaptation = Adaptation(AdaptiveDamping(start=1.0, least=1 / 8, most=64.0, omega=0.5, decay=0.0))
    assert adaptation.learn(*outcome) == goes_on
    assert adaptation.damping == damping and adaptation.undone_steps == (not goes_on)
    for _ in range(20):
        adaptation.learn(*outcome)
    assert adaptation.damping == finally_


def test_steps_are_compared_one_by_one_at_first_and_after_one_that_was_undone() -> None:
    adaptation = Adaptation(AdaptiveDamping(start=1.0, every=3))
    good, bad = (1.0, -2.0, 2.0), (-9.0, -2.0, 2.0)
    compared = []
    for step in range(15):
        if adaptation.due(step):
            compared.append(step)
            adaptation.learn(*(bad if step == 6 else good))
    assert compared == [0, 1, 2, 3, 6, 7, 8, 9, 12]


def test_a_single_outlier_is_forgotten_soon() -> None:
    adaptation = Adaptation(AdaptiveDamping(start=1.0))
    adaptation.learn(-1e30, -1e-3, 1e-3)
    for _ in range(30):
        adaptation.learn(1.0, -2.0, 2.0)
    assert adaptation.damping < 1.0 and adaptation.ratio > 0.75


# --- the second evaluation harms nothing ----------------------------------------------------------------------------


def noisy_network() -> nn.Sequential:
    torch.manual_seed(2)
    layers = nn.Linear(IN, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, OUT)
    return nn.Sequential(*layers).double()


def plain_form(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Callable[[], Any]:
    return tanh_closure(model, opt, x, y)


def zeroing_form(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Callable[[], Any]:
    def closure() -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = half_square(model(x), y)
        loss.backward()
        return loss

    return closure


def number_form(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Callable[[], Any]:
    def closure() -> float:
        opt.zero_grad()
        loss = half_square(model(x), y)
        loss.backward()
        return loss.item()

    return closure


def accumulating_form(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> Callable[[], Any]:
    def closure() -> Tensor:
        opt.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in (slice(0, 6), slice(6, N)):
            loss = half_square(model(x[part]), y[part]) / 2
            loss.backward()
            total += loss.detach()
        return total

    return closure


@pytest.mark.parametrize("form", [plain_form, zeroing_form, number_form, accumulating_form])
@pytest.mark.parametrize("defaults", [True, False])
def test_a_damping_without_room_is_a_number(form: Any, defaults: bool) -> None:
    """Weights, gradients, buffers, optimizer state and random numbers are those of a run that never looks again."""
    ends = []
    for damping in (0.01, AdaptiveDamping(start=0.01, least=0.01, most=0.01, every=2)):
        model = noisy_network()
        kind = ekfac.EKFAC if defaults else EKFAC
        opt = kind(model, damping=damping, momentum=0.5, refresh_every=3)
        for seed in range(7):
            loss = opt.step(form(model, opt, *batch(seed)))
        gradients = [p.grad.clone() for p in model.parameters()]
        state = opt.state_dict()
        ends.append([*model.state_dict().values(), *gradients, torch.as_tensor(loss), torch.rand(3),
                     *(v for s in state["state"].values() for v in s.values() if isinstance(v, Tensor))])  # fmt: skip
    assert len(ends[0]) == len(ends[1])
    for one, two in zip(*ends, strict=True):
        assert torch.equal(one, two)


def test_dropout_draws_the_same_mask_twice() -> None:
    """Else the ratio would compare two networks: with the update made as small as nothing it is 1 all the same."""
    model = noisy_network()
    opt = EKFAC(model, lr=1e-6, damping=AdaptiveDamping(start=1.0, every=1))
    opt.step(tanh_closure(model, opt, *batch(0)))
    assert opt.stats()["reduction_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_closure_that_raises_leaves_gradients_and_capture_in_order() -> None:
    model = network()
    opt = EKFAC(model, damping=AdaptiveDamping(start=1.0))
    x, y = batch(0)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return tanh_closure(model, opt, x, y)()

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert all(p.grad is not None for p in model.parameters())
    opt.step(closure)
    assert opt.stats()["steps"] == 1


# --- groups, checkpoints, copies --------------------------------------------------------------------------------------


def test_groups_share_one_damping_and_others_keep_their_own() -> None:
    model = network()
    shared = AdaptiveDamping(start=1.0, every=1)
    opt = EKFAC(
        model,
        params=[
            {"params": list(model[0].parameters())},
            {"params": list(model[2].parameters()), "damping": 0.3},
            {"params": list(model[4].parameters()), "damping": AdaptiveDamping(start=1.0, every=1)},
        ],
        damping=shared,
    )
    for seed in range(6):
        opt.step(tanh_closure(model, opt, *batch(seed)))
    first, own, third = (group["damping"] for group in opt.param_groups)
    assert first == third != 1.0 and own == 0.3


def test_damping_of_its_own_in_every_group_needs_no_closure() -> None:
    model = network()
    opt = EKFAC(model, params=[{"params": list(model.parameters()), "damping": 0.1}], damping=AdaptiveDamping())
    tanh_closure(model, opt, *batch(0))()
    opt.step()
    assert opt.stats()["damping"] == 0.1


@pytest.mark.rounding
@pytest.mark.parametrize("at", [1, 4, 5, 9])
@pytest.mark.parametrize("copied", ["state", "deepcopy"])
def test_a_run_that_was_saved_goes_on_as_if_it_was_not(at: int, copied: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = network()
        return model, EKFAC(model, lr=0.5, damping=AdaptiveDamping(start=1e-4, every=2), refresh_every=3)

    def run(model: nn.Module, opt: Any, first: int, last: int) -> None:
        for seed in range(first, last):
            opt.step(tanh_closure(model, opt, *batch(seed)))

    model, opt = build()
    run(model, opt, 0, at)
    if copied == "state":
        other, resumed = build()
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    else:
        resumed = copy.deepcopy(opt)
        other = resumed.model
    run(model, opt, at, 14)
    run(other, resumed, at, 14)
    assert opt.state_dict()["ekfac"]["adaptive_damping"] == resumed.state_dict()["ekfac"]["adaptive_damping"]
    assert opt.stats()["damping"] == resumed.stats()["damping"] != 1e-4
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_of_a_fixed_damping_can_go_on_adapting() -> None:
    model = network()
    opt = EKFAC(model, damping=0.1)
    opt.step(tanh_closure(model, opt, *batch(0)))
    new = EKFAC(model, damping=AdaptiveDamping(start=0.5, every=1))
    new.load_state_dict(opt.state_dict())
    new.step(tanh_closure(model, new, *batch(1)))
    assert new.stats()["damping"] in (0.5, 0.5 * 0.75, 0.5 / 0.75)


# --- all rules, all layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["anchored", "running", "per_example", "kronecker", "adam", "rmsprop", "adagrad"])
@pytest.mark.parametrize("start", [1e-8, 1e2])
@pytest.mark.parametrize("options", [{}, {**ekfac.PAPER, "lr": 1.0}], ids=["defaults", "paper"])
def test_no_rule_leaves_the_finite_numbers(scaling: str, start: float, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.PReLU(), nn.LayerNorm(6), nn.Linear(6, OUT)).double()
    opt = ekfac.EKFAC(model, **{**options, "scaling": scaling, "damping": AdaptiveDamping(start=start)})
    for seed in range(20):
        opt.step(tanh_closure(model, opt, *batch(seed)))
    assert all(p.isfinite().all() for p in model.parameters())
    assert math.isfinite(opt.stats()["damping"]) and opt.stats()["skipped_steps"] == 0


@pytest.mark.parametrize("options", [{}, {"sua": True}, {"max_factor_dim": 4}, {"sua": True, "max_factor_dim": 3}])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_the_bend_is_that_of_the_curvature_as_an_operator(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 4), nn.PReLU()
    ).double()
    opt = kind(model, **options)
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(9, 2, 5, 5, dtype=torch.float64)).square().sum(1).mean().backward()
        opt.step()
    engine = opt.engine
    d = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    found = sum(
        float(
            engine.method_of(b).quadratic_form(
                b, opt.state[b.key], b.stack(d[name] for name in b.parameter_names.values())
            )
        )
        for b in engine.partition.blocks
    )
    if kind is KFAC:  # its inverses are older than its factors
        for b in engine.partition.blocks:
            if b.covered:
                state, weight = opt.state[b.key], opt.state[b.key]["factor_weight"]
                state["A"], state["B"] = state["inverted_A"] * weight, state["inverted_B"] * weight
    assert found == pytest.approx(float(opt.curvature().quadratic(d)), rel=1e-9)


# --- bad input --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{
        f"{name}={value}": (lambda name=name, value=value: AdaptiveDamping(**{name: value}), (name, str(value)))
        for name, values in {
            "start": [0.0, -1.0, math.nan, "large"],
            "least": [0.0, math.inf, "small"],
            "most": [0.0, math.nan],
            "every": [0, -1, 2.5, True],
            "omega": [0.0, 1.0, 2.0, math.nan],
            "decay": [-0.1, 1.0, math.nan],
        }.items()
        for value in values
    },
    "start below least": (lambda: AdaptiveDamping(start=1e-9, least=1e-6), ("start", "1e-09", "least", "1e-06")),
    "start above most": (lambda: AdaptiveDamping(start=10.0, most=1.0), ("start", "10.0", "most", "1.0")),
    "a preconditioner": (lambda: Preconditioner(network(), damping=AdaptiveDamping()), ("damping", "AdaptiveDamping")),
    "two that differ": (
        lambda: EKFAC(
            model := network(),
            params=[
                {"params": list(model[:2].parameters())},
                {"params": list(model[2:].parameters()), "damping": AdaptiveDamping(every=3)},
            ],
            damping=AdaptiveDamping(),
        ),
        ("damping", "every=3", "every=5"),
    ),
    "a step without a closure": (lambda: EKFAC(network(), damping=AdaptiveDamping()).step(), ("closure", "backward")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    do, words = BAD[name]
    with pytest.raises(ValueError, match=r".") as caught:
        do()
    for word in words:
        assert word in str(caught.value)


def test_a_closure_that_returns_no_loss_is_refused_before_anything_changes() -> None:
    model = network()
    opt = EKFAC(model, damping=AdaptiveDamping())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="returned None"):
        opt.step(lambda: tanh_closure(model, opt, *batch(0))() and None)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [ekfac.EKFAC, EKFAC, KFAC])
def test_on_a_gpu_steps_in_graphs_learn_too(kind: Any) -> None:
    """The same run as without graphs; a skipped step teaches nothing."""
    ends = []
    for cuda_graphs in (True, False):
        model = network().cuda()
        opt = kind(model, damping=AdaptiveDamping(start=1e-2, every=3), cuda_graphs=cuda_graphs, refresh_every=5)
        for seed in range(30):
            x, y = (t.cuda() for t in batch(seed))
            opt.step(tanh_closure(model, opt, x, y if seed != 24 else y * math.nan))
        stats = opt.stats()
        assert stats["skipped_steps"] == 1 and stats["damping"] != 1e-2
        ends.append((stats["damping"], torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert ends[0][0] == ends[1][0]
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-6, atol=1e-8)
