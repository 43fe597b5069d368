"""Processes that train together, one of which has another batch, other threads or a solver that fails."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import replicas_worker as base
from fuzz.harness import Broken, Fuzzer
from ranks import assert_near, assert_replicas, of, run_ranks
from replicas_worker import METHODS, Result, network, scenario
from replicas_worker import main as main
from sharded_worker import lay_out, whole

Order = dict[str, Any]
SOLVERS = ("eigh", "qr", "cholesky_ex", "cholesky")


def ordered() -> Order:
    """What this try is, as every rank reads it."""
    found: Order = json.loads((Path(base.FOLDER) / "order.json").read_text())
    return found


def together(order: Order, world: int, name: str, folder: Path, file: str = "fuzz.replicas.py") -> list[Any]:
    """Have ranks do it; returns what each ends with."""
    (folder / "order.json").write_text(json.dumps(order))
    try:
        return of(run_ranks(file, world, (name,), folder), name)
    except AssertionError as error:
        raise Broken(f"{order}: {(str(error).splitlines() or [''])[-1]}") from error


# --- nobody drifts ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(probability: float, seed: int) -> Iterator[None]:
    """Solvers that raise now and then."""
    chance = random.Random(seed)

    def at_times(function: Any) -> Any:
        def solve(*args: Any, **kwargs: Any) -> Any:
            if chance.random() < probability:
                raise torch.linalg.LinAlgError("made to fail")
            return function(*args, **kwargs)

        return solve

    with contextlib.ExitStack() as stack:
        for name in SOLVERS:
            stack.enter_context(mock.patch.object(torch.linalg, name, at_times(getattr(torch.linalg, name))))
        yield


@scenario
def unlike(rank: int, world: int) -> Result:
    """Threads, batches and failures of this rank's own; layers that are wide enough for rounding to depend on them."""
    order = ordered()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(130, 70), nn.Tanh(), nn.Linear(70, 10))
    kind, own = METHODS[order["method"]]
    opt = kind(model, **{**own, "refresh_every": 10})
    generator = torch.Generator().manual_seed(rank)
    with base.threads(order["threads"][rank]), failing(order["failing"][rank], rank):
        for _ in range(order["steps"]):
            x = torch.randn(order["sizes"][rank], 130, generator=generator)
            opt.zero_grad()
            (model(x) - x[:, :10].sin()).square().sum(1).mean().backward()
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= world
            opt.step()
    return base.result(model, opt)


def drift(chance: random.Random, folder: Path) -> str:
    world, method = chance.choice((2, 2, 4)), chance.choice(sorted(METHODS))
    order = {
        "method": method,
        "steps": 200,
        "threads": [chance.choice((1, 2)) for _ in range(world)],
        "sizes": [chance.randint(1, 20) for _ in range(world)],
        "failing": [chance.choice((0.0, 0.0, 0.1)) for _ in range(world)],
    }
    ends = together(order, world, "unlike", folder)
    try:
        assert_replicas(ends)
    except AssertionError as error:
        raise Broken(f"{order}: {error}") from error
    if not all(bool(torch.isfinite(value).all()) for value in ends[0]["model"].values()):
        raise Broken(f"{order}: weights that are not finite")
    return method


# --- one rank alone -----------------------------------------------------------------------------------------------


def trained(order: Order, rank: int = 0, world: int = 1) -> Result:
    """Ten steps, in one of which a rank has a number in its batch that is far too large, or none, or has no batch."""
    model = network()
    call: Any = model
    if world > 1 and order["layout"] == "ddp":
        call = DistributedDataParallel(model)
    elif world > 1:
        lay_out(model, order["layout"], world)
    kind, own = METHODS[order["method"]]
    opt = kind(model, **own, **({} if world > 1 else {"process_group": None}))
    for step in range(10):
        x, y = base.batch(step)
        if step == order["at"] and order["value"] is not None:
            x[order["place"], 0, 0, 0] = order["value"]
        cuts = order["cuts"] if world > 1 else [0, 24]
        inputs, targets = (t[cuts[rank] : cuts[rank + 1]] for t in (x, y))
        opt.zero_grad()
        for number in range(order["pieces"]):
            last = number + 1 == order["pieces"]
            if world > 1 and call is model:
                call.set_requires_gradient_sync(last)
            with call.no_sync() if world > 1 and call is not model and not last else contextlib.nullcontext():
                parts: list[Tensor] = [t[number :: order["pieces"]] for t in (inputs, targets)]
                base.backward(call, *parts, 24, world)
        opt.step()
    found = {"model": whole(model), "skipped": opt.stats()["skipped_steps"]}
    opt.close()
    return found


@scenario
def one_rank_alone(rank: int, world: int) -> Result:
    return trained(ordered(), rank, world)


def on_one_rank(chance: random.Random, folder: Path) -> str:
    world = chance.choice((2, 2, 4))
    layout = chance.choice(("ddp", "fsdp") if world == 2 else ("ddp", "fsdp", "hsdp"))
    cuts = [0, *sorted(chance.choices(range(25), k=world - 1)), 24]  # some ranks may have no examples
    kind = chance.choice(("nothing", "large", "large", "NaN", "infinity"))
    value = {"nothing": None, "NaN": float("nan"), "infinity": float("-inf")}.get(kind, 10 ** chance.uniform(3, 38))
    order = {
        "layout": layout,
        "method": chance.choice(base.TRAJECTORIES),
        "cuts": cuts,
        "value": value,
        "place": chance.randrange(24),
        "at": chance.randrange(10),
        "pieces": chance.choice((1, 1, 2)),
    }
    ends, expected = together(order, world, "one_rank_alone", folder), trained(order)
    for end in ends:
        if not end["skipped"] == expected["skipped"] == (kind in ("NaN", "infinity")):
            raise Broken(f"{order}: {end['skipped']:.0f} steps were skipped, by one process {expected['skipped']:.0f}")
        try:
            assert_near(end["model"], expected["model"])
        except AssertionError as error:
            raise Broken(f"{order}: {error}") from error
    return f"{layout}, {kind}"


FUZZERS = (
    Fuzzer("replicas", "ranks with unlike threads, batches and solver failures: equal to the bit", 40, drift),
    Fuzzer("ranks", "whatever one rank's batch has, all of them train as one process does", 200, on_one_rank),
)
