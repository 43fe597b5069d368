"""Options in groups, their names from before, rules as objects."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import ekfac
from ekfac import rules
from ekfac.optim.options import FLAT, GROUPS, PAPER, into_groups, out_of_groups
from loops import mlp, usual

KINDS: list[Any] = [ekfac.EKFAC, ekfac.KFAC, ekfac.Preconditioner]

OLD_AND_NEW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"trust": 0.1}, {"step_size": ekfac.StepSize(max_change=0.1)}),
    (
        {"scaling": "anchored", "pace": 0.5, "anneal": 7.0, "kl_clip": 1e-3},
        {"scaling": "anchored", "step_size": ekfac.StepSize(lr_fraction=0.5, decay_steps=7.0, kl_clip=1e-3)},
    ),
    (
        {"deterministic": True, "factor_every": 2, "factor_decay": 0.5},
        {"refresh": ekfac.Refresh(deterministic=True, factor_every=2, factor_decay=0.5)},
    ),
    ({"exclude": "0", "max_factor_dim": 4}, {"coverage": ekfac.Coverage(exclude=["0"], max_factor_dim=4)}),
    ({"loss_reduction": "sum"}, {"batch": ekfac.Batch(reduction="sum")}),
    ({"memory_limit": 1000}, {"numerics": ekfac.Numerics(memory_limit=1000)}),
    ({"scaling": "running", "scaling_decay": 0.5}, {"scaling": rules.Running(decay=0.5)}),
    ({"scaling": "running", "on_refresh": "carry"}, {"scaling": rules.Running(restart=False)}),
    ({"scaling": "rmsprop", "alpha": 0.5, "eps": 1e-3}, {"scaling": rules.RMSProp(alpha=0.5, eps=1e-3)}),
]


def trained(**options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = mlp()
    opt = ekfac.EKFAC(model, refresh_every=3, **options)
    for _ in range(5):
        usual(model, opt)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW, ids=[",".join(old) for old, _ in OLD_AND_NEW])
def test_a_name_from_before_does_what_its_group_does_and_warns(old: dict[str, Any], new: dict[str, Any]) -> None:
    renamed = [name for name in old if name not in ("scaling",)]
    with pytest.warns(DeprecationWarning, match=", ".join(renamed) + ": write EKFAC"):
        before = trained(**old)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        after = trained(**new)
    for p, q in zip(before, after, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_in_a_group_holds_beside_a_name_from_before(kind: Any) -> None:
    with pytest.warns(DeprecationWarning, match="deterministic: write"):
        opt = kind(mlp(), refresh=ekfac.Refresh(factor_every=3), deterministic=True)
    assert opt.engine.options.refresh == ekfac.Refresh(factor_every=3, deterministic=True)


def test_the_papers_settings_and_all_groups_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekfac.EKFAC(mlp(), **ekfac.PAPER)
        groups = {name: kind() for name, kind in GROUPS.items()}
        ekfac.EKFAC(mlp(), **groups)
        ekfac.KFAC(mlp(), **groups)
        ekfac.Preconditioner(mlp(), **{n: g for n, g in groups.items() if n != "step_size"})


def test_flat_options_and_back() -> None:
    assert into_groups(out_of_groups(PAPER)) == PAPER
    flat = out_of_groups(PAPER)
    assert flat["deterministic"] is True and flat["anneal"] is None and not set(flat) & set(GROUPS)
    assert all(isinstance(value, str | int | float | None) for value in flat.values()), "plain data"
    assert len(FLAT) == sum(len(kind.__dataclass_fields__) for kind in GROUPS.values()), "no name twice"


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_must_be_of_its_kind(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}=\{{'a': 1\}} must be a {GROUPS[name].__name__}, e.g."):
        ekfac.EKFAC(mlp(), **{name: {"a": 1}})
    with pytest.raises(TypeError, match="unexpected keyword"):
        GROUPS[name](nonsense=1)


def test_a_group_shows_what_is_not_as_usual() -> None:
    assert repr(ekfac.Refresh()) == "Refresh()"
    shown = repr(ekfac.Coverage(sua=True, exclude=["0"]))
    assert shown == "Coverage(exclude=('0',), sua=True)"
    assert eval(f"ekfac.{shown}") == ekfac.Coverage(exclude="0", sua=True)


@pytest.mark.parametrize("name", rules.RULES)
def test_a_rule_by_name_is_the_rule_with_its_own_defaults(name: str) -> None:
    for p, q in zip(trained(scaling=name), trained(scaling=rules.RULES[name]()), strict=True):
        assert torch.equal(p, q)


def test_an_option_beside_a_rule_that_has_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"betas=\(0.5, 0.5\) beside scaling=Adam\("):
        ekfac.EKFAC(mlp(), scaling=rules.Adam(), betas=(0.5, 0.5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.Running(decay=1.0), "decay=1.0"),
        (lambda: rules.Running(restart="no"), "restart='no'"),
        (lambda: rules.Adam(betas=(0.9,)), r"betas=\(0.9,\)"),
        (lambda: rules.RMSProp(alpha=-1), "alpha=-1"),
        (lambda: rules.Adagrad(eps=0), "eps=0"),
        (lambda: rules.Belief(floor=0.0), "floor=0.0"),
    ],
)
def test_rules_check_their_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_copy_has_the_same_groups_and_rule() -> None:
    model = mlp()
    opt = ekfac.EKFAC(model, scaling=rules.Running(decay=0.5), refresh=ekfac.Refresh(deterministic=True))
    usual(model, opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = copy.deepcopy(opt)
    assert twin.engine.method.rule == rules.Running(decay=0.5)
    assert twin.engine.options.refresh.deterministic
    usual(model, opt)
    usual(twin.model, twin)
    for p, q in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_rule_of_ones_own_with_a_tensor_of_its_own_is_checkpointed() -> None:
    from dataclasses import dataclass

    from ekfac.optim.methods.rules import blend
    from ekfac.optim.types import BlockStep, EigenState

    @dataclass(init=False, eq=False, repr=False, kw_only=True)
    class WithDrift(EigenState):
        drift: Tensor

    @dataclass(frozen=True)
    class Drifting(rules.Running):
        state_class = WithDrift
        moments = ("drift",)

        def direction(self, state: EigenState, step: BlockStep) -> Tensor:
            assert isinstance(state, WithDrift)
            if not hasattr(state, "drift"):
                state.drift = torch.zeros_like(step.g)
            blend(state.drift, step.g, 0.1, step.ok)
            return state.drift / step.damped(state.s).sqrt()

    model = mlp()
    opt = ekfac.EKFAC(model, scaling=Drifting(), refresh_every=2)
    for _ in range(3):
        usual(model, opt)
    twin = copy.deepcopy(model)
    again = ekfac.EKFAC(twin, scaling=Drifting(), refresh_every=2)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert "drift" in again.state[twin[0].weight]
    for net, optimizer in ((model, opt), (twin, again)):
        usual(net, optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_a_mapping_of_the_fields_that_are_there(kind: Any) -> None:
    from dataclasses import fields

    from ekfac.optim.types import UNKNOWN, BlockState

    model = mlp()
    opt = kind(model)
    assert not opt.state, "nothing before the first step"
    usual(model, opt)
    state = opt.state[model[0].weight]
    assert isinstance(state, BlockState)
    names = {f.name for f in fields(state)}
    assert {"A", "B", "factor_weight"} <= set(state) <= names
    assert dict(state) == {name: getattr(state, name, UNKNOWN) for name in state} and len(state) == len(dict(state))
    with pytest.raises(KeyError, match="no field 'nonsense'"):
        state["nonsense"] = 1


def test_a_class_in_place_of_a_rule_is_told_that_an_instance_is_wanted() -> None:
    for make in (ekfac.EKFAC, ekfac.Preconditioner):
        with pytest.raises(ValueError, match=r"scaling=Running is a class. Allowed: an instance of it, .*Running\(\)"):
            make(mlp(), scaling=rules.Running)
    with pytest.raises(ValueError, match=r"scaling=<class 'dict'> is not known. Allowed: 'belief'"):
        ekfac.EKFAC(mlp(), scaling=dict)
