"""Every step of random networks by random optimizers is what a slow dense oracle says."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.harness import Broken, Fuzzer
from fuzz.nets import Drawn, Maker, Wrapped, freeze
from helpers import assert_same_state, assert_same_weights, bases_of, parameters_of
from oracle import TORCHS, OracleEKFAC
from paper import EKFAC, KFAC, Preconditioner

RULES = ("belief", "belief", "anchored", "running", "per_example", "kronecker", "adam", "rmsprop", "adagrad")


@dataclass
class Micro:
    """A micro-batch: inputs, targets, which stages are left out; its loss is divided by ``by``."""

    x: Tensor
    y: Tensor
    skipped: frozenset[int]
    by: float

    def __getitem__(self, i: int) -> Tensor:  # as the oracle counts examples
        return (self.x, self.y)[i]


def loss_of(model: nn.Module, batch: Micro) -> Tensor:
    """Half the squared error, with weights that tell positions apart."""
    model.skipped = batch.skipped
    off = (model(batch.x) - batch.y).flatten(1)
    weights = torch.linspace(0.5, 1.5, off.shape[1], dtype=off.dtype)
    return 0.5 * (off.square() * weights).sum() / batch.by


@dataclass
class Case:
    """An optimizer's options, as its own and as the oracle's, and a loop."""

    kind: str
    options: dict[str, Any]
    told: dict[str, Any] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] | None = None
    clip: float | None = None
    scale: float | None = None
    set_to_none: bool = True

    @property
    def rule(self) -> str:
        return str(self.options.get("scaling", self.kind))


def options_of(chance: random.Random, model: nn.Module) -> Case:
    """Draw an optimizer."""
    kind = chance.choice(["EKFAC"] * 4 + ["KFAC", "Preconditioner"])
    o: dict[str, Any] = {
        "refresh_every": chance.randint(1, 3),
        "factor_decay": chance.choice([0.0, 0.5, 0.95]),
        "damping": 10 ** chance.uniform(-3, 0),
        "loss_reduction": chance.choice(["mean", "mean", "sum"]),
        "sharing": chance.choice(["expand", "expand", "expand", "reduce"]),
    }
    if o["sharing"] == "expand":
        o["sua"] = chance.random() < 0.3
    if chance.random() < 0.15:
        o["max_factor_dim"] = chance.randint(1, 5)
    if chance.random() < 0.2:
        o["memory_limit"] = chance.choice([1, 500, 5000])
    adaptive = False
    if kind != "KFAC":
        rule = o["scaling"] = chance.choice(RULES)
        adaptive = rule in (*TORCHS, "anchored")
        if chance.random() < 0.1:
            o["basis"] = "identity"
        if rule in TORCHS:
            o["eps"] = 10 ** chance.uniform(-6, -3)
        else:
            o["damping_mode"] = chance.choice(["plain", "factored", "relative", "spectral"])
            o["scaling_decay"] = chance.choice([0.0, 0.5, 0.9])
            if rule != "kronecker":
                o["on_refresh"] = chance.choice(["carry", "kronecker"])
        if rule == "rmsprop":
            o["alpha"] = chance.choice([0.5, 0.99])
        if rule in ("belief", "adam", "anchored"):
            o["betas"] = (chance.choice([0.5, 0.9]), chance.choice([0.5, 0.95]))
    elif chance.random() < 0.5:
        o["pi_correction"] = False
    case = Case(kind, o)
    o["lr"] = 0.02 if adaptive else 10 ** chance.uniform(-3, -1)
    if kind != "Preconditioner":
        if chance.random() < 0.3:
            o["momentum"] = 0.8
            o["nesterov"] = chance.random() < 0.5
        o["weight_decay"] = chance.choice([0.0, 0.0, 0.3])
        o["decoupled_weight_decay"] = chance.random() < 0.7
        o["maximize"] = chance.random() < 0.1
        if chance.random() < 0.2:
            o["kl_clip"] = 10 ** chance.uniform(-6, 0)
        if rule_is_usual(o) and chance.random() < 0.3:
            del o["weight_decay"]
            case.told = {"weight_decay": 0.3, "decay_vectors": False, "cautious_decay": True}
        if chance.random() < 0.25:
            case.groups = groups_of(chance, model)
    owners = [id(p) for m in model.modules() for p in m._parameters.values()]
    layers = [  # without one of those that share a weight the others are refused
        name
        for name, m in model.named_modules()
        if type(m) in (nn.Linear, nn.Conv2d) and all(owners.count(id(p)) == 1 for p in m.parameters())
    ]
    if layers and chance.random() < 0.1:
        o["exclude"] = [chance.choice(layers)]
    if chance.random() < 0.3:
        case.clip = 10 ** chance.uniform(-3, 1)
    if chance.random() < 0.2:
        case.scale = 2.0 ** chance.randint(-3, 12)
    return case


def rule_is_usual(options: dict[str, Any]) -> bool:
    return options.get("scaling") == "belief" and options["decoupled_weight_decay"]


def groups_of(chance: random.Random, model: nn.Module) -> list[tuple[list[str], dict[str, Any]]]:
    """Parameters in two groups, by chance."""
    names = [name for name, _ in model.named_parameters()]
    first = set(chance.sample(names, chance.randrange(len(names) + 1)))
    own = [{"lr": 10 ** chance.uniform(-3, -1)}, {"weight_decay": chance.choice([0.0, 0.5]), "momentum": 0.5}]
    parts = [[name for name in names if (name in first) == which] for which in (True, False)]
    return [(part, options) for part, options in zip(parts, own, strict=True) if part]


def steps_of(chance: random.Random, drawn: Drawn, reduction: str) -> list[list[Micro]]:
    """Batches, some of them in pieces."""
    least = 2 if drawn.mixes else 1
    steps = []
    for _ in range(chance.randint(3, 6)):
        sizes = [chance.randint(least, 7) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
        undivided, pieces = chance.random() < 0.5, []
        for n in sizes:
            skipped = frozenset(i for i in drawn.optional if chance.random() < 0.5)
            x = drawn.batch(n)
            twin = copy.deepcopy(drawn.model)
            twin.skipped = skipped
            output = twin(x.clone())
            if not output.requires_grad:  # all that is trained would be left out
                skipped = frozenset()
            y = torch.randn_like(output)
            by = 1.0 if reduction == "sum" else float(n if undivided else sum(sizes))
            pieces.append(Micro(x, y, skipped, by))
        steps.append(pieces)
    return steps


def made(case: Case, model: nn.Module, **further: Any) -> Any:
    """The optimizer; a Preconditioner has torch's SGD behind it."""
    options = {**case.options, **further}
    if case.groups is not None:
        named = dict(model.named_parameters())
        options["params"] = [{"params": [named[n] for n in names], **own} for names, own in case.groups]
    if case.kind == "Preconditioner":
        lr = options.pop("lr")
        pre = Preconditioner(model, **options)
        return pre, torch.optim.SGD(model.parameters(), lr=lr)
    if case.told:
        options["weight_decay"] = None
    return {"EKFAC": EKFAC, "KFAC": KFAC}[case.kind](model, **options), None


