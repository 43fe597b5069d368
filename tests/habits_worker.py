"""What each rank does in test_habits_of_ranks.py: with nothing set, other ways to shard, wrap and call a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ekfac
import replicas_worker as base
from replicas_worker import Result, batch, network, scenario
from replicas_worker import main as main
from sharded_worker import whole

#: Steps of a training, and those after which it is evaluated.
STEPS, LOOKS = 8, (1, 4, 6)


def train(
    model: nn.Module,
    opt: Any,
    rank: int = 0,
    world: int = 1,
    call: Callable[[Tensor], Tensor] | None = None,
    before: Callable[[int], None] = lambda step: None,
    pieces: int = 1,
    look: Callable[[Tensor], Tensor] | None = None,
) -> Result:
    """Train on this rank's part of every batch; returns the parameters, and what evaluation shows on the way.

    Args:
        model: What is evaluated; it is trained by ``call``, or itself.
        opt: The optimizer.
        rank: This rank.
        world: How many there are.
        call: Called with a batch.
        before: Called before a forward pass.
        pieces: Backward passes a step.
        look: Called with a batch to evaluate, in place of the model.
    """
    shown = []
    for step in range(STEPS):
        x, y = (t.chunk(world)[rank] for t in batch(step))
        opt.zero_grad()
        for piece in range(pieces):
            before(step * pieces + piece)
            inputs, targets = x.chunk(pieces)[piece], y.chunk(pieces)[piece]
            (0.5 * ((call or model)(inputs) - targets).square().sum() * world / 24).backward()
        opt.step()
        if step in LOOKS:
            with torch.no_grad():
                shown.append((look or model)(batch(99)[0]).clone())
    return {"model": whole(model), "shown": {str(step): y for step, y in enumerate(shown)}}


def alone(pieces: int = 1) -> Result:
    """One process with the whole batch."""
    model = network()
    return train(model, ekfac.EKFAC(model, process_group=None), pieces=pieces)


def sharded(world: int, **options: Any) -> Any:
    model: Any = network()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Outer(nn.Module):
    """A module around the one that is trained, and the root of the sharding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@scenario
def ways_of_sharding(rank: int, world: int) -> Result:
    """Copies that were gathered before the pieces changed would be stale. On four ranks, what two do not have."""
    if world == 2:
        return all_ways_of_sharding(rank, world)
    model = sharded(world, reshard_after_forward=world // 2)
    return {"pieces of a few ranks after forward": train(model, ekfac.EKFAC(model), rank, world)}


@scenario
def all_ways_of_sharding(rank: int, world: int) -> Result:
    found = {}
    for name, after in {"kept after forward": False, "pieces of a few ranks after forward": world // 2}.items():
        if after is False or world > 2:
            model = sharded(world, reshard_after_forward=after)
            found[name] = train(model, ekfac.EKFAC(model), rank, world)
    for name, asynchronous in {"gathered ahead": False, "being gathered": True}.items():
        model = sharded(world)
        opt = ekfac.EKFAC(model)
        found[name] = train(model, opt, rank, world, before=lambda _, m=model, a=asynchronous: m.unshard(async_op=a))
    model = sharded(world)
    model.set_modules_to_forward_prefetch([model[0], model[3], model[5]])
    found["prefetched"] = train(model, ekfac.EKFAC(model), rank, world)
    for prefetch in (False, True):
        inner = network()
        fully_shard(inner[3])
        outer: Any = fully_shard(Outer(inner))
        if prefetch:
            outer.set_modules_to_forward_prefetch([inner[3]])
        opt = ekfac.EKFAC(inner)
        found[f"within another{', prefetched' * prefetch}"] = train(inner, opt, rank, world, call=outer, look=outer)
    model = sharded(world)
    opt = ekfac.EKFAC(model)
    found["evaluated in evaluation mode"] = train(model, opt, rank, world, before=lambda _, m=model: evaluate(m))
    return found


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(98)[0])
    model.train()


@scenario
def accumulated(rank: int, world: int) -> Result:
    found = {}

    def no_sync(model: Any) -> Callable[[int], None]:
        def before(number: int) -> None:
            last = number % 2 == 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)

        return before

    for name in ("every time", "at the last"):
        model = sharded(world)
        opt = ekfac.EKFAC(model)
        before = no_sync(model) if name == "at the last" else lambda number: None
        found[name] = train(model, opt, rank, world, pieces=2, before=before)
    return found


