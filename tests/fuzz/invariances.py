"""What must not change the training of a random network: how it is cut, saved, copied, stacked, scaled or written."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ekfac
from fuzz.harness import Broken, Fuzzer
from fuzz.nets import Drawn, Maker, Stage, freeze
from fuzz.networks import (
    Case,
    Micro,
    Weights,
    distance,
    made,
    options_of,
    refused_rightly,
    shaken,
    steps_of,
    train_step,
)
from helpers import parameters_of


def usual(chance: random.Random) -> Case:
    """The optimizers as they come, whose bases are updated between steps."""
    options: dict[str, Any] = {"refresh_every": chance.choice([1, 2, 3, 50])}
    kind = chance.choice(["usual EKFAC", "usual EKFAC", "usual KFAC"])
    if kind == "usual EKFAC":
        options["scaling"] = chance.choice(["belief", "belief", "anchored", "running", "per_example", "adam"])
        if chance.random() < 0.5:
            options["total_steps"] = 6
    else:
        options["momentum"] = 0.5
    return Case(kind, options)


def made_by(case: Case, model: nn.Module, **further: Any) -> tuple[Any, Any]:
    if not case.kind.startswith("usual"):
        found: tuple[Any, Any] = made(case, model, **further)
        return found
    return getattr(ekfac, case.kind.split()[1])(model, **case.options, **further), None


class Training:
    """A network, its optimizer, and steps taken so far."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.model = case, model
        self.scaler = None if case.scale is None else torch.amp.GradScaler("cpu", init_scale=case.scale)
        self.opt, self.sgd = made_by(case, model, **({} if self.scaler is None else {"grad_scaler": self.scaler}))

    def step(self, pieces: list[Micro], before: Callable[[nn.Module], None] = lambda model: None) -> None:
        train_step(self.case, self.model, self.opt, self.sgd, self.scaler, pieces, before)

    def end(self) -> Weights:
        self.opt.close() if self.sgd is None else self.opt.engine.close()
        return parameters_of(self.model)

    def saved(self) -> Training:
        """Another that has loaded what this one has saved to a file."""
        file = io.BytesIO()
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict(), "scaler": scaler}, file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        new = Training(self.case, model)
        model.load_state_dict(found["model"])
        new.opt.load_state_dict(found["opt"])
        if new.scaler is not None:
            new.scaler.load_state_dict(found["scaler"])
        return new

    def copied(self) -> Training:
        """A copy of model and optimizer."""
        new: Training = object.__new__(Training)
        new.case, new.opt, new.scaler = self.case, copy.deepcopy(self.opt), copy.deepcopy(self.scaler)
        new.model = new.opt.model
        new.sgd = None if self.sgd is None else torch.optim.SGD(new.model.parameters(), lr=self.case.options["lr"])
        if new.scaler is not None:
            (new.opt.attach_scaler if new.sgd is None else new.opt.engine.attach_scaler)(new.scaler)
        return new


def trained(case: Case, model: nn.Module, steps: list[list[Micro]]) -> Weights:
    training = Training(case, copy.deepcopy(model))
    for pieces in steps:
        training.step(pieces)
    return training.end()


# --- to the bit ---------------------------------------------------------------------------------------------------


def resumed(chance: random.Random, folder: Path) -> str:
    """Save and load, or copy, in mid-training: all weights are the same to the bit."""
    drawn, case, steps = problem(chance, chance.random() < 0.5)
    how = chance.choice(["saved", "copied"])
    at, one = chance.randrange(len(steps)), Training(case, drawn.model)
    try:
        for pieces in steps[:at]:
            one.step(pieces)
        other = getattr(one, how)()
        for pieces in steps[at:]:
            one.step(pieces)
        for pieces in steps[at:]:
            other.step(pieces)
    except ValueError as error:
        if refused_rightly(str(error), case):
            return "refused"
        raise
    ends = one.end(), other.end()
    for name, p in ends[0].items():
        if not torch.equal(p, ends[1][name]) and not bool(p.isnan().any()):
            off = float((p - ends[1][name]).abs().max())
            raise Broken(f"{how} at {at}: {name} is off by {off:.3g} | {case} {drawn.what}")
    return f"{how}, {case.kind}"


def problem(chance: random.Random, by_default: bool = False) -> tuple[Drawn, Case, list[list[Micro]]]:
    torch.manual_seed(chance.randrange(2**31))
    drawn = Maker(chance).network()
    if chance.random() < 0.2:
        freeze(drawn.model, chance)
    case = usual(chance) if by_default else options_of(chance, drawn.model)
    return drawn, case, steps_of(chance, drawn, case.options.get("loss_reduction", "mean"))


# --- but for rounding ---------------------------------------------------------------------------------------------

Changed = tuple[Case, nn.Module, list[list[Micro]], Callable[[Weights], Weights]]


def same(weights: Weights) -> Weights:
    return weights


def permuted(chance: random.Random, case: Case, drawn: Drawn, steps: list[list[Micro]]) -> Changed:
    """The examples of every batch in another order."""

    def shuffled(batch: Micro) -> Micro:
        order = chance.sample(range(len(batch.x)), len(batch.x))
        return replace(batch, x=batch.x[order], y=batch.y[order])

    return case, drawn.model, [[shuffled(batch) for batch in pieces] for pieces in steps], same


def cut(chance: random.Random, case: Case, drawn: Drawn, steps: list[list[Micro]]) -> Changed | None:
    """Every micro-batch in several, of any sizes."""
    if drawn.mixes or drawn.balances:
        return None

    def parts(batch: Micro) -> list[Micro]:
        n = len(batch.x)
        edges = sorted({0, n, *chance.choices(range(n + 1), k=2)})
        return [replace(batch, x=batch.x[a:b], y=batch.y[a:b]) for a, b in itertools.pairwise(edges)]

    return case, drawn.model, [[part for batch in pieces for part in parts(batch)] for pieces in steps], same


