"""Who takes part in `bench_step.py`: optimizers of torch, of this library and, where installed, of others."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ekfac
from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Split, load_dataset
from ekfac.lab.optimizers import Trains, build_optimizer
from ekfac.lab.registry import LabError
from ekfac.lab.rivals import matrices
from ekfac.lab.tasks import TASKS, Task
from ekfac.optim.statistics.schedule import START

WARM_UP = 40  # by then every kind of step has been captured; the start's turning of all bases goes on until step 300
LR = 1e-4  # small: on random data, and for optimizers of other packages
CONVOLUTIONAL = ("vgg11", "resnet34")
WITHOUT_BATCH_NORM = ("charlm",)

Options = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One optimizer: how it is made from a model and options, and on which network it runs."""

    build: Callable[[nn.Module, Options], Trains]
    batch_norm: bool = False
    #: Its name in the lab, if it takes the lab's settings.
    name: str | None = None
    #: Whether it takes the benchmark's interval between bases.
    interval: bool = False
    #: The whole step is captured in a CUDA graph.
    captured: bool = False
    about: str = ""


def by_name(name: str, **more: Any) -> Entry:
    """An optimizer of the lab."""
    return Entry(lambda model, options: build_optimizer(name, model, options), name=name, **more)


def from_package(package: str, name: str, **options: Any) -> Callable[[nn.Module, Options], Trains]:
    """An optimizer of a package that may not be there."""

    def build(model: nn.Module, given: Options) -> Trains:
        module = importlib.import_module(package)
        if package == "heavyball":
            importlib.import_module("heavyball.utils").compile_mode = None
        return getattr(module, name)(_groups(model, name), lr=LR, **options)

    return build


def _groups(model: nn.Module, name: str) -> list[Any]:
    if name != "Muon":
        return list(model.parameters())
    chosen = matrices(model)
    taken = {id(p) for p in chosen}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [{"params": chosen, "use_muon": True}, {"params": rest, "use_muon": False}]


def _adam_captured(model: nn.Module, given: Options) -> Trains:
    return torch.optim.Adam(model.parameters(), lr=LR, capturable=True)


ENTRIES = {
    "Adam + BN": by_name("adam", batch_norm=True),
    "Adam + BN, CUDA graph": Entry(_adam_captured, batch_norm=True, captured=True, about="capturable=True"),
    "SGD + BN": by_name("sgd", batch_norm=True, about="momentum=0.9"),
    "KFAC": by_name("kfac", interval=True),
    "EKFAC": by_name("ekfac", interval=True, about="scaling='per_example'"),
    "EKFAC-ra": by_name("ekfac-ra", interval=True, about="scaling='running'"),
    "EKFAC (the default)": by_name("ekfac-default", interval=True, about="scaling='anchored'"),
    "EKFAC(model)": by_name("ekfac-default", about="the same with its own interval"),
    "Muon of torch": by_name("muon", about="all weight matrices"),
    "Muon of pytorch_optimizer": Entry(from_package("pytorch_optimizer", "Muon"), about="all weight matrices"),
    "SOAP of pytorch_optimizer": Entry(from_package("pytorch_optimizer", "SOAP"), about="basis every 10"),
    "SOAP of heavyball": Entry(
        from_package("heavyball", "SOAP", precondition_frequency=10, use_precond_schedule=False),
        about="basis every 10, compile_mode=None",
    ),
    "Shampoo of pytorch_optimizer": Entry(
        from_package("pytorch_optimizer", "Shampoo", preconditioning_compute_steps=50), about="roots every 50"
    ),
    "Kron of pytorch_optimizer": Entry(
        from_package("pytorch_optimizer", "Kron", pre_conditioner_update_probability=0.03),
        about="update probability 0.03",
    ),
}


@dataclass
class Contender:
    """One network and optimizer, and the seconds that its steps took; or why there are none."""

    step: Callable[[], None] = lambda: None
    skip_start: Callable[[], None] = lambda: None
    state_bytes: Callable[[], int] = lambda: 0
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None


def options_on(task: str, entry: Entry, refresh_every: int | None) -> Options:
    """Return what an optimizer gets on a task: the lab's settings, and warm refreshes at the benchmark's interval."""
    if entry.name is None:
        return {}
    config = TrainConfig(task, entry.name)
    if entry.interval:
        every = refresh_every or (500 if task in CONVOLUTIONAL else 50)
        warm = {} if entry.name == "kfac" else {"deterministic": False, "factor_every": None}
        config = replace(config, refresh_every=every, options=warm)
    return config.resolved().optimizer_options()


