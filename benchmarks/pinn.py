"""A five-dimensional Poisson equation solved by a network: relative L2 error of optimizers in the same time.

-Laplace u = pi^2 sum_i cos(pi x_i) on the unit cube, with u = sum_i cos(pi x_i) on its faces and inside; a network
5-64-64-48-48-1 with tanh, in float64, as in "Kronecker-factored approximate curvature for physics-informed neural
networks" (Dangel, Mueller, Zeinhofer, 2024). Adam, SOAP and EKFAC draw new points at every step, and their rate falls
along a cosine over the time; L-BFGS and the dense energy natural gradient, which search along a line, keep theirs.
"own course" has no rate set: EKFAC then lets it fall by itself, and shows the average of its weights. All runs of a
seed take turns, a quarter of a second each, so that a machine that others use is the same for all.

    python benchmarks/pinn.py --seconds 60 --seeds 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

import ekfac
from ekfac.lab import rivals

DIM = 5
#: Points inside and on the faces: of a step, and of methods that keep theirs.
DRAWN, KEPT = (500, 125), (1000, 250)

#: Seconds of a turn.
TURN = 0.25

#: Takes a step, given the fraction of the time that has passed.
Step = Callable[[float], object]


def solution(x: Tensor) -> Tensor:
    return torch.cos(math.pi * x).sum(1)


@dataclass
class Points:
    inside: Tensor
    faces: Tensor

    @staticmethod
    def draw(inside: int, faces: int) -> Points:
        on = torch.rand(faces, DIM)
        on[torch.arange(faces), torch.randint(DIM, (faces,))] = torch.randint(2, (faces,)).to(on)
        return Points(torch.rand(inside, DIM).requires_grad_(), on)


def residuals(net: nn.Module, points: Points) -> tuple[Tensor, Tensor]:
    """How far the equation and the values on the faces are from being met, at every point."""
    x = points.inside
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(DIM)]
    return sum(second[1:], second[0]) + math.pi**2 * solution(x), net(points.faces)[:, 0] - solution(points.faces)


def loss(net: nn.Module, points: Points) -> Tensor:
    equation, faces = residuals(net, points)
    return 0.5 * equation.square().mean() + 0.5 * faces.square().mean()


def drawing(make: Callable[[nn.Module, float], torch.optim.Optimizer], lr: float) -> Callable[[nn.Module], Step]:
    """An optimizer that sees new points at every step."""

    def build(net: nn.Module) -> Step:
        opt = make(net, lr)

        def step(fraction: float) -> None:
            for group in opt.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * fraction))
            opt.zero_grad()
            loss(net, Points.draw(*DRAWN)).backward()
            opt.step()

        return step

    return build


def lbfgs(net: nn.Module) -> Step:
    points = Points.draw(*KEPT)
    opt = torch.optim.LBFGS(
        net.parameters(), max_iter=5, max_eval=100, history_size=100, line_search_fn="strong_wolfe",
        tolerance_grad=0.0, tolerance_change=0.0,
    )  # fmt: skip

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(net, points)
        value.backward()
        return value

    return lambda fraction: opt.step(closure)


def energy_natural_gradient(net: nn.Module) -> Step:
    """J^T (J J^T + damping)^-1 r with the Jacobian of all residuals, along the best of halved steps."""
    points, names = Points.draw(*KEPT), [name for name, _ in net.named_parameters()]

    def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x[None],))[0, 0]

    def laplacian(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.trace(hessian(value, 1)(parameters, x))

    def step(fraction: float) -> None:
        start = {name: p.detach().clone() for name, p in net.named_parameters()}
        rows, right = [], []
        parts = ((laplacian, points.inside.detach()), (value, points.faces))
        for (function, x), residual in zip(parts, residuals(net, points), strict=True):
            each = vmap(grad(function), (None, 0), chunk_size=250)(start, x)
            rows.append(torch.cat([each[name].flatten(1) for name in names], 1) / math.sqrt(len(x)))
            right.append(residual.detach() / math.sqrt(len(x)))
        J, r = torch.cat(rows), torch.cat(right)
        K = J @ J.T
        K.diagonal().add_(1e-10 * K.diagonal().mean())
        direction = dict(
            zip(names, (J.T @ torch.linalg.solve(K, r)).split([p.numel() for p in start.values()]), strict=True)
        )

        def go(length: float) -> float:
            with torch.no_grad():
                for name, p in net.named_parameters():
                    p.copy_(start[name] - length * direction[name].view_as(p))
            return loss(net, points).item()

        found = {length: go(length) for length in (0.0, *(2.0**-k for k in range(12)))}
        go(min(found, key=lambda length: math.inf if math.isnan(found[length]) else found[length]))

    return step


def adam(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=lr)


def soap(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return rivals.soap(net, lr=lr)


def ekfac_default(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return ekfac.EKFAC(net, lr=lr, weight_decay=0.0)


def ekfac_shorter_mean(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return ekfac.EKFAC(net, lr=lr, weight_decay=0.0, betas=(0.95, 0.95))


def ekfac_not_cautious(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return ekfac.EKFAC(net, lr=lr, weight_decay=0.0, scaling=ekfac.rules.Belief(cautious=False))


def ekfac_own_course(**options: Any) -> Callable[[nn.Module], Step]:
    """EKFAC without a rate."""

    def build(net: nn.Module) -> Step:
        opt = ekfac.EKFAC(net, **options)

        def step(fraction: float) -> None:
            opt.zero_grad()
            loss(net, Points.draw(*DRAWN)).backward()
            opt.step()

        return step

    return build


RATES = (1e-2, 3e-2, 6e-2)
METHODS: dict[str, list[tuple[str, Callable[[nn.Module], Step]]]] = {
    "Adam": [(f"{lr:g}", drawing(adam, lr)) for lr in RATES],
    "SOAP": [(f"{lr:g}", drawing(soap, lr)) for lr in RATES],
    "EKFAC": [(f"{lr:g}", drawing(ekfac_default, lr)) for lr in RATES],
    "EKFAC, betas 0.95": [(f"{lr:g}", drawing(ekfac_shorter_mean, lr)) for lr in RATES],
    "EKFAC, not cautious": [(f"{lr:g}", drawing(ekfac_not_cautious, lr)) for lr in RATES],
    "EKFAC, no decay": [("own course", ekfac_own_course(weight_decay=0.0))],
    "EKFAC, nothing set": [("own course", ekfac_own_course())],
    "L-BFGS": [("-", lbfgs)],
    "energy natural gradient": [("-", energy_natural_gradient)],
}


class Run:
    """One network in training, with a clock and random numbers of its own."""

    def __init__(
        self, build: Callable[[nn.Module], Step], seconds: float, seed: int, clock: Callable[[], float]
    ) -> None:
        torch.manual_seed(seed)
        widths = (DIM, 64, 64, 48, 48)
        layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.test = torch.rand(9000, DIM)
        self.step, self.steps, self.passed = build(self.net), 0, 0.0
        self.seconds, self.clock, self.random = seconds, clock, torch.get_rng_state()

    def go_on(self) -> bool:
        """Train for a turn; return whether there is time left."""
        torch.set_rng_state(self.random)
        start, before = self.clock(), self.passed
        while self.passed < min(before + TURN, self.seconds):
            self.step(self.passed / self.seconds)
            self.steps += 1
            self.passed = before + self.clock() - start
        self.random = torch.get_rng_state()
        return self.passed < self.seconds

    def error(self) -> float:
        """The relative L2 error."""
        with torch.no_grad():
            off = self.net(self.test)[:, 0] - solution(self.test)
            return (off.norm() / solution(self.test).norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time of every run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine that is shared")
    parser.add_argument("--log", type=Path, help="a file to which every run adds a line")
    parser.add_argument("--only", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="*", help="only these of the rates")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    clock = time.perf_counter if args.clock == "wall" else (lambda: time.process_time() / args.threads)
    print(f"{args.seconds:g} s ({args.clock}), {args.threads} threads, {args.seeds} seeds\n")
    left = {f"{lr:g}" for lr in RATES} - {f"{lr:g}" for lr in args.rates or RATES}
    runs = [(name, lr, build) for name in args.only for lr, build in METHODS[name] if lr not in left]
    found: dict[tuple[str, str], list[tuple[float, int]]] = {(name, lr): [] for name, lr, _ in runs}
    for seed in range(args.first, args.first + args.seeds):
        under_way = {(name, lr): Run(build, args.seconds, seed, clock) for name, lr, build in runs}
        training = list(under_way.values())
        while training:
            training = [run for run in training if run.go_on()]
        for (name, lr), run in under_way.items():
            found[name, lr].append((run.error(), run.steps))
            if args.log:
                with args.log.open("a") as file:
                    error, steps = found[name, lr][-1]
                    row = {"optimizer": name, "lr": lr, "seed": seed, "seconds": args.seconds, "error": error}
                    file.write(json.dumps({**row, "steps": steps}) + "\n")
    print("| optimizer | lr | steps | relative L2 error, median |\n| --- | ---: | ---: | ---: |")
    for (name, lr), ends in found.items():
        errors, counts = (statistics.median(values) for values in zip(*ends, strict=True))
        print(f"| {name} | {lr} | {counts:.0f} | {errors:.2e} |", flush=True)


if __name__ == "__main__":
    main()
