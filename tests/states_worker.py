"""What each rank does in the tests of test_states_of_ranks.py: writing and reading state under different layouts."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ekfac
import replicas_worker as base
from replicas_worker import METHODS, Result, error_of, main, network, scenario
from sharded_worker import HYBRID, lay_out, lay_out_words, whole, words

#: Steps after which a training is saved and goes on elsewhere.
STEPS = (3, 6, 8, 10)
#: Who goes on, and under which layout: (ranks, layout).
CHAINS = {
    "fsdp, whole, alone, hsdp": ("fsdp", "whole", "alone", "hsdp"),
    "whole, fsdp, alone, whole": ("whole", "fsdp", "alone", "whole"),
}
#: From whose model a layer is taken, and after how many steps.
GONE = (("nothing set", 0), ("nothing set", 2), ("default, bounded", 2))
SAVED = ("nothing set", "default, bounded", "per_example, warm", "kfac")


def shared() -> Path:
    """Where all runs find each other's files."""
    folder = Path(base.FOLDER).parent / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def make(layout: str, method: str, world: int, start: dict[str, Any] | None = None) -> tuple[nn.Sequential, Any]:
    model = network(1 if start else 0)
    if layout not in ("whole", "alone"):
        lay_out(model, layout, world)
    kind, own = METHODS[method]
    opt = kind(model, **own)
    if start is not None:
        set_model_state_dict(model, start["model"], options=StateDictOptions(full_state_dict=True))
        opt.load_state_dict(start["state"])
    return model, opt


def train(model: nn.Module, opt: Any, layout: str, steps: range, rank: int = 0, world: int = 1) -> None:
    """A frozen layer in the middle, whose state is put away when the training moves."""
    for step in steps:
        model[3].requires_grad_(step not in (2, 3))
        if layout == "whole":
            base.train_whole(model, opt, range(step, step + 1), rank, world)
            continue
        x, y = (t.chunk(world)[rank] for t in base.batch(step))
        opt.zero_grad()
        base.backward(model, x, y, 24, world)
        opt.step()


def stretch(chain: str, method: str, number: int, rank: int = 0, world: int = 1, folder: Path | None = None) -> Result:
    """One stretch of a training that moves: from what the last one has left to what the next one finds."""
    folder = shared() if folder is None else folder
    layout = CHAINS[chain][number]
    start = torch.load(folder / f"{chain}-{method}-{number - 1}.pt", weights_only=True) if number else None
    model, opt = make(layout, method, world, start)
    train(model, opt, layout, range(STEPS[number - 1] if number else 0, STEPS[number]), rank, world)
    end = {"model": whole(model), "state": opt.state_dict()}
    if rank == 0:
        torch.save(end, folder / f"{chain}-{method}-{number}.pt")
    opt.close()
    return {"model": end["model"]}


def stretches(number: int, rank: int, world: int) -> Result:
    found = {f"{c}-{m}": stretch(c, m, number, rank, world) for c in CHAINS for m in SAVED}
    dist.barrier()
    return found


@scenario
def first_stretch(rank: int, world: int) -> Result:
    return stretches(0, rank, world)


@scenario
def second_stretch(rank: int, world: int) -> Result:
    return stretches(1, rank, world)


@scenario
def last_stretch(rank: int, world: int) -> Result:
    return stretches(3, rank, world)


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------


#: How torch lays a state dict out for a checkpoint. One that is full and flat torch itself does not load.
WAYS = {
    "sharded": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
}


def state_of(model: nn.Module, opt: Any, way: str) -> dict[str, Any]:
    options = WAYS[way]
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=options.full_state_dict))
    return {"model": weights, "optimizer": get_optimizer_state_dict(model, opt, options=options)}


def dcp_save(layout: str, way: str, rank: int = 0, world: int = 1, folder: Path | None = None) -> None:
    """Save at once and in the background, and go on."""
    folder = shared() if folder is None else folder
    where = folder / f"dcp-{layout}-{way}-{world}"
    model, opt = make(layout, "nothing set", world)
    train(model, opt, layout, range(6), rank, world)
    saved = state_of(model, opt, way)
    dcp.save(saved, checkpoint_id=where, no_dist=world == 1)
    if way == "sharded" and world > 1:
        beside = dist.new_group(backend="gloo")  # a thread of its own must not share the training's
        future: Any = dcp.async_save(saved, checkpoint_id=f"{where}-async", process_group=beside)
        train(model, opt, layout, range(6, 8), rank, world)  # meanwhile
        future.result()
    opt.close()


