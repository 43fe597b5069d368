"""Autocast, dtypes, checkpoints, and what an optimizer leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac import EKFAC, KFAC
from loops import X, Y, assert_same, loss_of, mlp, usual


@pytest.mark.parametrize(
    "build",
    [EKFAC, KFAC, lambda m: EKFAC(m, **ekfac.PAPER), lambda m: EKFAC(m, scaling="per_example")],
    ids=["default", "KFAC", "paper", "per_example"],
)
def test_the_step_may_be_taken_inside_autocast(build: Callable[[nn.Module], Any]) -> None:
    models = [mlp(), mlp()]
    opts = [build(m) for m in models]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            opts[0].zero_grad()
            loss = loss_of(models[0])
            loss.backward()
            opts[0].step()
        opts[1].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(models[1])
        loss.backward()
        opts[1].step()
    assert_same(*models)


@pytest.mark.parametrize("start", [torch.float32, torch.float64])
@pytest.mark.parametrize("end", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_checkpoint_goes_into_another_dtype(kind: Any, start: torch.dtype, end: torch.dtype) -> None:
    model = mlp().to(start)
    opt = kind(model, momentum=0.9)

    def step(model: nn.Module, opt: Any, dtype: torch.dtype) -> None:
        opt.zero_grad()
        F.cross_entropy(model(X.to(dtype)).float(), Y).backward()
        opt.step()

    for _ in range(3):
        step(model, opt, start)
    other = mlp().to(end)
    other.load_state_dict(model.state_dict())
    new = kind(other, momentum=0.9)
    new.load_state_dict(opt.state_dict())
    step(other, new, end)
    step(model, opt, start)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q.float(), rtol=0.05, atol=0.02)


def test_kfac_goes_on_with_the_factors_of_its_last_refresh() -> None:
    def build(model: nn.Module) -> KFAC:
        return KFAC(model, damping=lambda t: 1e-2 * 0.5 ** ((t + 5) // 10), refresh_every=4)

    model = mlp().double()
    opt = build(model)

    def steps(model: nn.Module, opt: Any, count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            F.cross_entropy(model(X.double()), Y).backward()
            opt.step()

    steps(model, opt, 7)
    other = copy.deepcopy(model)
    new = build(other)
    new.load_state_dict(opt.state_dict())
    steps(model, opt, 20)
    steps(other, new, 20)
    assert_same(model, other)


def test_the_second_look_of_adaptive_damping_is_inside_autocast_too() -> None:
    model = mlp()
    opt = EKFAC(model, **{**ekfac.PAPER, "damping": ekfac.AdaptiveDamping(start=1.0, every=1)})
    dtypes = []

    def closure() -> Tensor:
        opt.zero_grad()
        out = model(X)
        dtypes.append(out.dtype)
        loss = F.cross_entropy(out.float(), Y)
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        opt.step(closure)
    assert dtypes == [torch.bfloat16] * 2


def test_a_checkpoint_with_other_groups_changes_nothing() -> None:
    model = mlp()
    two = EKFAC(model, params=[{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    usual(model, two)
    other = mlp()
    one = EKFAC(other)
    with pytest.raises(ValueError, match="state_dict has groups of 2, 2 parameters, this optimizer of 4"):
        one.load_state_dict(two.state_dict())
    assert one.stats()["steps"] == 0 and not one.state


def test_checkpoints_of_the_other_method_are_refused() -> None:
    model = mlp()
    opt = KFAC(model)
    usual(model, opt)
    with pytest.raises(ValueError, match="state_dict is of KFAC, this is EKFAC"):
        EKFAC(mlp()).load_state_dict(opt.state_dict())


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "default": EKFAC,
    "running": lambda m: EKFAC(m, scaling="running", damping=1e-2),
    "per_example": lambda m: EKFAC(m, scaling="per_example", damping=1e-2),
    "adam": lambda m: EKFAC(m, scaling="adam"),
    "sum": lambda m: EKFAC(m, batch=ekfac.Batch(reduction="sum")),
    "reduce": lambda m: EKFAC(m, coverage=ekfac.Coverage(sharing="reduce")),
}


@pytest.mark.parametrize("saved", RULES)
@pytest.mark.parametrize("loaded", RULES)
def test_state_of_another_rule_or_reduction_is_refused(saved: str, loaded: str) -> None:
    model, other = mlp(), mlp()
    opt = RULES[saved](model)
    usual(model, opt)
    new = RULES[loaded](other)
    if saved == loaded:
        new.load_state_dict(opt.state_dict())
        return
    with pytest.raises(ValueError, match=r"'settings', '(rule|reduction|sharing)': it was saved with"):
        new.load_state_dict(opt.state_dict())
    assert not new.state and new.stats()["steps"] == 0


def _all_tensors(state: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        if isinstance(value, Tensor):
            yield (*at, key)
        else:
            yield from _all_tensors(value, (*at, key))


@pytest.mark.parametrize("change", ["shape", "NaN", "complex", "integers", "missing", "text"])
@pytest.mark.parametrize("kind", [EKFAC, KFAC, ekfac.Preconditioner, lambda m: EKFAC(m, **ekfac.PAPER, momentum=0.9)])
def test_every_tensor_of_a_checkpoint_is_looked_at(kind: Any, change: str) -> None:
    """Whichever of them is changed, the error names its block and its key, and the optimizer is as it was."""
    changes: dict[str, Callable[[Tensor], Any]] = {
        "shape": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]),
        "NaN": lambda t: torch.full_like(t, torch.nan),
        "complex": lambda t: t.to(torch.complex64),
        "integers": lambda t: t.long(),
        "text": lambda t: "abc",
    }
    model, other = mlp(), mlp()
    model[0].bias.requires_grad_(False)
    opt, new = kind(model), kind(other)
    usual(model, opt)
    model.requires_grad_(True)
    for _ in range(2):
        usual(model, opt)
        usual(other, new)
    saved = opt.state_dict()
    before = copy.deepcopy(new.state_dict())
    places = list(_all_tensors({"state": saved["state"], "ekfac": saved["ekfac"]}))
    assert {at[-1] for at in places} >= ({"inverse_A"} if kind is KFAC else {"U_A", "S_B", "s"})
    assert any(at[1] == "put_away" for at in places), "the layer without its bias, of the first step"
    for at in places:
        if change == "integers" and at[-1] in ("count", "examples"):
            continue
        broken = copy.deepcopy(saved)
        inner: Any = broken
        for key in at[:-1]:
            inner = inner[key]
        if change == "missing":
            del inner[at[-1]]
        else:
            inner[at[-1]] = changes[change](inner[at[-1]])
        if change == "missing" and (at[1] == "put_away" and at[-1] in ("m", "count", "examples", "usual")):
            continue  # what began to be averaged later may not be there yet
        with pytest.raises(ValueError, match=r"state_dict.*" + ("lacks" if change == "missing" else f"'{at[-1]}'")):
            new.load_state_dict(broken)
    after = new.state_dict()
    assert str(after) == str(before)


@pytest.mark.parametrize("kind", [EKFAC, KFAC, ekfac.Preconditioner, lambda m: EKFAC(m, **ekfac.PAPER, momentum=0.9)])
@pytest.mark.parametrize("part", ["layer", "bias", "norm"])
@pytest.mark.parametrize("frozen", ["when it was saved", "when it is loaded"])
def test_a_checkpoint_across_a_freeze_loses_nothing(kind: Any, part: str, frozen: str) -> None:
    """Saved with a layer frozen and loaded without, or the other way about: as if it had been one training."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def frozen_part(net: nn.Sequential) -> Any:
        return {"layer": net[0], "bias": net[0].bias, "norm": net[1]}[part]

    def steps(net: nn.Module, opt: Any, count: int) -> None:
        sgd = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(count):
            opt.zero_grad()
            F.cross_entropy(net(X.double()), Y).backward()
            opt.step()
            if isinstance(opt, ekfac.Preconditioner):
                sgd.step()

    model = build()
    opt = kind(model)
    steps(model, opt, 3)
    if frozen == "when it was saved":
        frozen_part(model).requires_grad_(False)
        steps(model, opt, 2)
    saved = copy.deepcopy(opt.state_dict())

    other = build()
    other.load_state_dict(model.state_dict())
    if frozen == "when it is loaded":
        frozen_part(other).requires_grad_(False)
        frozen_part(model).requires_grad_(False)
    new = kind(other)
    new.load_state_dict(saved)
    if frozen == "when it is loaded":
        steps(model, opt, 2)
        steps(other, new, 2)
    for net, one in ((model, opt), (other, new)):
        net.requires_grad_(True)
        steps(net, one, 3)
    assert_same(model, other)


