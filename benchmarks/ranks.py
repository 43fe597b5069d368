"""What a rank keeps and sends: bytes of curvature, messages and bytes of a step, beside DDP's averaging of gradients.

``python benchmarks/ranks.py --out results/bench/ranks_cpu.json`` counts them on 1, 2 and 4 CPU ranks. What a collective
sends is counted as rings and trees have it on average; DDP's averaging by W ranks is 2 (W - 1) / W of the gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import ekfac

STEPS = 24
WIDTHS = (12, 24, 24, 32, 24, 24, 32, 32, 24, 24, 32, 24, 12)
sent = {"messages": 0, "bytes": 0.0}


def counted(function: Any, cost: float) -> Any:
    """Return a collective that counts what it sends."""

    def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent["messages"] += 1
        sent["bytes"] += cost * tensor.numel() * tensor.element_size()
        return function(tensor, *args, **options)

    return call


def count_collectives(rank: int, world: int) -> None:
    """Count what this process sends from now on."""
    share = (world - 1) / world
    for name, cost in {"all_reduce": 2 * share, "reduce": share, "broadcast": share}.items():
        setattr(dist, name, counted(getattr(dist, name), cost))
    exchange = dist.all_to_all_single

    def exchanged(received: Tensor, given: Tensor, into: list[int], out_of: list[int], group: Any) -> Any:
        sent["messages"] += 1
        sent["bytes"] += sum(size for other, size in enumerate(out_of) if other != rank)
        return exchange(received, given, into, out_of, group=group)

    dist.all_to_all_single = exchanged


def train(rank: int, world: int, layout: str, folder: str) -> None:
    """Train on one rank, and leave what it has kept and sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{layout}{world}", rank=rank, world_size=world)
    model = nn.Sequential(*(m for a, b in itertools.pairwise(WIDTHS) for m in (nn.Linear(a, b), nn.Tanh()))).double()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    used: nn.Module = model
    if layout == "fsdp":
        fully_shard(model)
    elif world > 1:
        used = DistributedDataParallel(model)
    opt = ekfac.EKFAC(model, refresh_every=20)
    count_collectives(rank, world)
    steps = []
    for step in range(STEPS):
        x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step + 100 * rank))
        takes = any(opt.engine.schedule.takes_factors(block) for block in opt.engine.partition.covered)
        sent.update(messages=0, bytes=0.0)
        opt.zero_grad()
        used(x).square().mean().backward()  # DDP's and FSDP2's own messages are not counted
        early = sent["bytes"]
        opt.step()
        row = {"messages": sent["messages"], "bytes": sent["bytes"], "early": early, "takes_statistics": takes}
        steps.append(row)
    kept = sum(t.numel() * t.element_size() for s in opt.state.values() for t in s.values() if isinstance(t, Tensor))
    averaged = sum(d.numel() * d.element_size() for d in opt.average.offsets.values())
    found = {"kept": kept, "summary": opt.summary().bytes, "average": averaged, "steps": steps, "gradients": gradients}
    (Path(folder) / f"{layout}{world}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def measured(layout: str, world: int, alone: int, folder: str) -> dict[str, Any]:
    """Return a row of the record."""
    spawn(train, args=(world, layout, folder), nprocs=world)
    ranks = [json.loads((Path(folder) / f"{layout}{world}-{rank}.json").read_text()) for rank in range(world)]
    alone = alone or ranks[0]["kept"]
    ddp = 2 * (world - 1) / world * ranks[0]["gradients"]
    plain = [step for rank in ranks for step in rank["steps"] if not step["takes_statistics"]]
    taking = [step for rank in ranks for step in rank["steps"][1:] if step["takes_statistics"]]
    return {
        "layout": layout,
        "ranks": world,
        "kept": [rank["kept"] for rank in ranks],
        "fullest": max(rank["kept"] for rank in ranks) / alone * world,
        "emptiest": min(rank["kept"] for rank in ranks) / alone * world,
        "summary": [rank["summary"] for rank in ranks],
        "average": [rank["average"] for rank in ranks],
        "ddp_bytes": ddp,
        "messages": max(step["messages"] for step in plain),
        "times_ddp": max(step["bytes"] for step in plain) / ddp if ddp else 0.0,
        "times_ddp_with_statistics": max(s["bytes"] for rank in ranks for s in rank["steps"]) / ddp if ddp else 0.0,
        "during_backward": min(step["early"] for step in taking) / ddp if ddp else 0.0,
    }


def main() -> None:
    """Measure, print and record."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--out", type=Path)
    out = parse.parse_args().out
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, world in (("ddp", 1), *itertools.product(("ddp", "fsdp"), (2, 4))):
            rows.append(measured(layout, world, rows[0]["kept"][0] if rows else 0, folder))
            print(json.dumps(rows[-1]), flush=True)
    if out is not None:
        command = "python benchmarks/ranks.py --out results/bench/ranks_cpu.json"
        machine = {"cores": os.cpu_count(), "torch": torch.__version__, "backend": "gloo"}
        out.write_text(json.dumps({"command": command, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
