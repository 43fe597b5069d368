"""Bad input: one table, one test. Each gives a clear error that names what is wrong, and changes nothing."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac import AdaptiveDamping
from helpers import batches_for, mean_loss, mlp
from paper import EKFAC, KFAC, Preconditioner

NAN, INF = math.nan, math.inf


@dataclass
class World:
    """A network in the middle of training, and whatever a bad call may not change."""

    model: nn.Module
    opt: Any
    batch: tuple[Tensor, Tensor]

    def snapshot(self) -> bytes:
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.opt.state_dict() if self.opt is not None else None], file)
        return file.getvalue()

    def hooks(self) -> int:
        return sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in self.model.modules()
        )


def fresh() -> World:
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    return World(model, None, batches_for(model, (3,), n=8, steps=1)[0][0])


def training() -> World:
    world = fresh()
    world.opt = EKFAC(world.model, lr=0.1, momentum=0.9, refresh_every=2)
    for _ in range(3):
        world.opt.zero_grad()
        mean_loss(world.model, world.batch).backward()
        world.opt.step()
    world.opt.zero_grad()
    return world


@dataclass
class Case:
    """What is done, what the message must say, and the world in which it is done."""

    do: Callable[[World], Any]
    words: tuple[str, ...]
    world: Callable[[], World] = fresh
    error: type[Exception] | tuple[type[Exception], ...] = (ValueError, TypeError)


def option(kind: Any, words: tuple[str, ...] | None = None, **options: Any) -> Case:
    """A constructor's argument: the message names it and its value."""
    ((name, value),) = list(options.items())[:1]
    return Case(lambda world: kind(world.model, **options), words or (name, str(value)))


CASES: dict[str, Case] = {}

for kind in (EKFAC, KFAC, Preconditioner):
    named: dict[str, list[Any]] = {
        "damping": [0.0, -1e-3, NAN, INF, "small", lambda step: -1.0],
        "factor_decay": [1.0, -0.1, NAN, 2],
        "refresh_every": [0, -3, 1.5],
        "sharing": ["both"],
        "loss_reduction": ["none"],
        "unsupported": ["ignore"],
        "max_factor_dim": [0, -1, 2.5],
        "memory_limit": [0, -1],
        "batch_dim": ["first", 0.5],
        "count": [3, "all"],
        "include": [["no.such.layer"]],
        "exclude": [["no.such.layer"]],
    }
    if kind is not KFAC:
        named |= {
            "scaling": ["per-example", None],
            "scaling_decay": [1.0, -0.1, NAN],
            "damping_mode": ["tikhonov"],
            "on_refresh": ["forget"],
            "basis": ["fourier"],
        }
    if kind is not Preconditioner:
        named |= {
            "lr": [-0.1, NAN, INF, "fast", torch.tensor(-1.0), torch.ones(2)],
            "momentum": [-0.1, NAN],
            "weight_decay": [-0.1, NAN],
            "kl_clip": [0.0, -1.0, NAN],
        }
    if kind is EKFAC:
        named |= {"pace": [0.0, NAN, 1.5], "trust": [0.0, INF], "anneal": [0.0, "slow"]}
    for argument, values in named.items():
        for value in values:
            shown = "a function" if callable(value) else str(value).replace("\n", "")
            words = (argument,) if callable(value) or isinstance(value, Tensor) else None
            if argument in ("include", "exclude"):
                words = (argument, "no.such.layer")
            CASES[f"{kind.__name__}({argument}={shown})"] = option(kind, words, **{argument: value})

UNKNOWN_NAMES = {
    "scaling": ("per_example", "running", "kronecker"),
    "damping_mode": ("plain", "factored", "relative"),
    "sharing": ("expand", "reduce"),
    "on_refresh": ("carry", "kronecker"),
    "basis": ("identity",),
    "loss_reduction": ("mean", "sum"),
    "unsupported": ("diagonal", "error"),
}
for argument, valid in UNKNOWN_NAMES.items():
    CASES[f"unknown {argument} lists the valid ones"] = option(
        EKFAC, (argument, "nonsense", *valid), **{argument: "nonsense"}
    )

