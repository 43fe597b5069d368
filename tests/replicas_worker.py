"""What each rank does in the tests of test_replicas.py, which start `main` once a rank."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import ekfac
import paper
from ekfac.optim.methods.inverse import InverseMethod
from ekfac.optim.options import StepSize

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[int, int], Result]] = {}

BOUNDED = StepSize(max_change=0.05)
CLIPPED = StepSize(decay_steps=None, kl_clip=0.01)
PACED = StepSize(max_change=0.2, lr_fraction=0.3)
#: Everything that differs in what it keeps or exchanges.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing set": (ekfac.EKFAC, {}),
    "default": (ekfac.EKFAC, {"lr": 0.01, "refresh_every": 4}),
    "default, bounded": (ekfac.EKFAC, {"lr": 0.01, "refresh_every": 4, "step_size": BOUNDED, "momentum": 0.5}),
    "running": (paper.EKFAC, {"lr": 0.05, "damping": 0.05, "refresh_every": 3, "momentum": 0.9, "step_size": CLIPPED}),
    "per_example": (paper.EKFAC, {"scaling": "per_example", "lr": 0.05, "damping": 0.05, "refresh_every": 3}),
    "per_example, warm": (ekfac.EKFAC, {"scaling": "per_example", "lr": 0.05, "damping": 0.05, "refresh_every": 4}),
    "kronecker": (paper.EKFAC, {"scaling": "kronecker", "lr": 0.05, "damping": 0.05, "refresh_every": 3}),
    "anchored": (ekfac.EKFAC, {"scaling": "anchored", "lr": 0.01, "refresh_every": 4, "step_size": PACED}),
    "adam": (ekfac.EKFAC, {"scaling": "adam", "lr": 0.01, "refresh_every": 4}),
    "kfac": (paper.KFAC, {"lr": 0.05, "damping": 0.05, "refresh_every": 3, "momentum": 0.9}),
}
#: What is compared with one process, to 1e-10.
TRAJECTORIES = (
    "nothing set",
    "default",
    "default, bounded",
    "running",
    "per_example",
    "per_example, warm",
    "anchored",
    "kfac",
)
#: The same on more ranks. Others of those are saved, and go on as one process does; or are slow.
FEW = ("nothing set", "default", "per_example")
MORE = ("running", "kfac")


def scenario(function: Callable[[int, int], Result]) -> Callable[[int, int], Result]:
    SCENARIOS[function.__name__] = function
    return function


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.PReLU(), nn.Linear(5, 4)).to(
        dtype
    )


def batch(step: int, size: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 2, 3, 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(size, 4, dtype=torch.float64, generator=generator)


def result(model: nn.Module, opt: Any, **more: Any) -> Result:
    """What must be the same on all ranks, as a copy."""
    saved = copy.deepcopy(opt.state_dict())
    return {"model": {n: p.detach().clone() for n, p in model.named_parameters()}, "state": saved, **more}


def average(model: nn.Module, world: int, group: Any = None) -> None:
    if world > 1:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, group=group)


def backward(model: nn.Module, x: Tensor, y: Tensor, total: int, world: int = 1) -> None:
    """So that the average over ranks is the mean over all examples, however they are divided."""
    (0.5 * (model(x) - y).square().sum() * world / total).backward()


# --- the same as one process --------------------------------------------------------------------------------------


def eventful(method: str, rank: int = 0, world: int = 1, group: Any = None) -> Result:
    """A training with everything in it: accumulation, a frozen layer, a skipped step, uneven batches."""
    model = network()
    kind, own = METHODS[method]
    opt = kind(model, **own, process_group=group) if group is not None else kind(model, **own)
    for step in range(14):
        total = 36 if step in (7, 8) else 24
        x, y = batch(step, total)
        if step == 4:
            x[-1, 0, 0, 0] = float("nan")  # on the last rank alone, until gradients are averaged
        frozen = step in (9, 10)
        model[3].weight.requires_grad_(not frozen)
        model[3].bias.requires_grad_(not frozen)
        # Uneven: rank 0 has a third more than its share, the last a third less; the pieces of two backward passes.
        cuts = [0, *(round(total * (k + 1) / world) + (2 if k + 1 < world else 0) for k in range(world))]
        x, y = (t[cuts[rank] : cuts[rank + 1]] for t in (x, y))
        opt.zero_grad()
        for piece in zip(x.chunk(2), y.chunk(2), strict=True) if step in (5, 6, 11) else [(x, y)]:
            backward(model, *piece, total, world)
        average(model, world, group)
        if world > 1:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / world
        opt.step()
    found = result(model, opt, skipped=opt.stats()["skipped_steps"], bytes=own_bytes(opt))
    opt.close()
    return found


def own_bytes(opt: Any) -> int:
    return sum(t.numel() * t.element_size() for s in opt.state.values() for t in s.values() if isinstance(t, Tensor))


@scenario
def trajectories(rank: int, world: int) -> Result:
    return {method: eventful(method, rank, world) for method in (TRAJECTORIES if world == 2 else FEW)}


@scenario
def more_trajectories(rank: int, world: int) -> Result:
    return {method: eventful(method, rank, world) for method in MORE}


def missing(rank: int = 0, world: int = 1) -> Result:
    """All but the last rank have no batch in some steps, and still average their gradients: zeros."""
    model = network()
    opt = ekfac.EKFAC(model, lr=0.01, refresh_every=4)
    for step in range(8):
        x, y = batch(step, 24)
        opt.zero_grad()
        if step not in (0, 3, 4, 5):
            backward(model, x.chunk(world)[rank], y.chunk(world)[rank], 24, world)
        elif rank == world - 1:
            backward(model, x, y, 24, world)
        average(model, world)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= world
        opt.step()
    return result(model, opt)


@scenario
def a_rank_without_batch(rank: int, world: int) -> Result:
    return missing(rank, world)


def mostly_zero(rank: int = 0, world: int = 1) -> Result:
    """One half of each batch has one column that is not zero, the other 20 columns; at first a quarter has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    opt = ekfac.EKFAC(model)
    for step in range(3):
        x, (_, y) = torch.zeros(24, 256, dtype=torch.float64), batch(step, 24)
        x[:12, step], x[12:, :20] = 1.0, 0.5
        x[:6] *= step > 0
        opt.zero_grad()
        backward(model, x.chunk(world)[rank], y.chunk(world)[rank], 24, world)
        average(model, world)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= world
        opt.step()
    return result(model, opt)