@scenario
def recomputed(rank: int, world: int) -> Result:
    """Activation checkpointing calls layers, or the model, again within the backward pass."""
    found = {}
    for kind in CheckpointImpl:
        for inside in (False, True):
            model: Any = network()
            mesh = init_device_mesh("cpu", (world,))
            for place in (3, 5):
                if inside:
                    fully_shard(model[place], mesh=mesh)
                model[place] = checkpoint_wrapper(model[place], kind)
                if not inside:
                    fully_shard(model[place], mesh=mesh)
            fully_shard(model, mesh=mesh)
            name = f"{kind.name}, {'sharded inside' if inside else 'sharded outside'}"
            found[name] = train(model, ekfac.EKFAC(model), rank, world)
            found[name]["model"] = {
                n.replace("_checkpoint_wrapped_module.", ""): p for n, p in found[name]["model"].items()
            }
    model = sharded(world)
    found["model"] = train(
        model, ekfac.EKFAC(model), rank, world, call=lambda x: checkpoint(model, x, use_reentrant=False)
    )
    return found


# --- whole parameters on every rank -------------------------------------------------------------------------------


class Branches(nn.Module):
    """A layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)
        self.two = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = torch.tanh(self.one(x))
        return self.last(torch.tanh(self.two(x)) if both else x)


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


def rows(step: int, size: int = 12) -> Tensor:
    return torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def some_unused(layout: str, rank: int = 0, world: int = 1) -> Result:
    """In some steps no batch uses a layer; in others only the first rank's does, which FSDP2 itself cannot take."""
    model: Any = branches()
    used = model
    if layout == "ddp" and world > 1:
        used = DistributedDataParallel(model, find_unused_parameters=True)
    elif world > 1:
        for layer in (model.one, model.two, model.last):
            fully_shard(layer)
        fully_shard(model)
    opt = ekfac.EKFAC(model, **({} if world > 1 else {"process_group": None}))
    for step in range(STEPS):
        opt.zero_grad()
        parts = rows(step).chunk(2)
        for part in range(rank, 2, world):
            both = step not in (3, 5) and (part == 0 or layout == "fsdp" or step not in (2, 4))
            (used(parts[part], both).square().sum() * world / 12).backward()
        opt.step()
    return {"model": whole(model)}


@scenario
def unused(rank: int, world: int) -> Result:
    return {layout: some_unused(layout, rank, world) for layout in ("ddp", "fsdp")}


@scenario
def joined_with_nothing_set(rank: int, world: int) -> Result:
    """Ranks run out of batches one after the other; one of them never has any."""
    found = {}
    for none in (False, True):
        model = network()
        ddp = DistributedDataParallel(model)
        opt = ekfac.EKFAC(model)
        batches = 3 + 2 * rank if not none else 4 * bool(rank)
        with Join([ddp, opt]):
            for step in range(batches):
                opt.zero_grad()
                x, y = (t.chunk(world)[rank] for t in batch(step))
                (ddp(x) - y).square().sum(1).mean().backward()
                opt.step()
        found["one without any" if none else "one after the other"] = base.result(
            model, opt, steps=opt.stats()["steps"]
        )
    return found


def missing(rank: int = 0, world: int = 1) -> Result:
    """In some steps only the last rank has a batch; at the first step too."""
    model = network()
    opt = ekfac.EKFAC(model, **({} if world > 1 else {"process_group": None}))
    for step in range(STEPS):
        x, y = batch(step)
        opt.zero_grad()
        if step not in (0, 3, 4):
            base.backward(model, x.chunk(world)[rank], y.chunk(world)[rank], 24, world)
        elif rank == world - 1:
            base.backward(model, x, y, 24, world)
        base.average(model, world)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= world
        opt.step()
    return base.result(model, opt)


@scenario
def a_rank_without_batch_and_nothing_set(rank: int, world: int) -> Result:
    return {"": missing(rank, world)}


