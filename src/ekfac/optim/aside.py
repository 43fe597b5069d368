"""Work for later steps, off the critical path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Aside:
    """Bases that are turned while the next step is under way, and taken up after it.

    On a GPU they are turned on a stream of their own, from copies of the factors. On a CPU, where nothing runs beside a
    step, they are turned and taken up at once.

    Args:
        stream: Use a stream; otherwise a GPU does all in order, with the same results.
    """

    def __init__(self, stream: bool) -> None:
        self._wanted = stream
        self._stream: torch.cuda.Stream | None = None
        self._waiting: list[tuple[Callable[[], None], tuple[Tensor, ...]]] = []

    def turn(self, turn: Callable[[Tensor, Tensor], Callable[[], None]], A: Tensor, B: Tensor) -> None:
        """Start to turn a basis towards that of the factors A and B, which nobody else may change.

        Args:
            turn: Computes the new basis and returns what takes it up.
            A: The factor of the inputs.
            B: The factor of the outputs' gradients.
        """
        with self._beside(A.device):
            take = turn(A, B)
        if self._later(A.device):
            self._waiting.append((take, (A, B)))  # the stream reads A and B, so their memory must not be given away
        else:
            take()

    @staticmethod
    def _later(device: torch.device) -> bool:
        return device.type == "cuda"

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        if not self._wanted or device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def take_up(self) -> None:
        """From here on the turned bases are in use."""
        if not self._waiting:
            return
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        for take, _ in self._waiting:
            take()
        self._waiting = []

    def forget(self) -> None:
        """Drop what was turned: the state that it was for is no longer there."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._waiting = []