def oracle_of(case: Case, model: nn.Module) -> OracleEKFAC:
    """The oracle on a copy of the model, without checkpointing."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, Wrapped):
            module.kept = ""
    told = {name: value for name, value in case.options.items() if name != "memory_limit"} | case.told
    if case.kind == "KFAC":
        told["scaling"] = "inverse"
    # A decay that a group names is for all that is in it.
    whole = {"decay_vectors": True, "cautious_decay": False}
    own = {
        name: given | (whole if "weight_decay" in given else {}) for names, given in case.groups or [] for name in names
    }
    return OracleEKFAC(twin, loss_of, per_parameter=own, tolerance=1e-6, **told)


def train_step(
    case: Case,
    model: nn.Module,
    opt: Any,
    sgd: Any,
    scaler: Any,
    pieces: list[Micro],
    before: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """One step as users do it; ``before`` is done to the gradients before they are clipped."""
    opt.zero_grad()
    for batch in pieces:
        loss = loss_of(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(sgd or opt)
    before(model)
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    if sgd is not None:
        opt.step()
    last = sgd or opt
    last.step() if scaler is None else scaler.step(last)
    if scaler is not None:
        scaler.update()


def clipped(case: Case) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    if case.clip is None:
        return None
    most = case.clip

    def clip(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        # An oracle under a sum loss has divided them by N, as the optimizer does when it reads them.
        length = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt() * clip.n
        return {name: g * min(1.0, most / (float(length) + 1e-6)) for name, g in grads.items()}

    return clip


Weights = dict[str, Tensor]


def shaken(model: nn.Module, steps: list[list[Micro]]) -> tuple[nn.Module, list[list[Micro]]]:
    """The network and its batches with another rounding."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 4e-16 * torch.randn_like(p))

    def moved(x: Tensor) -> Tensor:
        return x * (1 + 4e-16 * torch.randn_like(x)) if x.is_floating_point() else x

    return model, [[replace(b, x=moved(b.x), y=moved(b.y)) for b in pieces] for pieces in steps]