@cache
def examples(name: str, device: torch.device) -> Split | None:
    """Return a task's training data on the device, shuffled; None where its files are not there."""
    try:
        found = load_dataset(TASKS.get(name).dataset).train
    except LabError:
        return None
    order = torch.randperm(len(found.x), generator=torch.Generator().manual_seed(0))
    x = found.x[order].reshape(-1, *TASKS.get(name).input_shape)
    return Split((x.float() if x.is_floating_point() else x).to(device), found.y[order].to(device))


def batches(name: str, task: Task, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end: of the task's data, or always the same one of random examples."""
    found = examples(name, device)
    if found is None:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(batch, *task.input_shape, generator=generator).to(device)
        y = torch.randint(10, (batch,), generator=generator).to(device)
        return itertools.repeat((x, y))
    whole = len(found.x) // batch * batch
    return itertools.cycle(list(zip(found.x[:whole].split(batch), found.y[:whole].split(batch), strict=True)))


def on_task(
    name: str, batch: int, entry: Entry, device: torch.device, refresh_every: int | None, warm_up: int = WARM_UP
) -> Contender:
    """Set an optimizer up on one of the lab's tasks, and take its first steps."""
    task = TASKS.get(name)
    examples(name, device)  # here, so that the first contender's peak does not count them

    def make() -> Contender:
        torch.manual_seed(0)
        model = task.build(task.width, entry.batch_norm and name not in WITHOUT_BATCH_NORM).to(device)
        options = options_on(name, entry, refresh_every)
        if options and examples(name, device) is None:
            options["lr"] = LR
        optimizer = entry.build(model, options)
        following = batches(name, task, batch, device)

        def loss() -> Tensor:
            x, y = next(following)
            return task.losses(model(x), x, y).mean()

        return _contender(optimizer, loss, entry.captured)

    return started(make, entry, device, warm_up)


def on_square_layers(
    width: int, depth: int, batch: int, entry: Entry, device: torch.device, refresh_every: int, warm_up: int = WARM_UP
) -> Contender:
    """Set an optimizer up on tanh layers of one width, without batch-norm, and take its first steps."""

    def make() -> Contender:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        model = nn.Sequential(*layers).to(device)
        options = options_on("autoencoder", entry, refresh_every)
        optimizer = entry.build(model, {**options, "lr": LR} if options else {})
        x = torch.randn(batch, width, device=device)
        return _contender(optimizer, lambda: (model(x) - x).square().sum(1).mean(), entry.captured)

    return started(make, entry, device, warm_up)


def _contender(optimizer: Trains, loss: Callable[[], Tensor], captured: bool) -> Contender:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    def skip_start() -> None:
        if isinstance(optimizer, ekfac.EKFAC | ekfac.KFAC):
            optimizer.engine.schedule.applied_steps = max(START, optimizer.engine.schedule.applied_steps)

    return Contender(captured_whole(step, optimizer) if captured else step, skip_start, lambda: state_bytes(optimizer))


def captured_whole(step: Callable[[], None], optimizer: Trains) -> Callable[[], None]:
    """Capture a whole step in a CUDA graph, after a few on a side stream, as torch's manual has it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(keep: Callable[[], None] = step) -> None:  # the graph reads the step's own network and batch
        graph.replay()

    return replay


def started(make: Callable[[], Contender], entry: Entry, device: torch.device, warm_up: int) -> Contender:
    """Make a contender and take its first steps; whatever goes wrong, it says so and the others go on."""
    if entry.captured and device.type != "cuda":
        return Contender(failed="needs a GPU")

    def first_steps() -> Contender:
        contender = make()
        for _ in range(warm_up):  # compiles, allocates, solves for the first basis
            contender.step()
        return contender

    try:
        contender, contender_peak = peak(first_steps, device)
    except Exception as error:
        return Contender(failed=reason(error))
    contender.peak_bytes = contender_peak
    return contender


def reason(error: Exception) -> str:
    """Say in one line what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def peak(function: Callable[[], Contender], device: torch.device) -> tuple[Contender, int]:
    """Run a function; return its result and the most bytes that it had allocated at one time."""
    if device.type == "cuda":
        ones = torch.ones(8, 8, device=device)
        _ = ones @ ones  # what cuBLAS works in stays, and is nobody's
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    now = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, most


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state, a storage that is referred to twice only once."""
    parts: Iterable[Any] = getattr(optimizer, "optimizers", [optimizer])
    storages = {}
    for part in parts:
        for tensor in _tensors(list(part.state.values())):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr(), storage.device] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)


def package_versions() -> dict[str, str | None]:
    """Return the versions of what takes part."""
    from importlib import metadata

    found: dict[str, str | None] = {"torch": torch.__version__, "ekfac": ekfac.__version__}
    for name in ("pytorch_optimizer", "heavyball"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
