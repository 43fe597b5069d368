"""Streams: several for the parts of a recorded step, one for work beside the next step, one for each user of graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import torch

T = TypeVar("T")

#: So many parts of a recorded step run in parallel: each is a row of small kernels that wait for one another.
STREAMS = 8
#: Parts with more numbers than this fill the device by themselves, and take memory: these share one stream.
LARGE = 2**21


class OwnStream:
    """A stream that no other live graphs are recorded on, as long as somebody holds on to this.

    Graphs that are recorded on one stream share cuBLAS's workspace: two of them must not run at once, and when one is
    destroyed torch frees it. And torch has but 32 streams, which it gives out in rotation.
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


#: Streams of optimizers that are gone. Torch never frees the workspaces of streams that a recording forks to.
_FREE: dict[torch.device, list[list[torch.cuda.Stream]]] = {}


class ParallelStreams:
    """Runs independent parts of a step: one after the other, or while a graph is recorded as its parallel branches.

    Each branch has a stream, and with it memory and cuBLAS's workspace, of its own. What a part makes may be used when
    all are done; what it reads must be there until then. The streams are of another priority than those that graphs
    are recorded on, and so never one of these.
    """

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []
        #: Whether a graph is being recorded.
        self.open = False

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[None]:
        """Record a graph inside."""
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
            parts: What to run.
            sizes: How many numbers each is about.
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
    """Runs work between two steps on a stream of its own, beside the next forward and backward pass.

    On a CPU, and where it is not enabled, the work is simply done. Whoever reads or writes what it changes calls
    :meth:`join` first.

    Args:
        enabled: Use a stream.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._stream: torch.cuda.Stream | None = None
        #: The stream, if something is under way there.
        self._under_way: list[torch.cuda.Stream] = []
        # When its optimizer is gone, others are given the memory that the work is done in.
        weakref.finalize(self, finish, self._under_way).atexit = False

    @contextmanager
    def work(self, device: torch.device) -> Iterator[None]:
        """Begin what is launched inside when the work before it is done; nothing later waits for it."""
        if not self._enabled or device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self._under_way[:] = [self._stream]

    def join(self) -> None:
        """Have what is launched from here on wait for that work."""
        while self._under_way:
            stream = self._under_way.pop()
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def finish(under_way: list[torch.cuda.Stream]) -> None:
    """Wait for streams."""
    while under_way:
        under_way.pop().synchronize()