CASES |= {
    "an unknown argument lists the update's too": option(EKFAC, ("learning_rate", "lr,", "trust"), learning_rate=0.1),
    "an unknown argument of KFAC": option(KFAC, ("scaling", "lr,", "pi_correction"), scaling="running"),
    "an unknown argument of Preconditioner": option(Preconditioner, ("lr", "damping,"), lr=0.1),
    "layers that are no names": option(EKFAC, ("include", "5"), include=5),
    "a damping that is a class": option(EKFAC, ("damping", "AdaptiveDamping()"), damping=AdaptiveDamping),
    "nesterov without momentum": option(EKFAC, ("nesterov", "momentum"), nesterov=True),
    "SUA with reduce": option(EKFAC, ("sua", "reduce"), sua=True, sharing="reduce"),
    "parameters instead of a model": Case(lambda w: EKFAC(w.model.parameters(), lr=0.1), ("model",)),
    "an argument that does not exist": Case(lambda w: EKFAC(w.model, learning_rate=0.1), ("learning_rate",)),
    "a positional learning rate": Case(lambda w: EKFAC(w.model, 0.1), ("positional",)),
    "no trainable parameter": Case(lambda w: EKFAC(w.model.requires_grad_(False)), ("no", "parameter")),
    "a model without parameters": Case(lambda w: EKFAC(nn.Tanh()), ("no", "parameter")),
    "a foreign parameter in params": Case(
        lambda w: EKFAC(w.model, params=[{"params": [nn.Parameter(torch.ones(3))]}]), ("param", "model")
    ),
    "dampings that disagree within a layer": Case(
        lambda w: EKFAC(
            w.model,
            params=[
                {"params": [w.model[0].weight], "damping": 0.1},
                {"params": [w.model[0].bias, *w.model[2].parameters()], "damping": 0.2},
            ],
        ),
        ("damping", "0"),
    ),
    "a group with a bad option": Case(
        lambda w: EKFAC(w.model, params=[{"params": list(w.model.parameters()), "lr": -2.0}]), ("lr", "-2.0")
    ),
    "complex parameters refused": Case(
        lambda w: EKFAC(nn.Linear(2, 2, dtype=torch.complex64), unsupported="error"), ("weight", "bias")
    ),
    "conjugated parameters": Case(
        lambda w: EKFAC(nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())])),
        ("'0'", "conjugate"),
    ),
    "unsupported layers refused": Case(
        lambda w: EKFAC(nn.Sequential(nn.Linear(3, 3), nn.PReLU()), unsupported="error"), ("1.weight",)
    ),
}


def step_with(world: World, **changes: Any) -> None:
    mean_loss(world.model, world.batch).backward()
    before = [dict(group) for group in world.opt.param_groups]
    try:
        for group in world.opt.param_groups:
            group.update(changes)
        world.opt.step()
    finally:
        for group, old in zip(world.opt.param_groups, before, strict=True):
            group.update(old)


def load_other(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], None]:
    def do(world: World) -> None:
        state = copy.deepcopy(world.opt.state_dict())
        world.opt.load_state_dict(change(state) or state)

    return do


