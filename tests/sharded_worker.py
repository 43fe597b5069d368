"""What each rank does in the tests of test_sharded.py, which start `main` once a rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ekfac
import paper
import replicas_worker as base
from ekfac.optim.methods.inverse import InverseMethod
from replicas_worker import METHODS, Result, batch, error_of, network, scenario
from replicas_worker import main as main

#: Methods that are tried on two dimensions of ranks too: they differ in what they exchange.
HYBRID = ("nothing set", "default", "running", "per_example", "kfac")
#: What four ranks are tried with where time is short: every method under one layout, the default under both.
ON_FOUR = {
    "ddp": ("default", "kfac"),
    "fsdp": ("nothing set", "per_example", "kfac"),
    "hsdp": ("nothing set", "default", "running"),
    "fsdp and tensor parallel": ("nothing set", "per_example", "kfac"),
}


def lay_out(model: nn.Sequential, layout: str, world: int, **options: Any) -> None:
    """Shard a model over all ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")) if layout == "hsdp" else None
    mesh = init_device_mesh("cpu", (world,)) if mesh is None else mesh
    if layout != "fsdp, root alone":
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, as copies."""
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()
    }


def make(method: str, layout: str, sharded: bool, world: int) -> tuple[nn.Sequential, Any]:
    """A model and its optimizer; on one rank, a plain one."""
    model = network()
    kind, own = METHODS[method]
    if not sharded:
        return model, kind(model, **own)
    if layout == "fsdp, after":
        opt = kind(model, **own)
        lay_out(model, layout, world)
        return model, opt
    lay_out(model, layout, world)
    return model, kind(model, **own)


def eventful(method: str, layout: str = "fsdp", rank: int = 0, world: int = 1, always: bool = False) -> Result:
    """A training with everything in it: accumulation of both kinds, clipping, a frozen layer, a skipped step, batches
    of changing and uneven size."""
    sharded = layout != "ddp" and (world > 1 or always)
    model, opt = make(method, layout, sharded, world)
    # A layer that is frozen for a while is one that DDP must not wait for.
    replicas = DistributedDataParallel(model, find_unused_parameters=True) if layout == "ddp" and world > 1 else None
    shown = []
    for step in range(14):
        total = 36 if step in (7, 8) else 24
        x, y = batch(step, total)
        if step == 4:
            x[-1, 0, 0, 0] = float("nan")
        frozen = step in (9, 10)
        model[3].weight.requires_grad_(not frozen)
        model[3].bias.requires_grad_(not frozen)
        cuts = [0, *(round(total * (k + 1) / world) + (2 if k + 1 < world else 0) for k in range(world))]
        x, y = (t[cuts[rank] : cuts[rank + 1]] for t in (x, y))
        opt.zero_grad()
        pieces = list(zip(x.chunk(2), y.chunk(2), strict=True)) if step in (5, 6, 11) else [(x, y)]
        for number, piece in enumerate(pieces):
            averaged = step == 11 or number + 1 == len(pieces)
            if sharded:
                model.set_requires_gradient_sync(averaged)
            with contextlib.nullcontext() if replicas is None or averaged else replicas.no_sync():
                base.backward(replicas or model, *piece, total, world)
        if step in (2, 3, 8, 12):
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        opt.step()
        if step in (5, 7, 12):  # evaluation leaves the root gathered
            with torch.no_grad():
                shown.append(model(batch(99)[0]))
    found = {
        "model": whole(model),
        "shown": {str(step): y for step, y in enumerate(shown)},
        "skipped": opt.stats()["skipped_steps"],
        "bytes": base.own_bytes(opt),
    }
    opt.close()
    return found


@scenario
def ddp(rank: int, world: int) -> Result:
    return {method: eventful(method, "ddp", rank, world) for method in (HYBRID if world == 2 else ON_FOUR["ddp"])}


@scenario
def fsdp(rank: int, world: int) -> Result:
    """On four ranks some have nothing of small layers."""
    methods = base.TRAJECTORIES if world == 2 else ON_FOUR["fsdp"]
    return {method: eventful(method, "fsdp", rank, world) for method in methods}


@scenario
def fsdp_in_other_ways(rank: int, world: int) -> Result:
    return {
        layout: {method: eventful(method, layout, rank, world) for method in ("nothing set", "default")}
        for layout in ("fsdp, root alone", "fsdp, after")
    }


@scenario
def hsdp(rank: int, world: int) -> Result:
    return {method: eventful(method, "hsdp", rank, world) for method in ON_FOUR["hsdp"]}


@scenario
def more_on_four(rank: int, world: int) -> Result:
    found = {f"{layout}: {m}": eventful(m, layout, rank, world) for layout, m, w in MORE if w == world}
    return {**found, **{f"{layout}: {m}": spread(m, layout, world) for layout, m, w in MORE_SPREAD if w == world}}


# --- tensor parallel ----------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Everything that tensor parallel can lay out, and a layer that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.plain = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(torch.tanh(self.plain(x)))


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def lay_out_words(model: Words, layout: str, world: int) -> tuple[int, int]:
    """Returns which batch this rank has, and how many there are."""
    columns, rows = ColwiseParallel, RowwiseParallel
    if layout in ("sequence parallel", "loss parallel"):
        plan: dict[str, Any] = {
            "embedding": rows(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": columns(input_layouts=Shard(1)),
            "down": rows(output_layouts=Shard(1)),
            "plain": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
            "head": columns(use_local_output=False)
            if layout == "loss parallel"
            else columns(output_layouts=Replicate()),
        }
    else:
        embedding = columns(output_layouts=Replicate()) if layout == "by columns" else rows(input_layouts=Replicate())
        plan = {"embedding": embedding, "up": columns(), "down": rows(), "head": columns(output_layouts=Replicate())}
    if layout != "fsdp and tensor parallel":
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
        return 0, 1
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], plan)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return mesh["data"].get_local_rank(), 2


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Clip the norm of all gradients, which torch's own function does not do for several meshes at once."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [g.full_tensor().norm() if isinstance(g, DTensor) else g.norm() for g in gradients]
    norm = float(torch.stack(norms).norm())
    for gradient in gradients:
        gradient.mul_(min(1.0, most / norm))


def spread(method: str, layout: str = "", world: int = 1) -> Result:
    """A training of a model whose layers are computed by several ranks together."""
    model, (mine, batches) = words(), (0, 1)
    if world > 1:
        mine, batches = lay_out_words(model, layout, world)
    kind, own = METHODS[method]
    opt = kind(model, **own) if world > 1 else kind(model, **own, process_group=None)
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        total = 24 if step < 5 else 16
        tokens, labels = (torch.randint(k, (total, 4), generator=generator).chunk(batches)[mine] for k in (11, 5))
        model.up.weight.requires_grad_(step not in (6, 7))
        opt.zero_grad()
        for piece in range(2 if step in (2, 3) else 1):
            x, y = (t.chunk(2)[piece] if step in (2, 3) else t for t in (tokens, labels))
            with loss_parallel() if layout == "loss parallel" and world > 1 else contextlib.nullcontext():
                output = model(x).flatten(0, 1)
                if layout == "loss parallel":
                    loss = nn.functional.cross_entropy(output, y.flatten(), reduction="sum")
                else:  # B of a softmax has a direction of zeros, whose step rounding decides under the default
                    loss = (output - nn.functional.one_hot(y.flatten(), 5)).square().sum()
                if step == 5 and mine == batches - 1:
                    loss = loss * float("nan")
                (loss * batches / total).backward()
        if step in (1, 4):
            clip(model.parameters(), 0.2)
        opt.step()
    found = {"model": whole(model), "bytes": base.own_bytes(opt), "skipped": opt.stats()["skipped_steps"]}
    opt.close()
    return found


#: What is compared with one process under tensor parallel: layout, method, number of ranks.
SPREAD = [
    *((layout, "default", 2) for layout in ("by rows", "by columns", "sequence parallel")),
    *(("by rows", method, 2) for method in ("nothing set", "running", "per_example", "kfac")),
    *(("loss parallel", method, 2) for method in ("running", "per_example")),
    *(("fsdp and tensor parallel", method, 4) for method in ON_FOUR["fsdp and tensor parallel"]),
    ("by rows", "default", 4),
]
#: What is left to tests that may take long, of trainings and under tensor parallel.
MORE = [(layout, m, 4) for layout in ("ddp", "fsdp", "hsdp") for m in HYBRID if m not in ON_FOUR[layout]]
MORE_SPREAD = [
    *((at, m, 4) for at in ["fsdp and tensor parallel"] for m in HYBRID if m not in ON_FOUR[at]),
    *(("by rows", m, 4) for m in HYBRID if m != "default"),
]


@scenario
def tensor_parallel(rank: int, world: int) -> Result:
    return {f"{layout}: {method}": spread(method, layout, world) for layout, method, w in SPREAD if w == world}


# --- other habits -------------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Layers that are read in other ways than by a hook on their output, and a block that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = RMSNorm(6)
        self.scaled = Scaled(6, 7)
        self.again = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        self.head = nn.Linear(7, 9, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.recurrent(self.embedding(tokens))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.scaled(x)
        x = x + checkpoint(self.again, x, use_reentrant=False)
        return self.head(x)


class RMSNorm(nn.Module):
    """As other libraries write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Scaled(nn.Linear):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * nn.functional.linear(x, self.weight, self.bias)