def normed(rank: int, world: int) -> Result:
    """Running statistics, which DDP copies from the first rank before every forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    ddp = DistributedDataParallel(model)
    opt = ekfac.EKFAC(model)

    def step(number: int) -> None:
        opt.zero_grad()
        ddp(rows(number + 100 * rank)).square().sum(1).mean().backward()
        opt.step()

    for number in range(6):
        step(number)
    end = {"weights": copy.deepcopy(model.state_dict()), "state": copy.deepcopy(opt.state_dict())}
    for number in range(6, 9):
        step(number)
    went_on = whole(model)
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p)
    opt.close()
    opt = ekfac.EKFAC(model)
    first = [end]
    dist.broadcast_object_list(first, 0)
    model.load_state_dict(first[0]["weights"])
    opt.load_state_dict(end["state"])
    for number in range(6, 9):
        step(number)
    return {"saved": end["state"]["ekfac"]["average"], "went on": went_on, "resumed": whole(model)}


@scenario
def running_statistics(rank: int, world: int) -> Result:
    return normed(rank, world)


def changed(layout: str, rank: int, world: int) -> Result:
    """Somebody clamps weights after steps: of a replica, all do; of pieces, one rank may be the only one."""
    model: Any = sharded(world) if layout == "fsdp" else network()
    used = DistributedDataParallel(model) if layout == "ddp" else model
    opt = ekfac.EKFAC(model)
    averaged = []
    for step in range(STEPS):
        x, y = (t.chunk(world)[rank] for t in batch(step))
        opt.zero_grad()
        if layout != "without a batch" or rank == 0 or step > 2:  # ranks without look at nothing
            (0.5 * (used(x) - y).square().sum() / 24 * world).backward()
        if layout == "without a batch":
            base.average(model, world)
        opt.step()
        averaged.append(len(opt.average.offsets))
        weight = next(model.parameters())
        if layout == "fsdp":
            weight = weight.to_local()
        if layout != "fsdp" or rank == 0:
            weight.data.clamp_(-0.05, 0.05)
    return {"averaged": averaged, "model": whole(model)}


@scenario
def weights_that_somebody_changes(rank: int, world: int) -> Result:
    return {layout: changed(layout, rank, world) for layout in ("ddp", "fsdp", "without a batch")}


@scenario
def parts_alone(rank: int, world: int) -> Result:
    """From some step on the model's parts are called, not the model."""
    model = network()
    opt = ekfac.EKFAC(model)
    averaged = []
    for step in range(STEPS + 4):
        x, y = (t.chunk(world)[rank] for t in batch(step))
        opt.zero_grad()
        out = model(x) if step < 4 else model[1:](model[0](x))
        (0.5 * (out - y).square().sum() / 24 * world).backward()
        base.average(model, world)
        opt.step()
        averaged.append(len(opt.average.offsets))
    return {"averaged": averaged, "model": whole(model)}


@scenario
def wrapped(rank: int, world: int) -> Result:
    """The optimizer is given DDP's wrapper, or what is in it."""
    found = {}
    for given in ("wrapper", "module"):
        model = network()
        ddp = DistributedDataParallel(model)
        opt = ekfac.EKFAC(ddp if given == "wrapper" else model)
        found[given] = train(model, opt, rank, world, call=ddp, look=ddp if given == "wrapper" else None)
    ways: dict[str, dict[str, Any]] = {
        "graph that does not change": {"static_graph": True},
        "gradients in buckets": {"gradient_as_bucket_view": True},
        "a bucket a layer": {"bucket_cap_mb": 0.0001},
        "hook of one's own": {},
    }
    for name, options in ways.items():
        model = network()
        ddp = DistributedDataParallel(model, **options)
        if not options:
            ddp.register_comm_hook(None, allreduce_hook)
        found[name] = train(model, ekfac.EKFAC(model), rank, world, call=ddp)
    return found


# --- other models -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 7)
        self.base.requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


class Normed(nn.Module):
    """A convolution with batch-norm, whose statistics are of each rank's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 5, 2)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.convolution(x.view(-1, 1, 2, 3)))).flatten(1))


#: Models, and whether one process with the whole batch is the measure; else DDP is.
MODELS: dict[str, tuple[type[nn.Module], bool]] = {
    "an adapter on a frozen layer": (Adapted, True),
    "an embedding that is the head": (Tied, False),
    "batch-norm": (Normed, False),
}


def other(name: str, layout: str, rank: int = 0, world: int = 1) -> Result:
    torch.manual_seed(0)
    model: Any = MODELS[name][0]().double()
    used = model
    if layout == "ddp":
        used = DistributedDataParallel(model)
    elif layout == "fsdp":
        fully_shard(model)
    elif layout == "compiled":
        for layer in model.children():
            layer.compile(backend="aot_eager")
        for layer in model.children() if name != "an embedding that is the head" else ():
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    opt = ekfac.EKFAC(model, **({} if world > 1 else {"process_group": None}))
    for step in range(STEPS):
        x = rows(step).chunk(world)[rank]
        if name == "an embedding that is the head":
            x = (x.abs() * 3).long().clamp(max=8)
        opt.zero_grad()
        (used(x).square().sum() * world / 12).backward()
        opt.step()
    found = {"model": whole(model), "averaged": len(opt.average.offsets)}
    opt.close()
    return found


@scenario
def other_models(rank: int, world: int) -> Result:
    return {
        f"{name}, {layout}": other(name, layout, rank, world)
        for name in MODELS
        for layout in ("ddp", "fsdp", "compiled")
    }


@scenario
def offloaded(rank: int, world: int) -> Result:
    """Parameters that rest on the CPU, where everything already is."""
    model = sharded(world, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return {"": train(model, ekfac.EKFAC(model), rank, world)}


@scenario
def part_of_the_ranks(rank: int, world: int) -> Result:
    """Two pairs of ranks, each with a sharded model of its own."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("model", "shard"))["shard"]
    model: Any = network()
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = ekfac.EKFAC(model, process_group=mesh.get_group())
    return {"": train(model, opt, rank % 2, 2)}
