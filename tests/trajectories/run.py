"""Running a case, from the start or from a checkpoint, by the public interface alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ekfac
from trajectories import networks
from trajectories.cases import Case
from trajectories.networks import Batch, uniform

EXAMPLES = 48
PROJECTIONS = 3


def half_square(output: Tensor, target: Tensor, batch_dim: int = 0) -> Tensor:
    """Squared error, summed over an example's outputs, averaged over examples."""
    return 0.5 * (output - target).square().sum() / output.shape[batch_dim]


@dataclass
class Run:
    """A model, its optimizer, and torch's SGD where the optimizer only preconditions."""

    case: Case
    model: nn.Module
    opt: Any
    sgd: torch.optim.SGD | None = None
    scaler: torch.amp.GradScaler | None = None

    def batch(self, t: int, n: int = EXAMPLES) -> Batch:
        return networks.batch(self.case.network, str(t), n)

    def loss(self, batch: Batch) -> Tensor:
        return half_square(self.model(batch[0]), batch[1], self.case.options.get("batch_dim", 0))

    def update(self) -> None:
        self.opt.step()
        if self.sgd is not None:
            self.sgd.step()

    def plain(self, batch: Batch, scale: float = 1.0) -> float:
        self.opt.zero_grad()
        loss = scale * self.loss(batch)
        loss.backward()
        self.update()
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        sgd = None if self.sgd is None else self.sgd.state_dict()
        return {"model": self.model.state_dict(), "opt": self.opt.state_dict(), "sgd": sgd}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.opt.load_state_dict(saved["opt"])
        if self.sgd is not None:
            self.sgd.load_state_dict(saved["sgd"])


# ---------------------------------------------------------------------------------------------------------- loops


def plain(run: Run, t: int) -> float:
    return run.plain(run.batch(t))


def accumulated(run: Run, t: int) -> float:
    """Two backward passes, over 32 and 16 examples."""
    run.opt.zero_grad()
    total = 0.0
    for part, n in enumerate((32, 16)):
        loss = run.loss(networks.batch(run.case.network, f"{t}.{part}", n)) * n / 48
        loss.backward()
        total += loss.item()
    run.update()
    return total


def sizes(run: Run, t: int) -> float:
    return run.plain(run.batch(t, (48, 64, 40)[t % 3]))


def shrinking(run: Run, t: int) -> float:
    return run.plain(run.batch(t, 64 if t < 4 else 12))


def cycling(run: Run, t: int) -> float:
    return run.plain(run.batch(t % 5))


def summed(run: Run, t: int) -> float:
    return run.plain(run.batch(t), scale=EXAMPLES)


def negated(run: Run, t: int) -> float:
    return run.plain(run.batch(t), scale=-1)


def clipped(run: Run, t: int) -> float:
    """By norm; at every third step not at all, at every third by a bound that changes nothing."""
    run.opt.zero_grad()
    loss = run.loss(run.batch(t))
    loss.backward()
    if t % 3 != 1:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.3 if t % 3 else 100.0)
    run.update()
    return loss.item()


def frozen(run: Run, t: int) -> float:
    """The first layer is frozen from the start until step 5, the last one from step 7 to step 10."""
    freeze(run.model, t)
    return plain(run, t)


def freeze(model: nn.Module, t: int) -> None:
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    layers[0].requires_grad_(t >= 5)
    layers[-1].requires_grad_(not 7 <= t < 10)


def statistics(run: Run, t: int) -> float:
    """Factors and s* from targets drawn from the model, the gradient from the true ones."""
    run.opt.zero_grad()
    x, y = run.batch(t)
    output = run.model(x)
    drawn = output.detach() + uniform(f"drawn {t}", *output.shape)
    with run.opt.statistics():
        half_square(output, drawn).backward(retain_graph=True)
    loss = half_square(output, y)
    loss.backward()
    run.update()
    return loss.item()


def schedule(run: Run, t: int) -> float:
    for group in run.opt.param_groups:
        group["lr"] = run.opt.defaults["lr"] * (1 + t % 4)
    return plain(run, t)


def skipped(run: Run, t: int) -> float:
    """Gradients that are not finite, at two steps; one of them would have renewed the bases."""
    if t in (4, 6):
        run.plain(run.batch(t), scale=float("inf"))
    return plain(run, t)


def dropped(run: Run, t: int) -> float:
    """A backward pass whose gradients are cleared, forwards in evaluation mode, and one that is not captured."""
    run.loss(run.batch(t + 1)).backward()
    run.opt.zero_grad()
    with torch.no_grad():
        run.loss(run.batch(t + 2))
    with run.opt.paused():
        run.loss(run.batch(t + 3)).backward()
    return plain(run, t)


