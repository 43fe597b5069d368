"""Random networks on two processes: they end where one process does, whatever examples each has."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from fuzz.harness import Broken, Fuzzer
from fuzz.invariances import Training, trained
from fuzz.nets import Drawn, Maker, freeze
from fuzz.networks import Case, Micro, Weights, distance, options_of, refused_rightly, shaken, steps_of
from fuzz.replicas import ordered, together
from replicas_worker import Result, scenario
from replicas_worker import main as main

#: Networks for each start of two processes, which takes longer than they do.
EACH = 6


def problem(seed: int) -> tuple[Drawn, Case, list[list[Micro]]]:
    """A network whose examples do not meet, its optimizer, and batches of which two ranks can have a part each."""
    chance = random.Random(seed)
    while True:
        torch.manual_seed(chance.randrange(2**31))
        drawn = Maker(chance).network()
        drawn.optional.clear()
        if not (drawn.mixes or drawn.balances or "shared places" in drawn.what):
            break
    if chance.random() < 0.25:
        freeze(drawn.model, chance)
    case = options_of(chance, drawn.model)
    case.options["sharing"] = "expand"  # else one rank may be refused while the other waits for its gradients
    if case.rule == "per_example":
        case.options["scaling"] = "running"
    case.scale = case.clip = None  # gradients that are averaged by hand are not known from before a clipping
    steps = map(shareable, steps_of(chance, drawn, case.options["loss_reduction"]))
    return drawn, case, [pieces for pieces in steps if pieces]


def shareable(pieces: list[Micro]) -> list[Micro]:
    """Micro-batches of two examples or more, under a loss that is the mean of the whole step's."""
    pieces = [batch for batch in pieces if len(batch.x) > 1]
    total = sum(len(batch.x) for batch in pieces)
    return [replace(batch, by=1.0 if batch.by == 1.0 else float(total)) for batch in pieces]


def part(batch: Micro, rank: int, world: int) -> Micro:
    """What a rank has of a micro-batch: the first has more. Under a mean the ranks' average is the whole's gradient."""
    at = min((2 * len(batch.x) + 2) // 3, len(batch.x) - 1)
    own = slice(0, at) if rank == 0 else slice(at, None)
    return replace(batch, x=batch.x[own], y=batch.y[own], by=batch.by if batch.by == 1 else batch.by / world)


class Sharing(Training):
    """A training whose ranks average their gradients before the step, by hand."""

    def average(self, model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


@scenario
def random_networks(rank: int, world: int) -> Result:
    found: Result = {}
    for seed in ordered()["seeds"]:
        drawn, case, steps = problem(seed)
        training = Sharing(case, drawn.model)
        try:
            for pieces in steps:
                training.step([part(batch, rank, world) for batch in pieces], training.average)
            found[str(seed)] = training.end()
        except ValueError as error:
            found[str(seed)] = str(error)
    return found


def two(chance: random.Random, folder: Path) -> str:
    """Train some networks on two processes, and compare each with a training by one."""
    seeds = [chance.randrange(2**31) for _ in range(EACH)]
    ends = together({"seeds": seeds}, 2, "random_networks", folder, "fuzz.pairs.py")
    for seed in seeds:
        drawn, case, steps = problem(seed)
        one, other = (end[str(seed)] for end in ends)
        told = f"seed {seed}: {case} {drawn.what}"
        if isinstance(one, str) or isinstance(other, str):
            if not (isinstance(one, str) and refused_rightly(one, case)):
                raise Broken(f"{one} | {told}")
            continue
        if not all(bool((p.abs() < 1e4).all()) for p in one.values()):
            continue  # it has diverged, as some of these optimizers do on one process too
        if any(not torch.equal(p, other[name]) for name, p in one.items()):
            raise Broken(f"the ranks differ | {told}")
        check(one, case, drawn, steps, told)
    return "networks"


def check(one: Weights, case: Case, drawn: Drawn, steps: list[list[Micro]], told: str) -> None:
    """Compare weights with those of one process."""
    plain = trained(case, drawn.model, steps)
    off = distance(plain, one)
    if off > 1e-10:
        rounding = max(distance(plain, trained(case, *shaken(drawn.model, steps))) for _ in range(3))
        if off > 1e3 * rounding:
            raise Broken(f"weights are off by {off:.3g}, by rounding {rounding:.3g} | {told}")


FUZZERS = (Fuzzer("pairs", "a random network on two processes ends where it does on one", 60, two),)