def kinds(layout: str = "", rank: int = 0, world: int = 1) -> Result:
    torch.manual_seed(0)
    model = Kinds().double()
    if layout:
        mesh = init_device_mesh("cpu", (world,))
        for unit in (model.recurrent, model.scaled, model.again) if layout == "units" else ():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    opt = ekfac.EKFAC(model, lr=0.01, refresh_every=3, **({} if world > 1 else {"process_group": None}))
    covered = len(opt.engine.partition.covered)
    for step in range(6):
        tokens = torch.randint(9, (12, 5), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        opt.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        opt.step()
    found = {"model": whole(model), "covered": covered}
    opt.close()
    return found


@scenario
def other_kinds_of_layers(rank: int, world: int) -> Result:
    return {layout: kinds(layout, rank, world) for layout in ("units", "root")}


def preconditioned(rank: int = 0, world: int = 1) -> Result:
    model = network()
    if world > 1:
        lay_out(model, "fsdp", world)
    pre = ekfac.Preconditioner(model, refresh_every=3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for step in range(6):
        x, y = (t.chunk(world)[rank] for t in batch(step))
        sgd.zero_grad()
        base.backward(model, x, y, 24, world)
        pre.step()
        sgd.step()
    return {"model": whole(model)}


@scenario
def preconditioner(rank: int, world: int) -> Result:
    return preconditioned(rank, world)


def mixed(policy: MixedPrecisionPolicy | None = None, rank: int = 0, world: int = 1) -> Result:
    """Forward and backward in another precision than the parameters."""
    model = network(dtype=torch.float32)
    if world > 1:
        lay_out(model, "fsdp", world, mp_policy=policy)
    opt = ekfac.EKFAC(model, lr=0.01, refresh_every=3)
    for step in range(6):
        x, y = (t.float().chunk(world)[rank] for t in batch(step))
        opt.zero_grad()
        for part in range(2):
            base.backward(model, x.chunk(2)[part], y.chunk(2)[part], 24, world)
        opt.step()
    return {
        "model": whole(model),
        "dtypes": sorted({str(t.dtype) for s in opt.state.values() for t in s.values() if isinstance(t, Tensor)}),
    }


@scenario
def mixed_precision(rank: int, world: int) -> Result:
    policies = {
        "float32": MixedPrecisionPolicy(),
        "bfloat16": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        ),
    }
    return {name: mixed(policy, rank, world) for name, policy in policies.items()}


@scenario
def refusals(rank: int, world: int) -> Result:
    found = {}
    model = network()
    lay_out(model, "fsdp", world)
    opt = ekfac.EKFAC(model, process_group=None)
    found["alone"] = error_of(lambda: base.one_step(model, opt))
    model = network()
    lay_out(model, "fsdp", world)
    opt = ekfac.EKFAC(model, damping=ekfac.AdaptiveDamping())
    found["adaptive"] = error_of(lambda: opt.step(lambda: base.backward(model, *batch(0), 24)))
    model = network()
    opt = ekfac.EKFAC(model)
    base.one_step(model, opt)
    lay_out(model, "fsdp", world)
    found["too late"] = error_of(lambda: base.one_step(model, opt))
    turned = nn.Linear(4, 4, dtype=torch.complex64)
    fully_shard(turned)
    opt = ekfac.EKFAC(turned)
    turned(torch.randn(3, 4, dtype=torch.complex64)).abs().sum().backward()
    found["complex"] = error_of(lambda: opt.step())
    # An owner fails in the step, and all hear of it.
    model = network()
    lay_out(model, "fsdp", world)
    kfac = paper.KFAC(model)
    fails = mock.patch.object(InverseMethod, "rescale", side_effect=RuntimeError("made to fail"))
    with fails if rank == 1 else contextlib.nullcontext():
        found["one rank fails within"] = error_of(lambda: base.one_step(model, kfac))
    found["afterwards"] = error_of(lambda: base.one_step(model, kfac))
    return found


@scenario
def scaler_skips_on_one_rank(rank: int, world: int) -> Result:
    """Gradients that nobody averages, infinite on one rank alone; that rank's scaler alone knows."""
    found = {}
    for how in ("whole", "fsdp"):
        model = network(dtype=torch.float32)
        if how == "fsdp":
            lay_out(model, "fsdp", world)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        opt = ekfac.EKFAC(model, lr=0.01, grad_scaler=scaler)
        for step in range(5):
            x, y = (t.float() for t in batch(step))
            opt.zero_grad()
            scaler.scale(0.5 * (model(x) - y).square().sum() / 24).backward()
            gradient = model[0].weight.grad
            if step == 2 and rank == world - 1:
                (gradient.to_local() if how == "fsdp" else gradient).reshape(-1)[:1].fill_(float("inf"))
            if step == 3:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update(256.0)
        found[how] = {"model": whole(model), "skipped": opt.stats()["skipped_steps"]}
    return found


def scaled_alone() -> Result:
    """The same on one process, which skips the step."""
    model = network(dtype=torch.float32)
    opt = ekfac.EKFAC(model, lr=0.01)
    for step in (0, 1, 3, 4):
        x, y = (t.float() for t in batch(step))
        opt.zero_grad()
        (0.5 * (model(x) - y).square().sum() / 24).backward()
        opt.step()
    return {"model": whole(model)}


@scenario
def one_rank(rank: int, world: int) -> Result:
    """A mesh of a single rank."""
    return {method: eventful(method, "fsdp", 0, 1, always=True) for method in ("default", "per_example", "kfac")}


# --- bytes and messages -------------------------------------------------------------------------------------------


def deep() -> nn.Sequential:
    """Blocks enough to be shared out evenly."""
    torch.manual_seed(0)
    widths = [12, 24, 24, 32, 24, 24, 32, 32, 24, 24, 32, 24, 12]
    return nn.Sequential(*(m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh()))).double()


