"""Streams that run side by side on an emulated GPU, and what memory they use when.

Every stream has a clock, which tells how far it has come itself, and how far it has waited for the others. So it is
known of any two uses of a tensor whether one comes before the other.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

DEVICE = torch.device("cuda:0")


class Race(AssertionError):
    """Two streams use one tensor at once."""


class Stream:
    """Work in order. Its clock tells how far it has come itself, and how far it has waited for the others."""

    addresses = itertools.count(1)
    live: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = DEVICE
        self.cuda_stream = next(Stream.addresses)
        self.clock: dict[int, int] = {self.cuda_stream: 0}
        #: Memory that went back to it while others might use it.
        self.free: list[Memory] = []
        Stream.live.add(self)

    def begin(self) -> None:
        """Begin something new, in memory that is free."""
        self.clock[self.cuda_stream] += 1
        while self.free:
            if not all(map(self.knows, self.free.pop().uses())):
                raise Race(f"stream {self.cuda_stream} has not waited for others to be done with memory that is free")

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.clock)

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def wait(self, clock: dict[int, int]) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def synchronize(self) -> None:
        """Have the host wait, and so all that comes later."""
        for stream in Stream.live:
            stream.wait_stream(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def knows(self, use: tuple[int, int]) -> bool:
        return self.clock.get(use[0], 0) >= use[1]


class Event:
    """A moment of a stream. It has not come yet when the host asks for the first time."""

    def __init__(self) -> None:
        self.clock: dict[int, int] = {}
        self.asked = False

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self.asked = True

    def query(self) -> bool:
        asked, self.asked = self.asked, True
        return asked


Range = tuple[int, int]


class Memory:
    """Who has written a piece of memory last, and who has read it since; for each range of bytes that was used."""

    def __init__(self, stream: Stream, pooled: bool) -> None:
        self.stream = stream
        #: Whether a graph has made it, whose own it stays.
        self.pooled = pooled
        self.written: dict[Range, tuple[int, int]] = {}
        self.read: dict[Range, dict[int, int]] = {}

    def uses(self, within: Range | None = None) -> list[tuple[int, int]]:
        """Return who uses a range and when."""
        found = [use for at, use in self.written.items() if overlap(at, within)]
        return found + [u for at, of in self.read.items() if overlap(at, within) for u in of.items()]

    def use(self, stream: Stream, within: Range, writes: bool, what: object) -> None:
        me, known, (start, end) = stream.cuda_stream, stream.clock, within
        for (first, last), (other, time) in self.written.items():
            if other != me and first < end and start < last and known.get(other, 0) < time:
                raise Race(f"{what}: stream {me} has not waited for stream {other}")
        if not writes:
            self.read.setdefault(within, {})[me] = known[me]
            return
        for (first, last), of in self.read.items():
            if first < end and start < last:
                for other, time in of.items():
                    if other != me and known.get(other, 0) < time:
                        raise Race(f"{what}: stream {me} has not waited for stream {other}")
        self.written[within] = me, known[me]
        self.read.pop(within, None)

    def freed(self) -> None:
        """Go back to the stream, which may use it for something else from now on."""
        if not self.pooled and not all(map(self.stream.knows, self.uses())):
            self.stream.free.append(self)


def overlap(one: Range, two: Range | None) -> bool:
    return two is None or (one[0] < two[1] and two[0] < one[1])


def range_of(t: Tensor) -> Range:
    """Return the bytes from a tensor's first number to its last."""
    if t.is_contiguous():
        start = t.storage_offset() * t.element_size()
        return start, start + t.nbytes
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
    start = t.storage_offset()
    return start * t.element_size(), (start + last + 1) * t.element_size()
