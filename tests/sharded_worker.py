"""What each rank does in the tests of test_sharded.py, which start this file once a rank."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ekfac
import replicas_worker as base
from replicas_worker import METHODS, Result, batch, error_of, main, network, scenario

#: How a model is laid out over ranks.
LAYOUTS = ("fsdp", "fsdp, root alone", "fsdp, after", "hsdp")


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
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()}


def make(method: str, layout: str, world: int) -> tuple[nn.Sequential, Any]:
    """A model and its optimizer; on one rank, a plain one."""
    model = network()
    kind, own = METHODS[method]
    if world == 1:
        return model, kind(model, **own)
    if layout == "fsdp, after":
        opt = kind(model, **own)
        lay_out(model, layout, world)
        return model, opt
    lay_out(model, layout, world)
    return model, kind(model, **own)


def eventful(method: str, layout: str = "fsdp", rank: int = 0, world: int = 1) -> Result:
    """A training with everything in it: accumulation of both kinds, clipping, a frozen layer, a skipped step, batches
    of changing and uneven size."""
    model, opt = make(method, layout, world)
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
            if world > 1:
                model.set_requires_gradient_sync(step == 11 or number + 1 == len(pieces))
            base.backward(model, *piece, total, world)
        if step in (2, 3, 8, 12):
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        opt.step()
        if step == 7:  # evaluation leaves the root gathered
            with torch.no_grad():
                model(x)
    found = {"model": whole(model), "skipped": opt.stats()["skipped_steps"], "bytes": base.own_bytes(opt)}
    opt.close()
    return found


@scenario
def fsdp(rank: int, world: int) -> Result:
    return {method: eventful(method, "fsdp", rank, world) for method in base.TRAJECTORIES}


@scenario
def fsdp_in_other_ways(rank: int, world: int) -> Result:
    return {layout: eventful("default", layout, rank, world) for layout in ("fsdp, root alone", "fsdp, after")}


@scenario
def hsdp(rank: int, world: int) -> Result:
    return {method: eventful(method, "hsdp", rank, world) for method in base.TRAJECTORIES}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