def state_of(model: nn.Module, **options: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(_: dict[str, Any]) -> dict[str, Any]:
        opt = EKFAC(model, lr=0.1, momentum=0.9, **options)
        size = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
        model(torch.randn(4, size, dtype=torch.float64)).square().sum().backward()
        opt.step()
        opt.close()
        return opt.state_dict()

    return change


def without_bias() -> World:
    world = fresh()
    world.opt = EKFAC(world.model, params=[{"params": [world.model[0].weight]}], lr=0.1)
    return world


class Cut(nn.Module):
    """Hands on fewer rows than there are examples, and no multiple of them."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:3]


def leading_dimension() -> World:
    world = fresh()
    world.model = nn.Sequential(nn.Linear(3, 4), Cut(), nn.Linear(4, 2)).double()
    world.opt = EKFAC(world.model, lr=0.1, scaling="per_example")
    return world


def sparse() -> World:
    world = fresh()
    world.model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)).double()
    world.batch = (torch.arange(4), torch.zeros(4, 2, dtype=torch.float64))
    world.opt = EKFAC(world.model, lr=0.1)
    return world


def backward_and_step(world: World) -> None:
    mean_loss(
        world.model, (world.batch[0], world.batch[1][:3] if len(world.batch[0]) == 8 else world.batch[1])
    ).backward()
    world.opt.step()


CASES |= {
    "a step with negative lr": Case(lambda w: step_with(w, lr=-1.0), ("lr", "-1.0"), training),
    "a step with lr that is not finite": Case(lambda w: step_with(w, lr=NAN), ("lr", "nan"), training),
    "a step with damping zero": Case(lambda w: step_with(w, damping=0.0), ("damping", "0.0"), training),
    "a leading dimension that is no multiple of N": Case(backward_and_step, ("'2'", "3", "8"), leading_dimension),
    "a sparse gradient": Case(backward_and_step, ("sparse", "0.weight"), sparse),
    "a foreign parameter group": Case(
        lambda w: w.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        ("param", "model"),
        training,
    ),
    "a group whose damping splits a layer": Case(
        lambda w: w.opt.add_param_group({"params": [w.model[0].bias], "damping": 0.7}), ("damping", "'0'"), without_bias
    ),
    "the state of a wider model": Case(load_other(state_of(mlp(3, 5, 2))), ("0.weight",), training),
    "the state of a deeper model": Case(load_other(state_of(mlp(3, 4, 4, 2))), ("state",), training),
    "a state without its groups": Case(
        load_other(lambda state: {k: v for k, v in state.items() if k != "param_groups"}),
        ("param_groups",),
        training,
        (ValueError, KeyError),
    ),
    "the state of another kind of optimizer": Case(
        load_other(lambda state: torch.optim.Adam(mlp(3, 4, 2).parameters()).state_dict()),
        ("state",),
        training,
    ),
    "not a state dict": Case(lambda w: w.opt.load_state_dict([1, 2]), ("state",), training, (ValueError, TypeError)),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    case = CASES[name]
    world = case.world()
    before, hooks = world.snapshot(), world.hooks()
    trainable = [p.requires_grad for p in world.model.parameters()]
    with pytest.raises(case.error) as caught:
        case.do(world)
    message = str(caught.value)
    for word in case.words:
        assert word in message, f"{word!r} is not in: {message}"
    if "no trainable" not in name:
        assert [p.requires_grad for p in world.model.parameters()] == trainable
    assert world.snapshot() == before, "weights or state have changed"
    assert world.hooks() == hooks, "hooks were left behind"


MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [EKFAC, KFAC, Preconditioner])
@pytest.mark.parametrize(
    "construct",
    [
        lambda kind: kind(params=MODEL.parameters()),
        lambda kind: kind(MODEL.parameters()),
        lambda kind: kind(list(MODEL.parameters())),
        lambda kind: kind(MODEL.named_parameters()),
        lambda kind: kind([{"params": list(MODEL.parameters())}]),  # as Trainer and ZeroRedundancyOptimizer do
        lambda kind: kind([{"params": list(MODEL.parameters()), "weight_decay": 0.0}], damping=1e-3),
        lambda kind: kind(),
    ],
)
def test_parameters_in_the_models_place(kind: Any, construct: Any) -> None:
    with pytest.raises(TypeError, match=r"Pass the model itself, EKFAC\(model.*hand it over") as caught:
        construct(kind)
    assert len(str(caught.value)) < 400
    assert "tensor(" not in str(caught.value)


@pytest.mark.parametrize(
    "construct",
    [
        lambda big: EKFAC(MODEL, lr=big),
        lambda big: EKFAC(MODEL, lr=[big]),
        lambda big: EKFAC(MODEL, {"lr": big}),
        lambda big: EKFAC(MODEL, list(MODEL.parameters())),
        lambda big: EKFAC(MODEL, MODEL.parameters()),
        lambda big: EKFAC(MODEL, momentum=big),
        lambda big: EKFAC(MODEL, refresh_every=big),
        lambda big: EKFAC(MODEL, grad_scaler=big),
        lambda big: EKFAC(MODEL, params=[big]),
        lambda big: EKFAC(MODEL, damping_mode=big),
    ],
)
def test_no_error_prints_a_tensor(construct: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        construct(torch.randn(50, 50))
    assert len(str(caught.value)) < 400
    assert "tensor(" not in str(caught.value)


def test_what_becomes_of_a_model_with_hooks_in_other_hands() -> None:
    model = copy.deepcopy(MODEL)
    opt = EKFAC(model)
    x = torch.randn(5, 3)
    with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile: script it after opt\.close\(\)"):
        torch.jit.script(model)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
    opt.close()
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    with pytest.raises(TypeError, match=r"ScriptModule.*train the original module"):
        EKFAC(scripted)


def test_a_scripted_part_is_trained_without_a_basis() -> None:
    """A module of which only a copy in TorchScript is there, as one that torch.jit.load has read."""
    torch.manual_seed(0)
    part = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)))
    for model in (nn.Sequential(nn.Linear(3, 6), part, nn.Linear(8, 2)), nn.Sequential(part, nn.Linear(8, 2))):
        opt = EKFAC(model)
        x = torch.randn(64, 3 if len(model) == 3 else 6)
        y = (x[:, 0] > 0).long()
        losses = []
        for _ in range(40):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]
        opt.load_state_dict(opt.state_dict())
        assert "its layer is scripted" in str(opt.summary())
        opt.close()


def test_layers_called_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.out = nn.Embedding(5, 3), nn.Conv1d(1, 2, 2), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.out(input=self.inner(input=self.table(input=tokens)[:, None]).flatten(1))
            return out

    model = Named()
    opt = EKFAC(model)
    model(tokens=torch.tensor([1, 2, 3, 4])).square().mean().backward()
    opt.step()
    assert {"A", "B"} <= set(opt.state[model.inner.weight])