@scenario
def ranks_with_sparse_inputs(rank: int, world: int) -> Result:
    return mostly_zero(rank, world)


class Rotated(nn.Module):
    """A real layer, a complex matrix and bias, and a real layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 4, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).to(self.turn.dtype) @ self.turn + self.shift).abs())


def turned(rank: int = 0, world: int = 1, method: str = "nothing set") -> Result:
    """Complex parameters under DistributedDataParallel; then a step for which only the last rank has a batch."""
    model = Rotated()
    kind, own = METHODS[method]
    opt = kind(model, **own)
    parallel = DistributedDataParallel(model) if world > 1 else model
    before = {}
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(12, n, dtype=torch.float64, generator=generator) for n in (5, 2))
        opt.zero_grad()
        if step < 7:
            backward(parallel, x.chunk(world)[rank], y.chunk(world)[rank], 12, world)
        else:
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            if rank == world - 1:
                backward(model, x, y, 12)
        opt.step()
    return result(model, opt, before=before)


@scenario
def complex_parameters(rank: int, world: int) -> Result:
    return {method: turned(rank, world, method) for method in ("nothing set", "running", "kfac")}


# --- equal to the bit ---------------------------------------------------------------------------------------------


def wide(method: str, steps: int, rank: int, world: int, dtype: torch.dtype = torch.float32) -> Result:
    """Layers that are wide enough for products and sums to depend on the number of threads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(130, 70), nn.Tanh(), nn.Linear(70, 10)).to(dtype)
    kind, own = METHODS[method]
    opt = kind(model, **{**own, "refresh_every": 10} if steps > 100 else own)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(8 + 5 * rank, 130, generator=generator).to(dtype)  # uneven
        y = x[:, :10].sin()
        opt.zero_grad()
        (model(x) - y).square().sum(1).mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
    found = result(model, opt)
    opt.close()
    return found


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def failing(*names: str) -> Iterator[None]:
    """Solvers that raise."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.linalg.LinAlgError("made to fail")

    before = {name: getattr(torch.linalg, name) for name in names}
    for name in names:
        setattr(torch.linalg, name, fail)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        for name, function in before.items():
            setattr(torch.linalg, name, function)


@contextlib.contextmanager
def failing_at_times(every: int, *names: str) -> Iterator[None]:
    """Solvers of which every so many calls raises."""
    calls = 0

    def at_times(function: Any) -> Any:
        def solve(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % every == 0:
                raise torch.linalg.LinAlgError("made to fail")
            return function(*args, **kwargs)

        return solve

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch.linalg, name, at_times(getattr(torch.linalg, name))))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@scenario
def unlike_in_everything(rank: int, world: int) -> Result:
    """Threads, the sizes of batches and failing solvers, for 200 steps of every rule."""
    solvers = "eigh", "qr", "cholesky", "cholesky_ex"
    with threads(1 + rank % 2), failing_at_times(7 if rank else 10**9, *solvers):
        return {method: wide(method, 200, rank, world) for method in METHODS}


@scenario
def unlike_threads(rank: int, world: int) -> Result:
    with threads(1 + rank % 2):
        return {m: wide(m, 120 if m == "default" else 9, rank, world) for m in METHODS}


@scenario
def solvers_fail_on_one_rank(rank: int, world: int) -> Result:
    with failing("eigh", "qr") if rank == 1 else contextlib.nullcontext():
        return {m: wide(m, 12, rank, world) for m in ("default", "running", "per_example, warm")}


@scenario
def solvers_fail_at_first_on_one_rank(rank: int, world: int) -> Result:
    with failing("eigh", "qr") if rank == 1 else contextlib.nullcontext():
        wide("default", 3, rank, world)
    return {"default": wide("default", 5, rank, world)}


# --- decisions, groups and errors ---------------------------------------------------------------------------------


@scenario
def not_finite_on_one_rank(rank: int, world: int) -> Result:
    """Gradients that nobody averages: NaN on one rank alone, and all skip."""
    model = network()
    opt = ekfac.EKFAC(model, lr=0.01)
    for step in range(6):
        opt.zero_grad()
        backward(model, *batch(step), 24)  # the same batch on all, so that gradients are equal without averaging
        if step == 3 and rank == world - 1:
            assert model[0].weight.grad is not None
            model[0].weight.grad[0, 0, 0, 0] = float("inf")
        opt.step()
    return result(model, opt, skipped=opt.stats()["skipped_steps"])


def small_training(model: nn.Module, opt: Any, seed: int, steps: int = 5) -> Result:
    for step in range(steps):
        opt.zero_grad()
        backward(model, *batch(step + 100 * seed), 24)
        opt.step()
    return result(model, opt)


def alone(seed: int) -> Result:
    """One process on its own."""
    model = network(seed) if seed % 2 == 0 else nn.Sequential(*network(seed), nn.Linear(4, 4, dtype=torch.float64))
    return small_training(model, ekfac.EKFAC(model, lr=0.01, refresh_every=2, process_group=None), seed, 5 + seed)


@scenario
def each_its_own_model(rank: int, world: int) -> Result:
    """A pipeline: other models, other numbers of steps."""
    return alone(rank)


@scenario
def subgroups(rank: int, world: int) -> Result:
    """Two pairs of ranks, each with a model of its own; each pair trains as one process does."""
    pairs = [dist.new_group([k, k + 1]) for k in range(0, world, 2)]
    try:
        ekfac.EKFAC(network(), process_group=pairs[1 - rank // 2])
        refused = ""
    except ValueError as error:
        refused = str(error)
    method = ("running", "default")[rank // 2]
    return {"method": method, "end": eventful(method, rank % 2, 2, pairs[rank // 2]), "refused": refused}


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_step(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    backward(model, *batch(0), 24)
    opt.step()


@scenario
def errors(rank: int, world: int) -> Result:
    found = {}
    # Models of another shape, or more layers, on one rank.
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(18, 4 + 2 * 0), nn.Linear(4, 4)).double()
    if rank == 1:
        model[1] = nn.Linear(18, 4, bias=False, dtype=torch.float64)
    opt = ekfac.EKFAC(model)
    found["other model"] = error_of(lambda: one_step(model, opt))
    # Other weights.
    model = network(0)
    if rank == 1:
        with torch.no_grad():
            model[3].weight[1, 2] += 1e-12
    found["other weights"] = error_of(lambda: one_step(model, ekfac.EKFAC(model)))
    # Another layer frozen.
    model = network(0)
    model[3].requires_grad_(rank != 1)
    found["other layers frozen"] = error_of(lambda: one_step(model, ekfac.EKFAC(model)))
    # One rank fails before the step: a gradient that is not dense.
    model = network(0)
    opt = ekfac.EKFAC(model)
    one_step(model, opt)
    opt.zero_grad()
    backward(model, *batch(1), 24)
    if rank == 1:
        bias = model[3].bias
        bias.grad = bias.grad.to_sparse()
    found["one rank fails before"] = error_of(opt.step)
    # An owner fails in the step.
    model = network(0)
    kfac = paper.KFAC(model)
    fails = mock.patch.object(InverseMethod, "rescale", side_effect=RuntimeError("made to fail"))
    with fails if rank == 1 else contextlib.nullcontext():
        found["one rank fails within"] = error_of(lambda: one_step(model, kfac))
    # Weights that somebody has changed on one rank are found before the hundredth step.
    model = network(0)
    opt = ekfac.EKFAC(model, lr=1e-3)
    frozen = model[5].bias.requires_grad_(False)
    for _ in range(3):
        one_step(model, opt)
    opt.engine.schedule.applied_steps = 100
    if rank == 1:
        with torch.no_grad():
            frozen += 1
    found["changed later"] = error_of(lambda: one_step(model, opt))
    # After all these the ranks are still in step.
    model = network(0)
    opt = ekfac.EKFAC(model)
    found["fine"] = error_of(lambda: one_step(model, opt))
    found["nothing captured"] = error_of(lambda: (opt.zero_grad(), backward(copy.deepcopy(model), *batch(0), 24)))
    return found


@scenario
def joined(rank: int, world: int) -> Result:
    """Rank 0 runs out of batches: the others go on, with what it owns."""
    model = network()
    ddp = DistributedDataParallel(model)
    opt = ekfac.EKFAC(model, lr=0.01, refresh_every=2)
    with Join([ddp, opt]):
        for step in range(3 + 2 * rank):
            opt.zero_grad()
            x, y = (t.chunk(world)[rank] for t in batch(step))
            (ddp(x) - y).square().sum(1).mean().backward()
            opt.step()
    return result(model, opt, steps=opt.stats()["steps"])


@scenario
def saved_and_loaded(rank: int, world: int) -> Result:
    """State of this many ranks; goes on after a load, here and, in the test, in one process."""
    found = {}
    for method in ("default", "running", "per_example, warm", "kfac"):
        model = network()
        kind, own = METHODS[method]
        opt = kind(model, **own)
        train_whole(model, opt, range(4), rank, world)
        model[3].weight.requires_grad_(False)
        train_whole(model, opt, range(4, 6), rank, world)  # some state is put away
        half = {"weights": copy.deepcopy(model.state_dict()), "state": copy.deepcopy(opt.state_dict())}
        other = network(1)
        other.load_state_dict(half["weights"])
        other[3].weight.requires_grad_(False)
        new = kind(other, **own)
        new.load_state_dict(half["state"])
        for one, o in ((model, opt), (other, new)):
            one[3].weight.requires_grad_(True)
            train_whole(one, o, range(6, 10), rank, world)
        found[method] = {"half": half, "went on": result(model, opt), "resumed": result(other, new),
                         "curvature": opt.curvature().diagonal() if method != "kfac" else None}  # fmt: skip
    return found


def train_whole(model: nn.Module, opt: Any, steps: range, rank: int = 0, world: int = 1) -> None:
    for step in steps:
        x, y = (t.chunk(world)[rank] for t in batch(step))
        opt.zero_grad()
        backward(model, x, y, 24, world)
        average(model, world)
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / world
        opt.step()


@scenario
def torch_checkpoints(rank: int, world: int) -> Result:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = network()
    opt = ekfac.EKFAC(model, lr=0.01, refresh_every=2)
    train_whole(model, opt, range(5), rank, world)
    saved = get_optimizer_state_dict(model, opt)
    weights = copy.deepcopy(model.state_dict())
    in_memory = copy.deepcopy(saved)
    folder = os.path.join(FOLDER, f"dcp{world}")
    dcp.save({"optimizer": saved}, checkpoint_id=folder, no_dist=False)
    dist.barrier()

    fresh = network(1)
    fresh.load_state_dict(weights)
    new = ekfac.EKFAC(fresh, lr=0.01, refresh_every=2)
    set_optimizer_state_dict(fresh, new, in_memory)
    # From disk: into the layout of an optimizer that has taken steps.
    third = network(2)
    stepped = ekfac.EKFAC(third, lr=0.01, refresh_every=2)
    train_whole(third, stepped, range(5, 10), rank, world)
    third.load_state_dict(weights)
    template = {"optimizer": get_optimizer_state_dict(third, stepped)}
    dcp.load(template, checkpoint_id=folder)
    set_optimizer_state_dict(third, stepped, template["optimizer"])
    # And into the layout of one that has not.
    fourth = network(3)
    empty = ekfac.EKFAC(fourth, lr=0.01, refresh_every=2)
    template = {"optimizer": get_optimizer_state_dict(fourth, empty)}
    dcp.load(template, checkpoint_id=folder)
    fourth.load_state_dict(weights)
    set_optimizer_state_dict(fourth, empty, template["optimizer"])
    found = {}
    ends = {"went on": (model, opt), "in memory": (fresh, new), "from disk": (third, stepped), "new": (fourth, empty)}
    for how, (one, o) in ends.items():
        train_whole(one, o, range(5, 9), rank, world)
        found[how] = result(one, o)
    return found


FOLDER = ""


def main(rank: int, world: int, folder: str, names: list[str]) -> None:
    global FOLDER
    FOLDER = folder
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    ends: dict[str, Any] = {}
    for name in names:
        try:
            ends[name] = SCENARIOS[name](rank, world)
        except Exception:
            ends[name] = {"traceback": traceback.format_exc()}
            break
    torch.save(ends, f"{folder}/{world}-{rank}.pt")
    with contextlib.suppress(Exception):
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