@scenario
def dcp_saves(rank: int, world: int) -> Result:
    for layout in ("whole", "fsdp"):
        for way in WAYS:
            dcp_save(layout, way, rank, world)
    dist.barrier()
    return {}


def dcp_load(where: Path, layout: str, way: str, rank: int = 0, world: int = 1, fresh: bool = True) -> Result:
    """Loads into an optimizer that is new, or has taken steps, and goes on."""
    model, opt = make(layout, "nothing set", world)
    if not fresh:
        train(model, opt, layout, range(20, 26), rank, world)
    saved = state_of(model, opt, way)
    dcp.load(saved, checkpoint_id=where, no_dist=world == 1)
    options = WAYS[way]
    set_model_state_dict(model, saved["model"], options=StateDictOptions(full_state_dict=options.full_state_dict))
    set_optimizer_state_dict(model, opt, saved["optimizer"], options=options)
    shown = whole(model)
    train(model, opt, layout, range(6, 8), rank, world)
    found = {"shown": shown, "model": whole(model)}
    opt.close()
    return found


#: What four ranks have saved and others load: layout, way.
OF_FOUR = [*(("fsdp", way) for way in WAYS), ("whole", "sharded"), ("whole", "flat"), ("fsdp", "sharded-async")]


@scenario
def dcp_loads(rank: int, world: int) -> Result:
    folder = shared()
    return {
        f"{saved}, {way} as {layout}": dcp_load(
            folder / f"dcp-{saved}-{way.replace('-async', '')}-4{'-async' * way.endswith('async')}",
            layout, way.replace("-async", ""), rank, world, fresh=layout == "fsdp",
        )
        for saved, way in OF_FOUR
        for layout in ("whole", "fsdp")
    }  # fmt: skip


@scenario
def dcp_loads_of_one(rank: int, world: int) -> Result:
    """What one process has saved, on four."""
    return {
        f"{way} as {layout}": dcp_load(shared() / f"dcp-alone-{way}-1", layout, way, rank, world)
        for way in ("sharded", "flat")
        for layout in ("whole", "fsdp", "hsdp")
    }


@scenario
def dcp_full(rank: int, world: int) -> Result:
    """The whole state on rank 0 alone, and from there to all."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, opt = make("fsdp", "nothing set", world)
    train(model, opt, "fsdp", range(6), rank, world)
    weights, state = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, opt, options=options)
    other, new = make("fsdp", "nothing set", world)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(weights), options=from_first)
    set_optimizer_state_dict(other, new, state, options=from_first)
    train(model, opt, "fsdp", range(6, 8), rank, world)
    train(other, new, "fsdp", range(6, 8), rank, world)
    return {"model": whole(model), "resumed": whole(other), "parts": len(state.get("state", {}))}


# --- to and from tensor parallel ----------------------------------------------------------------------------------


#: Layouts that a training moves through, and who saves it: the optimizer itself, or torch.
SPREAD = ("by rows", "fsdp and tensor parallel", "fsdp", "by columns")
SAVERS = ("state_dict", "sharded", "flat")
#: The default with all of them, every other method with one.
MOVES = [*((HYBRID[0], saver) for saver in SAVERS), *zip(HYBRID[1:], itertools.cycle(SAVERS), strict=False)]
#: Those of which every kind of state, and every saver, has another.
MORE_MOVES = [("nothing set", "flat"), ("default", "state_dict"), ("running", "sharded")]


def train_words(model: nn.Module, opt: Any, steps: range, mine: int = 0, batches: int = 1) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens, labels = (torch.randint(k, (24, 4), generator=generator).chunk(batches)[mine] for k in (11, 5))
        opt.zero_grad()
        wanted = nn.functional.one_hot(labels, 5)
        ((model(tokens) - wanted).square().sum() * batches / 24).backward()
        opt.step()


def words_alone(method: str) -> dict[str, torch.Tensor]:
    model = words()
    kind, own = METHODS[method]
    train_words(model, kind(model, **own, process_group=None), range(2 * len(SPREAD)))
    return whole(model)


def move_words(method: str, saver: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Two steps under each layout, from what the one before has saved; weights always go by torch's checkpoint."""
    kind, own = METHODS[method]
    state, end = None, dict[str, torch.Tensor]()
    for number, layout in enumerate(SPREAD):
        model = words()
        if layout == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
            part = rank, world
        else:
            part = lay_out_words(model, layout, world)
        opt = kind(model, **own)

        def both(model: nn.Module = model, opt: Any = opt) -> dict[str, Any]:
            found = {"model": get_model_state_dict(model)}
            if saver != "state_dict":
                found["optimizer"] = get_optimizer_state_dict(model, opt, options=WAYS[saver])
            return found

        if number:
            saved = both()
            dcp.load(saved, checkpoint_id=shared() / f"words-{method}-{saver}-{number - 1}")
            set_model_state_dict(model, saved["model"])
            if saver == "state_dict":
                opt.load_state_dict(state)
            else:
                set_optimizer_state_dict(model, opt, saved["optimizer"], options=WAYS[saver])
        train_words(model, opt, range(2 * number, 2 * number + 2), *part)
        dcp.save(both(), checkpoint_id=shared() / f"words-{method}-{saver}-{number}")
        state, end = copy.deepcopy(opt.state_dict()), whole(model)
        opt.close()
    return end


