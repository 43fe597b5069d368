"""A GPU on a CPU: what a CUDA device does to a program, without its speed.

Inside :func:`emulated` tensors can be on "cuda:0". They are computed on the CPU, but are told apart from the CPU's by
all that Python can ask, and follow the rules of a GPU:

* A CUDA graph records operations and runs none: what was made during a recording is NaN until it is replayed. A replay
  does the same operations on the same tensors, with the numbers that the host had when it was recorded.
* Nothing can be read by the host, copied from it, or solved by what waits for the device while a graph is recorded.
* Streams run side by side. Who reads or writes what another stream has under way, without having waited, is a race;
  so is memory that goes back to its stream while another may still use it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ekfac.curvature import eigensolvers
from ekfac.optim.cuda import fused, update
from ekfac.optim.groups import import_compiler
from ekfac.optim.methods.rules import within_range
from ekfac.optim.optimizer import decay
from ekfac.optim.types import BlockStep, EigenState
from emulated_streams import DEVICE, Event, Memory, Range, Stream, range_of

CPU = torch.device("cpu")
#: Operations that have the host wait for the device, or take sizes from it.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "bincount",
    "_linalg_eigh", "linalg_eigh", "linalg_inv_ex", "_linalg_svd", "linalg_cholesky", "repeat_interleave",
}  # fmt: skip
#: Methods of a tensor that take it elsewhere.
MOVES = {"to", "cuda", "cpu", "type_as"}
#: Functions that do something else here, whatever they are given.
CHANGED = {*MOVES, "tolist", "__set__"}


class Graph:
    """Operations that can be done again."""

    def __init__(self) -> None:
        #: What to do, and where its results go; None where it writes them itself.
        self.recorded: list[tuple[Callable[..., Any], Any, Any, list[Tensor] | None]] = []
        #: The memory that is used, and whether it is written.
        self.memory: dict[tuple[Memory, Range], bool] = {}
        self.complete = False

    def replay(self) -> None:
        assert self.complete and gpu().recording is None
        stream = gpu().stream
        stream.begin()
        for (memory, within), writes in self.memory.items():
            memory.use(stream, within, writes, "a graph")
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for function, args, kwargs, places in self.recorded:
                found = function(*args, **kwargs)
                for place, new in zip(places or (), tensors_in(found), strict=places is not None):
                    place.copy_(new)


class GPU:
    """The device: its streams, and the graph that is being recorded."""

    def __init__(self) -> None:
        self.default = self.stream = Stream()
        self.recording: Graph | None = None
        #: How often the host has waited for the device, and whether it may.
        self.waits = 0
        self.may_wait = True

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        assert self.recording is None, "a graph within a graph"
        assert not gc.isenabled(), "what the collector destroys during a recording can spoil it"
        stream = stream or Stream()
        stream.wait_stream(self.stream)  # torch waits for the device first
        try:
            with self.on(stream):
                self.recording = graph
                try:
                    yield
                finally:
                    self.recording = None
                for other, time in clocks_of(graph):
                    assert stream.knows((other, time)), "a branch of the graph is never joined"
        finally:
            self.stream.wait_stream(stream)  # nothing was run: after a recording that failed nobody need wait
        graph.complete = True

    def wait(self, what: str = "the host waits for the device", counts: bool = True) -> None:
        """Have the host wait, which it may not do during a recording."""
        self.refuse(what)
        if not self.may_wait:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.waits += counts

    def set_sync_debug_mode(self, mode: str) -> None:
        self.may_wait = mode != "error"

    def refuse(self, what: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


GPUS: list[GPU] = []


def gpu() -> GPU:
    return GPUS[-1]


def clocks_of(graph: Graph) -> list[tuple[int, int]]:
    return [use for memory, within in graph.memory for use in memory.uses(within)]


#: A piece of memory, and the bytes of it.
Place = tuple[Memory, Range]


class OnGPU(torch.Tensor):
    """A tensor of the emulated device: around one of the CPU."""

    inner: Tensor
    #: Where it lies, once that has been asked for.
    place: Place | None
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]
    device = DEVICE  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, place: Place | None = None) -> OnGPU:
        made: OnGPU = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.place = inner, place
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return moved(self, CPU).tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"on a GPU: {self.inner}"

    def __deepcopy__(self, memo: dict[int, Any]) -> OnGPU:
        if id(self) not in memo:
            with torch.no_grad():
                new = memo[id(self)] = self.detach().clone()
            own = {n: copy.deepcopy(v, memo) for n, v in self.__dict__.items() if n not in ("inner", "place")}
            new.__dict__.update(own)
            new.requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in what an operation is given, or returns."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [t for v in values for t in tensors_in(v)] if type(values) in (list, tuple) else []


def mapped(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return the same with a function of each tensor in its place."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {name: mapped(function, v) for name, v in values.items()}
    return type(values)(mapped(function, v) for v in values) if type(values) in (list, tuple) else values


class Owner:
    """Dies with the storage that has it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __del__(self) -> None:
        self.memory.freed()