def distance(one: Weights, two: Weights) -> float:
    """The largest difference, relative to the parameter's largest weight where that exceeds one; infinity for NaN."""
    off = [
        float(((p - two[n]).abs().max() / p.abs().max().clamp(min=1)).nan_to_num(nan=torch.inf)) for n, p in one.items()
    ]
    return max(off)


def exact(chance: random.Random, folder: Path) -> str:
    """Compare an optimizer with the oracle on a network."""
    torch.manual_seed(chance.randrange(2**31))
    drawn = Maker(chance).network()
    if chance.random() < 0.25:
        freeze(drawn.model, chance)
    case = options_of(chance, drawn.model)
    steps = steps_of(chance, drawn, case.options["loss_reduction"])
    try:
        compare(case, drawn.model, steps)
    except Undefined:
        return "rounding alone"
    except ValueError as error:
        if refused_rightly(str(error), case):
            return "refused"
        raise Broken(f"{error} | {case} {drawn.what}") from error
    except AssertionError as error:
        try:  # rounding that has turned the optimizer's null spaces away from the oracle's grows from step to step
            compare(case, drawn.model, steps, hand_over=False)
        except Exception:
            raise Broken(f"{str(error).splitlines()[0]} | {case} {drawn.what}") from error
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error} | {case} {drawn.what}") from error
    return case.rule


class Undefined(Exception):
    """Rounding alone decides what the weights are."""


def compare(case: Case, given: nn.Module, steps: list[list[Micro]], hand_over: bool = True) -> None:
    """Train a copy of a model, and compare it with the oracle after every step; the bases may be the optimizer's."""
    model = copy.deepcopy(given)
    scaler = None if case.scale is None else torch.amp.GradScaler("cpu", init_scale=case.scale)
    oracle, clip = oracle_of(case, model), clipped(case)
    opt, sgd = made(case, model, **({} if scaler is None else {"grad_scaler": scaler}))
    for number, pieces in enumerate(steps):
        if clip is not None:
            n = sum(len(batch.x) for batch in pieces)
            clip.n = n if case.options["loss_reduction"] == "sum" else 1
        train_step(case, model, opt, sgd, scaler, pieces)
        try:
            bases = bases_of(opt, model) if hand_over and oracle.scaling != "inverse" else None
            expected = oracle.step(pieces, bases=bases, transform=clip)
            got = {name: p for name, p in parameters_of(model).items() if name in expected}
            assert_same_weights(got, expected, 1e-8, f"weights after step {number + 1}")
            assert_same_state(opt, model, oracle, 1e-7)
        except (AssertionError, KeyError, torch.linalg.LinAlgError) as error:
            lost = not all(bool((p.abs() < 1e4).all()) for p in model.parameters())
            if oracle.noise or lost or max(rounding(case, given, steps[: number + 1]) for _ in range(3)) > 1e-11:
                raise Undefined from error
            raise AssertionError(f"{error}") from error
    opt.close() if sgd is None else opt.engine.close()


def rounding(case: Case, model: nn.Module, steps: list[list[Micro]]) -> float:
    """How far the last bits of weights and inputs carry."""
    ends = []
    for start, batches in ((copy.deepcopy(model), steps), shaken(model, steps)):
        scaler = None if case.scale is None else torch.amp.GradScaler("cpu", init_scale=case.scale)
        opt, sgd = made(case, start, **({} if scaler is None else {"grad_scaler": scaler}))
        for pieces in batches:
            train_step(case, start, opt, sgd, scaler, pieces)
        opt.close() if sgd is None else opt.engine.close()
        ends.append(parameters_of(start))
    return distance(*ends)


def refused_rightly(error: str, case: Case) -> bool:
    """Whether a layer that is named has positions that belong to no example, and the options need to know."""
    needs = case.rule == "per_example" or case.options.get("sharing") == "reduce"
    return needs and "its input has shape" in error


FUZZERS = (Fuzzer("networks", "every step of a random network is the dense oracle's", 3000, exact),)