def scaled(run: Run, t: int) -> float:
    """By a power of two, under a GradScaler that the optimizer knows."""
    assert run.scaler is not None
    run.opt.zero_grad()
    loss = run.loss(run.batch(t))
    run.scaler.scale(loss).backward()
    run.scaler.step(run.opt)
    run.scaler.update()
    return loss.item()


def closure(run: Run, t: int) -> float:
    batch = run.batch(t)

    def again() -> Tensor:
        run.opt.zero_grad()
        loss = run.loss(batch)
        loss.backward()
        return loss

    return run.opt.step(again).item()


LOOPS: dict[str, Callable[[Run, int], float]] = {
    "plain": plain,
    "groups": plain,
    "seeded": plain,
    **{
        f.__name__: f
        for f in (
            accumulated,
            sizes,
            shrinking,
            cycling,
            summed,
            negated,
            clipped,
            frozen,
            statistics,
            schedule,
            skipped,
            dropped,
            scaled,
            closure,
        )
    },
}


# ------------------------------------------------------------------------------------------------------ beginnings


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The first layer with a learning rate, a decay and a damping of its own."""
    parameters = list(model.parameters())
    own = {"lr": 2 * lr, "weight_decay": 0.1, "damping": 3e-2}
    return [{"params": parameters[:2], **own}, {"params": parameters[2:]}]


def begin(case: Case, first: int = 0) -> Run:
    """A new model and a new optimizer, before step ``first``; what is frozen at it is so from the beginning."""
    model = networks.build(case.network)
    if case.loop == "frozen":
        freeze(model, first)
    options = dict(case.options)
    scaler = None
    if case.loop == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options["grad_scaler"] = scaler
    if case.loop == "groups":
        options["params"] = groups_of(model, options.get("lr", 0.01))
    run = Run(case, model, getattr(ekfac, case.optimizer)(model, **options), scaler=scaler)
    if case.optimizer == "Preconditioner":
        run.sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    if case.loop == "seeded":
        loader = [run.batch(100 + t) for t in range(3)]
        run.opt.seed(ekfac.fisher(model, loader, half_square_each, approximation="ekfac"))
    return run


def half_square_each(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().flatten(1).sum(1)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass
class Trajectory:
    """Losses before every step, the last parameters, and a checkpoint if one was asked for."""

    losses: list[float]
    parameters: dict[str, Tensor]
    checkpoint: dict[str, Any] | None = None


def run_case(case: Case, save: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Trajectory:
    """The whole of it; ``save`` copies what ``state_dict`` gives before step ``case.saved``."""
    run = begin(case)
    losses, checkpoint = [], None
    for t in range(case.steps):
        if t == case.saved and save is not None:
            checkpoint = save(run.state_dict())
        losses.append(LOOPS[case.loop](run, t))
    run.opt.close()
    return Trajectory(losses, parameters_of(run.model), checkpoint)


def resume_case(case: Case, checkpoint: dict[str, Any]) -> Trajectory:
    """From the checkpoint to the end, in a new model and a new optimizer."""
    assert case.saved is not None
    run = begin(case, case.saved)
    run.load_state_dict(checkpoint)
    losses = [LOOPS[case.loop](run, t) for t in range(case.saved, case.steps)]
    run.opt.close()
    return Trajectory(losses, parameters_of(run.model))


# --------------------------------------------------------------------------------------------------------- digests


@dataclass(frozen=True)
class Digest:
    """Of a trajectory: its losses, how far the parameters went, and that way along a few fixed random directions."""

    losses: list[float]
    distance: float
    projections: list[float]

    @classmethod
    def of(cls, case: Case, trajectory: Trajectory) -> Digest:
        start = parameters_of(networks.build(case.network))
        way = torch.cat([(p - start[name]).flatten() for name, p in trajectory.parameters.items()])
        directions = [uniform(f"direction {k}", len(way)) for k in range(PROJECTIONS)]
        return cls(trajectory.losses, way.norm().item(), [(way @ d).item() for d in directions])

    def difference(self, other: Digest, first: int = 0) -> float:
        """The largest relative one; ``first`` is the step at which this one begins."""
        scale = max(abs(loss) for loss in other.losses)
        errors = [abs(a - b) / scale for a, b in zip(self.losses, other.losses[first:], strict=True)]
        errors.append(abs(self.distance - other.distance) / other.distance)
        errors += [abs(a - b) / other.distance for a, b in zip(self.projections, other.projections, strict=True)]
        return float(torch.tensor(errors).max())  # NaN if any is