def memory_of(inner: Tensor) -> Memory:
    """Return the memory of a tensor, which is noted from then on."""
    storage: Any = inner.untyped_storage()
    owner = getattr(storage, "owner", None)
    if owner is None:
        owner = storage.owner = Owner(Memory(gpu().stream, pooled=gpu().recording is not None))
    return owner.memory  # type: ignore[no-any-return]


def place_of(t: OnGPU) -> Place:
    if t.place is None:
        t.place = memory_of(t.inner), range_of(t.inner)
    return t.place


@dataclass(frozen=True)
class Operation:
    """What the schema of an operation says."""

    name: str
    mutable: bool
    #: Position and name of what it writes.
    writes: tuple[tuple[int, str], ...]
    #: Whether it gives back its first argument.
    in_place: bool
    on_lists: bool
    by_index: bool
    waits: bool


@functools.cache
def operation(func: Any) -> Operation:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if schema.is_mutable and argument.alias_info is not None and argument.alias_info.is_write
    ]
    by_index = name in ("index", "index_put", "index_put_")
    return Operation(
        name, schema.is_mutable, tuple(written), name.endswith("_"), name.startswith("_foreach"), by_index,
        name in WAITING,
    )  # fmt: skip


#: Of what operations are given, what holds no tensor.
PLAIN = {int, float, bool, type(None), torch.dtype}


