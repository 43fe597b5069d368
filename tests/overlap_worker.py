"""What each rank does in the tests of test_overlap.py, which start `main` once a rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ekfac
from ekfac.optim.distributed import buckets
from replicas_worker import METHODS, Result, average, result, scenario
from replicas_worker import main as main

STEPS = 14
#: How much goes into a bucket; on four ranks that matters for one method, unless tests may take long.
CASES = [(method, full) for full in (buckets.FULL, 1) for method in ("default", "running", "per_example", "kfac")]
MORE = [("running", buckets.FULL), ("per_example", buckets.FULL), ("kfac", buckets.FULL)]


class Odd(nn.Module):
    """A layer that is called twice, one that is computed again in the backward pass, and one that may not be used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.twice = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.optional = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, optional: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = checkpoint(self.again, x, use_reentrant=False).tanh()
        x = torch.tanh(self.optional(x)) if optional else x
        return self.head(x)


def rows(step: int) -> Tensor:
    return torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def eventful(method: str, rank: int = 0, world: int = 1) -> Result:
    """A training in which statistics are complete at other times than they were before."""
    model = Odd()
    kind, own = METHODS[method]
    opt = kind(model, **own) if world > 1 else kind(model, **own, process_group=None)
    overlap, early = opt.engine.collector.overlap, []

    def backward(x: Tensor, optional: bool = True) -> None:
        (0.5 * (model(x, optional) - x[:, :3].sin()).square().sum() * world / 24).backward()

    for step in range(STEPS):
        x = rows(step)
        if step == 7:
            x[-1, 0] = float("nan")
        x = x.chunk(world)[rank]
        opt.zero_grad()
        if step == 2 and rank == 0 and world > 1:  # which nobody else does, and all of it is dropped
            backward(rows(99))
            opt.zero_grad()
        if step == 6 and world == 1:  # what two halves of the ranks do
            for half, optional in zip(x.chunk(2), (False, True), strict=True):
                backward(half, optional)
        elif step == 6:
            backward(x, optional=rank >= world // 2)
        elif step == 8:  # all of it on the last rank
            if rank == world - 1:
                backward(rows(step))
        else:
            for piece in x.chunk({3: 2, 4: 3, 9: 2, 10: 2}.get(step, 1)):
                backward(piece)
        early.append(len(overlap.sent))
        if step == 11:  # after the training loss's
            with opt.statistics():
                (model(x).sin().sum() * world / 24).backward()
        average(model, world)
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / world
        opt.step()
    found = result(model, opt, early=early, skipped=opt.stats()["skipped_steps"])
    opt.close()
    return found


@scenario
def statistics_at_odd_times(rank: int, world: int) -> Result:
    """In few large buckets, and in one a block."""
    return at_odd_times([case for case in CASES if world == 2 or case not in MORE], rank, world)


@scenario
def more_at_odd_times(rank: int, world: int) -> Result:
    return at_odd_times(MORE, rank, world)


def at_odd_times(cases: list[tuple[str, int]], rank: int, world: int) -> Result:
    found = {}
    for method, full in cases:
        with mock.patch.object(buckets, "FULL", full):
            found[f"{method}, {full}"] = eventful(method, rank, world)
    return found


@scenario
def during_the_backward_pass(rank: int, world: int) -> Result:
    """How many buckets were on their way when the gradient of the first layer came, and when all had come."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(8, 8), nn.Tanh()))).double()
    used = DistributedDataParallel(model)
    opt = ekfac.EKFAC(model, lr=0.01)
    overlap: Any = opt.engine.collector.overlap
    at_first: list[int] = []
    first: Any = model[0]
    first.weight.register_hook(lambda g: at_first.append(len(overlap.sent)))
    in_the_end, planned = [], []
    with mock.patch.object(buckets, "FULL", 1):
        for step in range(4):
            opt.zero_grad()
            x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
            used(x).square().sum().backward()
            in_the_end.append(len(overlap.sent))
            planned.append([b.name for bucket in overlap.plan for b in bucket.blocks])
            opt.step()
    return {"at first": at_first, "in the end": in_the_end, "planned": planned}


@scenario
def groups_are_used_again(rank: int, world: int) -> Result:
    """Optimizers that come and go do not leave a group each; two at a time do not share one."""
    from ekfac.optim.distributed.processes import _TWINS

    def twins() -> int:
        return sum(map(len, _TWINS.values()))

    def trained() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = ekfac.EKFAC(model)
        model(torch.ones(4, 3)).square().sum().backward()
        opt.step()
        return opt

    counts = []
    for _ in range(3):
        trained().close()
        counts.append(twins())
    one, two = trained(), trained()
    shared = one.engine.collector.overlap._twin is two.engine.collector.overlap._twin
    one.close()
    two.close()
    return {"counts": counts, "shared": shared}