@scenario
def moves_of_words(rank: int, world: int) -> Result:
    return {f"{m}, {s}": move_words(m, s, rank, world) for m, s in MOVES if (m, s) not in MORE_MOVES}


@scenario
def more_moves_of_words(rank: int, world: int) -> Result:
    return {f"{m}, {s}": move_words(m, s, rank, world) for m, s in MORE_MOVES}


# --- one rank alone -----------------------------------------------------------------------------------------------


@scenario
def state_of_one_rank(rank: int, world: int) -> Result:
    """Rank 0 asks for the state, and nobody else does: it hears so, and the ranks can go on."""
    model = network()
    opt = ekfac.EKFAC(model, lr=0.01)
    base.one_step(model, opt)
    store = dist.distributed_c10d._get_default_store()
    before = store.timeout
    store.set_timeout(datetime.timedelta(seconds=1))
    said = error_of(opt.state_dict) if rank == 0 else ""
    store.set_timeout(before)
    dist.barrier()
    base.one_step(model, opt)
    state = opt.state_dict()
    return {"said": said, "model": whole(model), "steps": state["ekfac"]["applied_steps"]}


# --- a layer that is gone -----------------------------------------------------------------------------------------


def without_a_layer(method: str, at: int, **group: Any) -> dict[str, torch.Tensor]:
    """Take a layer out of the model after some steps, and save and load the state after the next."""
    model = network()
    kind, own = METHODS[method]
    opt = kind(model, **own, **group)
    for step in range(4):
        if step == at:
            model[4] = nn.Identity()
        base.one_step(model, opt)
        if step == at:
            opt.load_state_dict(opt.state_dict())
    return whole(model)


@scenario
def a_layer_that_is_gone(rank: int, world: int) -> Result:
    return {f"{method}, {at}": without_a_layer(method, at) for method, at in GONE}


# --- gradients that the last step has used ------------------------------------------------------------------------


@scenario
def used_gradients(rank: int, world: int) -> Result:
    """All take one more step without a backward pass, and one where one of them has other gradients."""
    model = network()
    opt = ekfac.EKFAC(model)
    base.one_step(model, opt)
    before = whole(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt.step()
    found = {"before": before, "after": whole(model), "told": [str(warning.message) for warning in told]}
    if rank == 1:
        model[3].weight.grad = torch.randn_like(model[3].weight)
    return {**found, "said": error_of(opt.step)}


# --- a rank that dies ---------------------------------------------------------------------------------------------


def elastic(folder: Path, steps: int) -> None:
    """A training under torchrun that saves after every step and goes on from the last one saved.

    Written aside and renamed, so that a rank which dies leaves the last state whole.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # A store that knows nothing of the ranks before: with torchrun's own, gloo looks for those that have died.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    anew = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=anew, rank=rank, world_size=world)
    layout, at = "fsdp", folder / "state.pt"
    start = torch.load(at, weights_only=True) if at.exists() else None
    dist.barrier()
    model, opt = make(layout, "nothing set", world, start)
    for step in range(start["step"] if start else 0, steps):
        die_at_times(folder, rank, step)
        train(model, opt, layout, range(step, step + 1), rank, world)
        end = {"model": whole(model), "state": opt.state_dict(), "step": step + 1}
        if rank == 0:
            torch.save(end, folder / "new.pt")
            os.replace(folder / "new.pt", at)
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that leaves in the usual way


def die_at_times(folder: Path, rank: int, step: int) -> None:
    """Have this process killed, once, in a step and after some milliseconds that a file in the folder names."""
    for order in folder.glob(f"kill-{rank}-{step}-*"):
        order.rename(folder / order.name.replace("kill", "killed"))
        threading.Timer(int(order.name.rpartition("-")[2]) / 1000, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    if sys.argv[1] == "elastic":
        elastic(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