def unwrapped(values: Any, mine: list[OnGPU], others: list[Tensor]) -> Any:
    """Return what an operation is given, with the CPU's tensors in place of the device's; notes both."""
    kind = type(values)
    if kind is OnGPU:
        mine.append(values)
        return values.inner
    if kind is list or kind is tuple:
        return kind([v if type(v) in PLAIN else unwrapped(v, mine, others) for v in values]) if values else values
    if kind is dict:
        return {name: unwrapped(v, mine, others) for name, v in values.items()} if values else values
    if isinstance(values, Tensor):
        others.append(values)
    return values


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation on the device, or record it."""
    device, op = gpu(), operation(func)
    mine: list[OnGPU] = []
    others: list[Tensor] = []
    args_, kwargs_ = unwrapped(args, mine, others), unwrapped(kwargs, mine, others)
    if others:
        check_mixture(op.name, args, kwargs, others)
    if op.waits or (op.by_index and any(t is not None and t.dtype == torch.bool for t in args[1])):
        device.wait()
    if others and device.recording is not None:  # what the host has now is what a graph has for good
        host = set(map(id, others))
        args_, kwargs_ = mapped(lambda t: t.clone() if id(t) in host else t, (args_, kwargs_))
    written = written_by(op, args_, kwargs_) if op.writes else set()
    device.stream.begin()
    if device.recording is not None and op.mutable:
        device.recording.recorded.append((func, args_, kwargs_, None))
        note(op.name, mine, written, [])
        return None if op.on_lists else args[0] if op.in_place else kwargs["out"]
    tried = args_, kwargs_
    if device.recording is not None and "batch_norm" in op.name:  # changes running statistics, which its schema hides
        tried = mapped(Tensor.clone, tried)
    with torch._C._DisableTorchDispatch():
        found = func._op(*tried[0], **tried[1])
    wrapped = {id(t.inner): t for t in mine}
    single = type(found) is Tensor and id(found) not in wrapped  # most are
    made = [found] if single else [t for t in tensors_in(found) if id(t) not in wrapped]
    places: list[Place] = [(memory_of(t), range_of(t)) for t in made]
    known = [(t.place or place_of(t))[0] for t in mine]
    views = bool(made) and all(memory in known for memory, _ in places)
    if not views:
        if device.recording is not None:
            device.recording.recorded.append((func, args_, kwargs_, made))
            for new in made:
                if new.is_floating_point():
                    new.fill_(float("nan"))
        note(op.name, mine, written, [] if others and op.mutable else places)
    if op.mutable and op.in_place:
        return None if op.on_lists else args[0]
    if single:
        return OnGPU(found, places[0])
    for new, place in zip(made, places, strict=True):
        wrapped[id(new)] = OnGPU(new, place)
    return wrapped[id(found)] if isinstance(found, Tensor) else mapped(lambda t: wrapped[id(t)], found)


def check_mixture(name: str, args: Any, kwargs: Any, others: list[Tensor]) -> None:
    """Refuse an operation on tensors of host and device where torch does."""
    if name in ("copy_", "_foreach_copy_"):
        gpu().refuse("a copy between host and device")
        if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            gpu().wait("a copy between host and device", counts=not isinstance(tensors_in(args[0])[0], OnGPU))
    elif any(t.dim() for t in others):
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")


def written_by(op: Operation, args: Any, kwargs: Any) -> set[int]:
    """Return the tensors that an operation writes."""
    found = []
    for index, name in op.writes:
        found += tensors_in(args[index] if index < len(args) else kwargs.get(name))
    return set(map(id, found))


def note(name: str, given: list[OnGPU], written: set[int], made: list[Place]) -> None:
    """Note who uses which memory now."""
    device = gpu()
    stream, recording = device.stream, device.recording
    for t in given:
        place, writes = t.place or place_of(t), id(t.inner) in written
        place[0].use(stream, place[1], writes, name)
        if recording is not None:
            recording.memory[place] = recording.memory.get(place, False) or writes
    for place in made:
        place[0].use(stream, place[1], True, name)
        if recording is not None:
            recording.memory[place] = True


def moved(t: Tensor, device: torch.device, copies: bool = False) -> Tensor:
    """Take a tensor to another device."""
    if t.device == device and not copies:
        return t
    if t.device != device:
        gpu().wait("a copy between host and device", counts=device == CPU)
    return Moved.apply(t, device)  # type: ignore[no-untyped-call,no-any-return]


class Moved(torch.autograd.Function):
    """A copy on a device, through which gradients go back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, device: torch.device) -> Tensor:
        ctx.device = t.device
        gpu().stream.begin()
        with torch._C._DisableTorchDispatch():
            new = (t.inner if isinstance(t, OnGPU) else t).detach().clone()
        if device == CPU:
            if isinstance(t, OnGPU):
                place_of(t)[0].use(gpu().stream, place_of(t)[1], False, "a copy to the host")
            return new
        memory_of(new).use(gpu().stream, range_of(new), True, "a copy")
        return OnGPU(new)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return moved(gradient, ctx.device), None