class Wire:
    """Counts what collectives send: messages, and bytes that leave this rank as rings and trees have it on average."""

    def __init__(self, world: int) -> None:
        self._world = world
        self.messages = 0
        self.bytes = 0.0

    def __enter__(self) -> Wire:
        share = (self._world - 1) / self._world
        costs = {"all_reduce": 2 * share, "reduce": share, "broadcast": share}
        self._patches = [
            mock.patch.object(dist, name, self._counted(getattr(dist, name), cost)) for name, cost in costs.items()
        ]
        self._patches.append(mock.patch.object(dist, "all_to_all_single", self._exchange(dist.all_to_all_single)))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _counted(self, function: Any, cost: float) -> Any:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.messages += 1
            self.bytes += cost * tensor.numel() * tensor.element_size()
            return function(tensor, *args, **kwargs)

        return counted

    def _exchange(self, function: Any) -> Any:
        def counted(received: Tensor, sent: Tensor, in_sizes: list[int], out_sizes: list[int], group: Any) -> Any:
            self.messages += 1
            self.bytes += sum(size for rank, size in enumerate(out_sizes) if rank != dist.get_rank())
            return function(received, sent, in_sizes, out_sizes, group=group)

        return counted


def traffic(layout: str, rank: int, world: int) -> Result:
    """What one rank keeps, and what it sends in each step beside DDP's or FSDP2's own averaging."""
    model: nn.Module = deep()
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    opt = ekfac.EKFAC(model, lr=0.01, refresh_every=20)
    used = DistributedDataParallel(model) if layout == "ddp" and world > 1 else model
    steps = []
    for step in range(24):
        x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step + 100 * rank))
        opt.zero_grad()
        takes = all(opt.engine.schedule.takes_factors(b) for b in opt.engine.partition.covered)
        with Wire(world) if world > 1 else contextlib.nullcontext() as wire:
            used(x).square().mean().backward()  # whose own messages go other ways
            opt.step()
        if wire is not None:
            steps.append([wire.messages, wire.bytes, takes])
    gradient = sum(p.numel() * p.element_size() for p in deep().parameters())
    summary = opt.summary()
    found = {
        "counted": base.own_bytes(opt), "summary": summary.bytes, "text": str(summary), "steps": steps,
        "averaging": gradient * (world - 1) / world * (2 if layout == "ddp" else 3),
    }  # fmt: skip
    opt.close()
    return found


@scenario
def bytes_and_messages(rank: int, world: int) -> Result:
    return {layout: traffic(layout, rank, world) for layout in ("ddp", "fsdp")}