@pytest.mark.parametrize("kind", [EKFAC, KFAC, ekfac.Preconditioner])
def test_an_optimizer_says_that_it_cannot_be_pickled(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} has hooks.*save its state_dict"):
        pickle.dumps(kind(mlp()))
    copy.deepcopy(kind(mlp()))


def test_optimizers_that_are_gone_leave_no_hooks() -> None:
    model = mlp()
    for _ in range(3):
        opt = EKFAC(model)
        usual(model, opt)
        del opt
    gc.collect()
    assert not model[0]._forward_hooks and not model._forward_hooks and not model._forward_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_an_input_whose_square_overflows_is_not_remembered(kind: Any) -> None:
    model = mlp()
    opt = kind(model, refresh_every=5)
    usual(model, opt)
    opt.zero_grad()
    x = X.clone()
    x[0] = 1e25
    F.cross_entropy(model(x), Y).backward()
    opt.step()
    for _ in range(20):
        usual(model, opt)
    assert torch.isfinite(opt.state[model[0].weight]["A"]).all()
    assert loss_of(model) < 1.2


@pytest.mark.parametrize("scale", [1e10, 1e16])
@pytest.mark.parametrize("kind", [EKFAC, KFAC, lambda m: EKFAC(m, **{**ekfac.PAPER, "refresh_every": 2})])
def test_a_state_of_large_inputs_is_taken_back(kind: Any, scale: float) -> None:
    """Squares of their factors overflow: how far a basis has drifted is known all the same."""
    model = mlp()
    opt = kind(model)
    for step in range(6):
        x = torch.randn(8, model[0].in_features, generator=torch.Generator().manual_seed(step)) * scale
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    assert 0 <= opt.stats()["residual_drift"] < 1.5
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def test_many_skipped_steps_in_a_row_are_said_once() -> None:
    model = mlp()
    opt = EKFAC(model)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            usual(model, opt)
    assert [w for w in caught if "steps were skipped" in str(w.message)][1:] == []
    assert any("the last 20 steps were skipped" in str(w.message) for w in caught)
