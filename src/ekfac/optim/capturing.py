"""Capture of CUDA graphs, and what is captured side by side."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: So many parts of a captured step run side by side: each is a row of small kernels that wait for one another.
LANES = 8
#: Parts with more numbers than this fill the device by themselves, and take memory: these share one lane.
LARGE = 2**21
#: At most so many functions of one kind are captured.
MOST = 300


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph``, made to stand what else goes on in the process.

    Python's collector stands still: models and optimizers of an earlier training are often left to it, and their
    graphs, destroyed just now, would spoil this one. What other threads do, those that pin memory say, does not count.
    When a capture fails, torch leaves its stream the current one, and its last error says only that there was another:
    the stream is put back, and the first error is raised.
    """
    stream, collects = torch.cuda.current_stream(), gc.isenabled()
    first: Exception | None = None
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            try:
                yield
            except Exception as error:
                first = error
                raise
    except Exception as last:
        raise (first or last) from None
    finally:
        torch.cuda.set_stream(stream)
        if collects:
            gc.enable()


class Streams:
    """A few streams that are made together: torch has but 32, which it gives out in turns, the first ones again then.

    Graphs that are captured on one stream share cuBLAS's workspace, so two that run at once need different ones.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._made: list[torch.cuda.Stream] = []

    def on(self, device: torch.device) -> list[torch.cuda.Stream]:
        """The streams."""
        if not self._made:
            self._made = [torch.cuda.Stream(device) for _ in range(self._count)]
        return self._made

    def forget(self) -> None:
        """Let go of them, as their graphs are gone."""
        self._made = []


class Lanes:
    """Runs independent parts of a step: one after the other, or while a graph is captured as branches side by side.

    Each branch has a stream, and with it memory and cuBLAS's workspace, of its own. What a part makes may be used when
    all are done; what it reads must be there until then.
    """

    def __init__(self) -> None:
        self.streams = Streams(LANES)
        self._lanes: list[torch.cuda.Stream] = []
        #: Whether a graph is being captured.
        self.open = False

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[None]:
        """While a graph is being captured."""
        self._lanes = self.streams.on(device)
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def __call__(self, parts: Sequence[Callable[[], T]], sizes: Sequence[int]) -> list[T]:
        """What the parts return, in their order.

        Args:
            parts: What to run.
            sizes: How many numbers each is about.
        """
        if not self.open:
            return [part() for part in parts]
        begun = torch.cuda.current_stream()
        first, *others = self._lanes
        found: dict[int, T] = {}
        for stream in self._lanes:
            stream.wait_stream(begun)
        for place, index in enumerate(sorted(range(len(parts)), key=lambda i: -sizes[i])):
            with torch.cuda.stream(first if sizes[index] > LARGE else others[place % len(others)]):
                found[index] = parts[index]()
        for stream in self._lanes:
            begun.wait_stream(stream)
        return [found[index] for index in range(len(parts))]


def form(tensor: Tensor) -> Hashable:
    """What a captured graph takes for granted of a tensor."""
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


class Replays:
    """Functions of tensors as CUDA graphs: many small kernels, slow to launch, become one.

    One is captured at its third call with tensors of the same form, which are copied to fixed places from then on. The
    graphs share their memory, so they must not be replayed beside each other.

    Args:
        what: What they do, for a warning.
        enabled: Capture.
        stream: Where to: for graphs that are replayed beside others', another than theirs.
        memory: Bytes that the places may take; what does not fit is run. None for any.
    """

    def __init__(
        self,
        what: str,
        enabled: bool,
        stream: Callable[[torch.device], torch.cuda.Stream],
        memory: int | None = None,
    ) -> None:
        self.what = what
        self.enabled = enabled
        self._stream = stream
        self._memory = memory
        self._pool: tuple[int, int] | None = None
        self._seen: Counter[Hashable] = Counter()
        self._places: dict[Hashable, Tensor] = {}
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, ...]]] = {}

    def __call__(self, key: Hashable, function: Callable[..., tuple[Any, ...]], *given: Tensor) -> tuple[Any, ...]:
        """What the function returns: tensors, and what does not change from call to call.

        Args:
            key: All that it does besides depends on.
            function: Is given the tensors.
            *given: The tensors.
        """
        if not (self.enabled and given[0].is_cuda) or torch.cuda.is_current_stream_capturing():
            return function(*given)
        key = key, *map(form, given)
        if key not in self._captured and not self._capture(key, function, given):
            return function(*given)
        graph, places, returned = self._captured[key]
        torch._foreach_copy_(places, list(given))
        graph.replay()
        return tuple(r.clone() if isinstance(r, Tensor) else r for r in returned)

    def _capture(self, key: Hashable, function: Callable[..., tuple[Any, ...]], given: Sequence[Tensor]) -> bool:
        """Capture a function whose turn it is; whether that was done."""
        if len(self._seen) > MOST:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] < 3 or len(self._captured) >= MOST:
            return False
        new = {(index, form(t)): t for index, t in enumerate(given) if (index, form(t)) not in self._places}
        if self._memory is not None and sum(map(_bytes, (*self._places.values(), *new.values()))) > self._memory:
            return False
        self._places.update({place: torch.empty_like(t) for place, t in new.items()})
        places = [self._places[index, form(t)] for index, t in enumerate(given)]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with capturing(graph, pool=self._pool, stream=self._stream(given[0].device)):
                returned = function(*places)
        except RuntimeError as error:
            self.enabled = False
            warnings.warn(f"cuda_graphs: {self.what} cannot be captured and runs without: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            return False
        self._captured[key] = graph, places, returned
        return True


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