class Devices(TorchFunctionMode):
    """Has "cuda" mean the emulated device where tensors are made and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in CHANGED and not (kwargs and ("device" in kwargs or "pin_memory" in kwargs)):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.device or name == "__set__":
            done = func(*args, **kwargs)
            if func == Tensor.data.__set__ and isinstance(args[0], OnGPU):  # type: ignore[attr-defined]
                args[0].inner, args[0].place = args[1].inner, None
            return done
        if name == "tolist" and isinstance(args[0], OnGPU):
            return args[0].tolist()
        if name in MOVES and args and isinstance(args[0], Tensor):
            return self.move(name, *args, **kwargs)
        if kwargs.pop("pin_memory", False) and torch.device(kwargs.get("device") or CPU) != CPU:
            raise RuntimeError("Cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned")
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        device = torch.device(device)
        made = func(*[moved(a, CPU) if isinstance(a, OnGPU) else a for a in args], **{**kwargs, "device": CPU})
        if device.type != "cuda":
            return made
        if name in ("tensor", "as_tensor") and made.numel():
            gpu().wait("numbers from the host", counts=False)
        gpu().stream.begin()
        memory_of(made).use(gpu().stream, range_of(made), True, name)
        if gpu().recording is not None:  # a kernel fills it when the graph is replayed
            graph, value = gpu().recording, made.clone()
            assert graph is not None
            if name not in ("empty", "empty_like", "new_empty"):
                graph.recorded.append((Tensor.copy_, (made, value), {}, None))
                graph.memory[memory_of(made), range_of(made)] = True
            if made.is_floating_point():
                made.fill_(float("nan"))
        found = OnGPU(made)
        return found.requires_grad_() if kwargs.get("requires_grad") else found

    def move(self, name: str, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, given = t.device, kwargs.pop("dtype", None), list(args)
        copies = kwargs.pop("copy", False)
        target = kwargs.pop("device", None)
        if name in ("cuda", "cpu"):
            return moved(t, DEVICE if name == "cuda" else CPU)
        for value in given:
            if isinstance(value, Tensor):
                device, dtype = value.device, value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)):
                target = value
        if target is not None:
            device = torch.device(target)
        device = DEVICE if device.type == "cuda" else device
        as_dtype = t if dtype is None or t.dtype == dtype else Tensor.to(t, dtype)
        return moved(as_dtype, device, copies and as_dtype is t)


def by_the_rule(rule: Any, state: EigenState, step: BlockStep) -> Tensor:
    """Do what the kernels of the default rule do, by the rule."""
    same = step.seen is step.g
    step.g = within_range(step.g)
    step.seen = step.g if same else within_range(step.seen)
    rule.observe(state, step)
    return rule.direction(state, step)  # type: ignore[no-any-return]


def by_lists(
    rows: list[update.Row], lrs: list[float | Tensor], ok: Tensor | None, weight: float | Tensor, table: Any = None
) -> None:
    """Do what the kernel of the update does, one parameter after the other."""
    for row in rows:
        p, step, d, lr, c = row.parameter, row.step, row.offset, lrs[row.group], weight
        if ok is not None:
            lr, c = lr * ok, c * ok
        old = p.clone()
        decay([p], [step], lr * row.decay, row.cautious)
        p.sub_(step * (lr.to(p) if isinstance(lr, Tensor) else lr))
        if d is not None:
            d.add_(p - old).mul_((1 - c).to(d) if isinstance(c, Tensor) else 1 - c)
            if row.shows:
                p.sub_(d)


@contextmanager
def emulated() -> Iterator[GPU]:
    """Have an H200 inside."""
    import_compiler()  # which must not see what stands in for torch
    device = GPU()
    GPUS.append(device)
    stands_in: dict[str, Any] = {
        "CUDAGraph": Graph, "graph": device.graph, "Stream": Stream, "Event": Event, "stream": device.on,
        "current_stream": lambda device_=None: device.stream, "set_stream": lambda s: setattr(device, "stream", s),
        "is_current_stream_capturing": lambda: device.recording is not None, "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda device_=None: device.refuse("synchronize"), "is_available": lambda: True,
        "set_sync_debug_mode": device.set_sync_debug_mode,
        "get_device_capability": lambda device_=None: (9, 0), "device_of": lambda t: contextlib.nullcontext(),
        "current_device": lambda: 0, "device_count": lambda: 1, "empty_cache": lambda: None,
        "get_rng_state": lambda device_=None: torch.get_rng_state(), "set_rng_state": lambda state, device_=None: None,
    }  # fmt: skip
    eigensolvers._double_is_cheap.cache_clear()
    with contextlib.ExitStack() as stack:
        for name, value in stands_in.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(fused, "launch", by_the_rule))
        stack.enter_context(mock.patch.object(fused, "_known", {}))
        stack.enter_context(mock.patch.object(update, "launch", by_lists))
        stack.enter_context(mock.patch.object(update, "_known", {DEVICE: True}))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda t, *given: moved(t, DEVICE)))
        stack.enter_context(mode := Devices())
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with mode:  # its hooks are functions like any other
                return run(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_backward))
        alike = lambda one, two: isinstance(one, OnGPU) is isinstance(two, OnGPU)  # noqa: E731
        stack.enter_context(mock.patch.object(torch, "_has_compatible_shallow_copy_type", alike))
        try:
            yield device
        finally:
            GPUS.remove(device)
            eigensolvers._double_is_cheap.cache_clear()
