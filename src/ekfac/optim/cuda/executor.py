"""Runs the work of a step on a GPU: whole steps as CUDA graphs, parallel streams, no synchronisation."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.factors import no_autocast, tensor_cores
from ekfac.optim.cuda import update
from ekfac.optim.cuda.ahead import compile_ahead
from ekfac.optim.cuda.fused import fused
from ekfac.optim.cuda.nonfinite import NonFiniteMask, PinnedReadback
from ekfac.optim.cuda.replay import Replays, StaticBuffers
from ekfac.optim.cuda.step_graphs import StepGraphs
from ekfac.optim.cuda.streams import ParallelStreams, SideStream
from ekfac.optim.cuda.update import Table, rows_of, runs_on
from ekfac.optim.executor import Executor, Part, Readback
from ekfac.optim.options import EngineOptions

if TYPE_CHECKING:
    from ekfac.optim.engine import Apply, Engine
    from ekfac.optim.methods.base import Method
    from ekfac.optim.types import Rates, StepInputs

#: Functions of more numbers than this run eagerly, as the device is slower than the host in any case. (A refresh makes
#: about eight float64 copies of its factors, which are a quarter of what it reads.)
LARGE = {"a refresh": 2**25, "taking statistics": 2**25}
#: Refreshes of more factor entries than this do not overlap with the next step: its copies would add to peak memory.
OVERLAPPED = 2**22

T = TypeVar("T")
P = TypeVar("P", bound=Part)


class CudaExecutor(Executor):
    """Runs work on a GPU by graphs and streams, and everything else like :class:`Executor`.

    Args:
        options: The engine's options.
        whole_steps: Whether a step includes the update of the parameters.
        device: The parameters' device.
    """

    can_replay = True

    def __init__(self, options: EngineOptions, whole_steps: bool, device: torch.device) -> None:
        super().__init__(options, whole_steps)
        self._device = device
        self.mask = NonFiniteMask()
        self.side = SideStream(options.numerics.cuda_graphs)
        self.streams = ParallelStreams()
        self.step_graphs = StepGraphs(weakref.proxy(self))  # a reference cycle would keep graphs' memory alive
        #: The table from which the recorded update will read its pointers.
        self.table = Table(0, device)
        self._methods: dict[Method[Any], Method[Any]] = {}
        n = options.numerics
        self.static_buffers = StaticBuffers(2 * n.memory_limit)
        self.replays = {
            "a refresh": Replays("a refresh", n.cuda_graphs),
            "taking statistics": Replays("taking statistics", n.cuda_graphs, n.memory_limit),
        }

    def graphs_possible(self, device: torch.device) -> bool:
        """Return whether work on a device may be recorded in CUDA graphs."""
        o = self.options
        return o.numerics.cuda_graphs and device.type == "cuda" and o.grad_scaler is None and o.processes.size == 1

    def prepare(self, method: Method[Any]) -> None:
        compile_ahead(self._device, getattr(method, "rule", None))

    def replay(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> bool:
        if not (self.whole_steps and self.graphs_possible(engine.partition.device)):
            return False
        return self.step_graphs.step(engine, inputs, rates, apply)

    @property
    def records(self) -> bool:
        """Whether a whole step is being recorded."""
        return self.streams.open

    def method(self, method: Method[Any], block: Block) -> Method[Any]:
        if method not in self._methods:
            self._methods[method] = fused(method)
        return self._methods[method]

    def parallel(self, function: Callable[[P], T], parts: Sequence[P]) -> list[T]:
        if not parts:
            return []
        device, exact = blocks_of(parts[0])[0].key.device, self.options.refresh.deterministic
        with no_autocast(device) if exact else tensor_cores(device):
            if not self.records:
                return super().parallel(function, parts)
            return self.streams([partial(function, part) for part in parts], list(map(widest, parts)))

    def update(
        self,
        groups: Sequence[Mapping[str, Any]],
        lrs: Sequence[float | Tensor],
        steps: Mapping[nn.Parameter, Tensor],
        inputs: StepInputs,
        offsets: Mapping[nn.Parameter, Tensor],
        weight: float | Tensor,
        spared: Container[Tensor],
        shows: bool,
    ) -> bool:
        rows = None if inputs.weights else rows_of(groups, steps, offsets, spared, shows)
        if not rows or not runs_on(self._device) or (torch.cuda.is_current_stream_capturing() and not self.records):
            return False
        update.launch(rows, lrs, inputs.ok, weight, self.table.of(rows) if self.records else None)
        self.average_shown = shows
        return True

    def fast_products(self, multiplications: int) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def defers_statistics(self) -> bool:  # type: ignore[override]
        return self.whole_steps and self.graphs_possible(self._device)

    def static_buffers_for(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor] | None:
        found = self.static_buffers.of(tensors, dtypes)
        if found is None:
            self.static_samples.clear()
        return found

    def free_static_buffers(self) -> None:
        """Free all static buffers."""
        self.static_buffers.clear()
        self.static_samples.clear()

    def call(
        self,
        what: str,
        key: Hashable,
        function: Callable[..., tuple[Any, ...]],
        *tensors: Tensor,
        fixed: Sequence[Tensor] = (),
    ) -> tuple[Any, ...]:
        read = (*tensors, *fixed)
        large = sum(t.numel() for t in read) > LARGE[what]
        if self.records or large or (what != "a refresh" and not self.graphs_possible(read[0].device)):
            return function(*tensors)
        return self.replays[what](key, function, *tensors, fixed=fixed)

    def overlapped(self, device: torch.device, numbers: int) -> AbstractContextManager[None]:
        return nullcontext() if numbers > OVERLAPPED else self.side.work(device)

    def join(self) -> None:
        self.side.join()

    def check_finite(self, sizes: list[Tensor], wait: bool) -> tuple[bool, Tensor | None]:
        devices = {size.device for size in sizes}
        if wait or len(devices) != 1 or next(iter(devices)).type != "cuda":
            self.mask.last = None
            return super().check_finite(sizes, wait)
        ok, self.largest_gradient = self.mask.mask(sizes), math.inf
        self.mask.expect(ok)
        return True, ok

    @property
    def last_mask(self) -> Tensor | None:  # type: ignore[override]
        return self.mask.last

    def settle(self) -> bool:
        self.join()
        return self.mask.was_skipped()

    def read_back(self, value: Tensor) -> Readback:
        return PinnedReadback(value) if value.is_cuda else super().read_back(value)

    def close(self) -> None:
        self.step_graphs.forget()
        self.free_static_buffers()
        for replays in self.replays.values():
            replays.clear()


def make_executor(options: EngineOptions, whole_steps: bool, parameters: Sequence[nn.Parameter]) -> Executor:
    """Return the executor for the parameters' device."""
    device = parameters[0].device
    return CudaExecutor(options, whole_steps, device) if device.type == "cuda" else Executor(options, whole_steps)


def blocks_of(part: Any) -> Sequence[Block]:
    """Return the blocks of a stack, or a single block in a tuple."""
    return (part,) if isinstance(part, Block) else part.blocks


def widest(part: Any) -> int:
    """Return the number of entries in the largest tensor of a block or stack: gradient, A or B."""
    blocks = blocks_of(part)
    return len(blocks) * max(blocks[0].shape.numel, *blocks[0].factor_numbers())
