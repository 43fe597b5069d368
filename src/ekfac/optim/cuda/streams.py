"""Streams: for the parts of a recorded step, for work that overlaps with the next step, and for recording graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import torch

T = TypeVar("T")

#: The number of parts of a recorded step that run in parallel; each is a sequence of small dependent kernels.
STREAMS = 8
#: Parts with more numbers than this fill the device by themselves and need memory; they share one stream.
LARGE = 2**21


class OwnStream:
    """A stream reserved for recording graphs as long as this object lives.

    Graphs recorded on one stream share cuBLAS's workspace: they must not run concurrently, and destroying one frees the
    workspace. torch has only 32 streams and hands them out in rotation, so this picks one that is not in use.
    """

    #: By device and address. The weak references are to this object, not to the stream: some versions of torch free a
    #: stream without clearing weak references to it, which crashes the garbage collector at exit.
    _live: ClassVar[weakref.WeakValueDictionary[tuple[torch.device, int], OwnStream]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        for _ in range(32):
            self.stream = torch.cuda.Stream(device)
            if (device, self.stream.cuda_stream) not in self._live:
                break
        self._live[device, self.stream.cuda_stream] = self


#: Streams of deleted optimizers, for reuse: torch never frees the workspaces of streams that a recording forks to.
_FREE: dict[torch.device, list[list[torch.cuda.Stream]]] = {}


class ParallelStreams:
    """Runs independent parts of a step: in order, or as parallel branches while a graph is recorded.

    Each branch has its own stream, and with it its own memory and cuBLAS workspace. Results may be used, and inputs
    freed, once all parts are done. The streams have another priority than those on which graphs are recorded, so they
    are never the same.
    """

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []
        #: Whether a graph is being recorded.
        self.open = False

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[None]:
        """Run parts in parallel inside, while a graph is recorded."""
        if not self._streams:
            free = _FREE.setdefault(device, [])
            self._streams = free.pop() if free else [torch.cuda.Stream(device, priority=-1) for _ in range(STREAMS)]
            weakref.finalize(self, free.append, self._streams).atexit = False
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def __call__(self, parts: Sequence[Callable[[], T]], sizes: Sequence[int]) -> list[T]:
        """Return what the parts return, in their order.

        Args:
            parts: The functions to run.
            sizes: The size of each part, in numbers.
        """
        if not self.open:
            return [part() for part in parts]
        begun = torch.cuda.current_stream()
        first, *others = self._streams
        found: dict[int, T] = {}
        for stream in self._streams:
            stream.wait_stream(begun)
        for place, index in enumerate(sorted(range(len(parts)), key=lambda i: -sizes[i])):
            with torch.cuda.stream(first if sizes[index] > LARGE else others[place % len(others)]):
                found[index] = parts[index]()
        for stream in self._streams:
            begun.wait_stream(stream)
        return [found[index] for index in range(len(parts))]


class SideStream:
    """Runs work between two steps on its own stream, overlapping with the next forward and backward pass.

    On a CPU, or if not enabled, the work runs immediately. Call :meth:`join` before using anything that it changes.

    Args:
        enabled: Whether to use a stream.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._stream: torch.cuda.Stream | None = None
        #: The stream, if work is running there.
        self._running: list[torch.cuda.Stream] = []
        # Once the optimizer is deleted, its memory may be reused: wait for the work first.
        weakref.finalize(self, finish, self._running).atexit = False

    @contextmanager
    def work(self, device: torch.device) -> Iterator[None]:
        """Launch work inside after all earlier work; later work does not wait for it until :meth:`join`."""
        if not self._enabled or device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self._running[:] = [self._stream]

    def join(self) -> None:
        """Make all later work wait for it."""
        while self._running:
            stream = self._running.pop()
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def finish(under_way: list[torch.cuda.Stream]) -> None:
    """Synchronise with streams."""
    while under_way:
        under_way.pop().synchronize()
