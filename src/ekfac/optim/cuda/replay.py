"""Capture of CUDA graphs, and what is captured side by side."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

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


class OwnStream:
    """A stream that no other live graphs are captured on, as long as somebody holds on to this.

    Graphs that are captured on one stream share cuBLAS's workspace: two of them must not run at once, and when one is
    destroyed torch frees it. And torch has but 32 streams, which it gives out in turns.
    """

    #: By device and address. Weakly to this, never to the stream: in some versions torch lets a stream go without
    #: telling those who refer to it weakly, and Python's collector then stumbles over them when the process ends.
    _live: ClassVar[weakref.WeakValueDictionary[tuple[torch.device, int], OwnStream]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        for _ in range(32):
            self.stream = torch.cuda.Stream(device)
            if (device, self.stream.cuda_stream) not in self._live:
                break
        self._live[device, self.stream.cuda_stream] = self


#: Lanes of optimizers that are gone. Torch never frees the workspaces of streams that a capture forks to.
_FREE: dict[torch.device, list[list[torch.cuda.Stream]]] = {}


class Lanes:
    """Runs independent parts of a step: one after the other, or while a graph is captured as branches side by side.

    Each branch has a stream, and with it memory and cuBLAS's workspace, of its own. What a part makes may be used when
    all are done; what it reads must be there until then. The streams are of another priority than those that graphs
    are captured on, and so never one of these.
    """

    def __init__(self) -> None:
        self._lanes: list[torch.cuda.Stream] = []
        #: Whether a graph is being captured.
        self.open = False

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[None]:
        """While a graph is being captured."""
        if not self._lanes:
            free = _FREE.setdefault(device, [])
            self._lanes = free.pop() if free else [torch.cuda.Stream(device, priority=-1) for _ in range(LANES)]
            weakref.finalize(self, free.append, self._lanes).atexit = False
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

    One is captured at its third call with tensors of the same form. From then on these are copied to fixed places, and
    what it returns from others; graphs share both, and all memory, as they are replayed one after another.

    Args:
        what: What they do, for a warning.
        enabled: Capture.
        memory: Bytes that the places may take; what does not fit is run. None for any.
    """

    def __init__(self, what: str, enabled: bool, memory: int | None = None) -> None:
        self.what = what
        self.enabled = enabled
        self._memory = memory
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, ...]]] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._capture_on: dict[torch.device, tuple[OwnStream, tuple[int, int]]] = {}
        #: Where one was replayed last.
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        if self._captured:
            torch.cuda.synchronize()
        for kept in (self._captured, self._places, self._capture_on):
            kept.clear()
        self._stream = None

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
        stream = torch.cuda.current_stream(given[0].device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        graph, places, returned = self._captured[key]
        torch._foreach_copy_(places, list(given))
        graph.replay()
        return tuple(r.clone() if isinstance(r, Tensor) else r for r in returned)

    def _capture(self, key: Hashable, function: Callable[..., tuple[Any, ...]], given: Sequence[Tensor]) -> bool:
        """Capture a function whose turn it is; whether that was done."""
        if key in self._seen or len(self._seen) < MOST:
            self._seen[key] += 1
        if self._seen[key] < 3:
            return False
        new = {place: t for place, t in _numbered("given", given) if place not in self._places}
        if self._memory is not None and sum(map(_bytes, (*self._places.values(), *new.values()))) > self._memory:
            return False
        self._places.update({place: torch.empty_like(t) for place, t in new.items()})
        places = [self._places[place] for place, _ in _numbered("given", given)]
        device = given[0].device
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            if device not in self._capture_on:
                self._capture_on[device] = OwnStream(device), torch.cuda.graph_pool_handle()
            own, pool = self._capture_on[device]
            with capturing(graph, pool=pool, stream=own.stream):
                returned = tuple(self._placed(place, r) for place, r in _numbered("returned", function(*places)))
        except Exception as error:  # whatever it is, the function can do without
            self.enabled = False
            self.clear()
            warnings.warn(f"cuda_graphs: {self.what} cannot be captured and runs without: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            return False
        self._captured[key] = graph, places, returned
        return True

    def _placed(self, place: Hashable, value: Any) -> Any:
        """A tensor copied to its place; what is none as it is."""
        if not isinstance(value, Tensor):
            return value
        if place not in self._places:
            self._places[place] = torch.empty_like(value)
        return self._places[place].copy_(value)


def _numbered(what: str, values: Sequence[Any]) -> list[tuple[Hashable, Any]]:
    """Values with their places' names."""
    return [((what, i, form(v) if isinstance(v, Tensor) else None), v) for i, v in enumerate(values)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