def scaled(chance: random.Random, case: Case, drawn: Drawn, steps: list[list[Micro]]) -> Changed:
    """A loss that a scaler has multiplied, by another number than before."""
    return replace(case, scale=2.0 ** chance.randint(-5, 15)), drawn.model, steps, same  # others it rounds itself


def apart(chance: random.Random, case: Case, drawn: Drawn, steps: list[list[Micro]]) -> Changed | None:
    """Layers in groups of their own, so that none is stepped together with another."""
    if case.kind == "Preconditioner" or case.groups is not None:
        return None
    owner: dict[int, list[str]] = {}
    for name, p in drawn.model.named_parameters():
        module = name.rpartition(".")[0]
        users = [n for n, m in drawn.model.named_modules() if any(q is p for q in m._parameters.values())]
        owner.setdefault(hash(users[0] if users else module), []).append(name)
    return replace(case, groups=[(names, {}) for names in owner.values()]), drawn.model, steps, same


class ByConvolution(nn.Module):
    """A linear layer as a convolution of one tap over all places."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Conv1d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
        self.inner.weight.data, self.inner.weight.requires_grad = (
            linear.weight.data[..., None].clone(),
            linear.weight.requires_grad,
        )
        if linear.bias is not None:
            self.inner.bias.data, self.inner.bias.requires_grad = linear.bias.data.clone(), linear.bias.requires_grad

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)).transpose(1, 2)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class ByCells(nn.Module):
    """A recurrent layer in one direction as cells, called once for every place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        kind = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell, nn.RNN: nn.RNNCell}[type(layer)]
        self.batch_first, self.cells = layer.batch_first, nn.ModuleList()
        for i in range(layer.num_layers):
            cell = kind(layer.input_size if i == 0 else layer.hidden_size, layer.hidden_size, layer.bias).double()
            for name, p in cell.named_parameters():
                old = getattr(layer, f"{name}_l{i}")
                p.data, p.requires_grad = old.data.clone(), old.requires_grad
            self.cells.append(cell)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x = x.transpose(0, 1) if self.batch_first else x
        ends = []
        for cell in self.cells:
            state, found = None, []
            for one in x:
                state = cell(one, state)
                found.append(state[0] if isinstance(state, tuple) else state)
            x = torch.stack(found)
            ends.append(state if isinstance(state, tuple) else (state,))
        last = tuple(torch.stack(s) for s in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, last if len(last) > 1 else last[0]


def rewritten(chance: random.Random, case: Case, drawn: Drawn, steps: list[list[Micro]]) -> Changed | None:
    """The same network by other modules."""
    if case.groups is not None or "exclude" in case.options or case.options.get("sua"):
        return None
    model, users = copy.deepcopy(drawn.model), {}
    for module in model.modules():
        for p in module._parameters.values():
            users[id(p)] = users.get(id(p), 0) + 1
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            alone = all(users[id(p)] == 1 for p in module.parameters(recurse=False))
            if type(module) is nn.Linear and alone and isinstance(owner, (Stage, nn.ModuleList)):
                setattr(owner, name, ByConvolution(module).double())
            one_way = type(module) in (nn.LSTM, nn.GRU, nn.RNN) and not module.bidirectional
            if one_way and not getattr(module, "proj_size", 0):
                setattr(owner, name, ByCells(module))
    shapes = {name: p.shape for name, p in drawn.model.named_parameters()}

    def back(weights: Weights) -> Weights:
        found = {}
        for name, p in weights.items():
            plain = (
                name.replace(".inner.weight", ".weight").replace(".inner.bias", ".bias") if name not in shapes else name
            )
            head, _, last = plain.rpartition(".")
            if ".cells." in head:
                start, _, number = head.rpartition(".cells.")
                plain = f"{start}.{last}_l{number}"
            found[plain] = p.reshape(shapes[plain])
        return found

    return case, model, steps, back


WAYS = {"permuted": permuted, "cut": cut, "scaled": scaled, "apart": apart, "rewritten": rewritten}


def unchanged(chance: random.Random, folder: Path) -> str:
    """Train in another way that must not matter, and compare; where rounding alone decides, nothing is said."""
    drawn, case, steps = problem(chance)
    name = chance.choice(list(WAYS))
    found = WAYS[name](chance, case, drawn, steps)
    if found is None:
        return "not for this one"
    other_case, model, other_steps, back = found
    try:
        plain = trained(case, drawn.model, steps)
    except ValueError as error:
        if refused_rightly(str(error), case):
            return "refused"
        raise
    try:
        other = back(trained(other_case, model, other_steps))
    except ValueError as error:
        if refused_rightly(str(error), case):
            return "refused"
        raise
    off = distance(plain, other)
    if off > 1e-10:
        rounding = max(distance(plain, trained(case, *shaken(drawn.model, steps))) for _ in range(3))
        if off > 1e3 * rounding:
            told = f"{case} {drawn.what}"
            raise Broken(f"{name}: weights are off by {off:.3g}, by rounding {rounding:.3g} | {told}")
        if off > 1e-6:
            return "rounding alone"
    return name


FUZZERS = (
    Fuzzer("resumed", "a random network trains on from a saved state or a copy, equal to the bit", 500, resumed),
    Fuzzer("unchanged", "order, cuts, scale, stacking and form of a random network do not matter", 500, unchanged),
)
