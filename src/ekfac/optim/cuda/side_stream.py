"""Work for later steps, off the critical path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """Runs work between two steps on a stream of its own, beside the next forward and backward pass.

    On a CPU, and where it is not enabled, the work is simply done. Whoever reads or writes what it changes calls
    :meth:`join` first.

    Args:
        enabled: Use a stream.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def work(self, device: torch.device) -> Iterator[None]:
        """What is launched inside begins when the work before it is done, and nothing later waits for it."""
        if not self._enabled or device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self._done = self._stream.record_event()

    def join(self) -> None:
        """What is launched from here on waits for that work."""
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device if self._stream else None).wait_event(self._done)
            self._done = None
