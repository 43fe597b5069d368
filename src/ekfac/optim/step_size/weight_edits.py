"""Detects user code that changes weights between steps: clamping, masking, projecting, loading, adding noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.shards import held
from ekfac.optim.executor import Readback

#: Check the first FIRST steps, AFTER steps after each change, and then multiples of two primes, so that a change made
#: every few steps is soon noticed.
FIRST, AFTER = 10, 20
EVERY = 7, 17
#: This many changes are taken to be systematic.
ENOUGH = 2


class WeightEdits:
    """Compares weights' norms after a step with those at the start of the next forward pass.

    Weights that user code changes cannot be averaged, nor can those trained with them: only the average x would be
    clamped, say, while gradients are computed at z. Weights that are swapped out for an evaluation and put back count
    as unchanged, and a single change may be an exception.

    Args:
        read_back: Returns a handle by which the host can read a tensor, perhaps later.
    """

    def __init__(self, read_back: Callable[[Tensor], Readback]) -> None:
        self._read_back = read_back
        self._forwards = 0
        self.forget()

    def forget(self) -> None:
        """Reset, after weights were loaded from a checkpoint."""
        self._changes, self._closely = 0, FIRST
        #: Whether to record norms after the current step.
        self.due = True
        self._shown: tuple[list[nn.Parameter], list[Tensor]] | None = None
        self._pending: list[Readback] = []

    @property
    def systematic(self) -> bool:
        """Whether weights are changed systematically."""
        return self._changes >= ENOUGH

    def record(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the norms after a step."""
        self._closely -= 1
        if shown := list(parameters):
            self._shown = shown, list(torch._foreach_norm(list(map(held, shown))))

    def compare(self) -> None:
        """Compare with the norms at the start of the next forward; on a GPU the result arrives a few steps later."""
        seen, self._shown = self._shown, None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.due = False  # the host cannot read anything while a graph is recorded
            return
        if seen is not None:
            parameters, norms = seen
            now = torch._foreach_norm(list(map(held, parameters)))
            if all((a.device, a.dtype) == (b.device, b.dtype) for a, b in zip(norms, now, strict=True)):
                before, after = (torch.stack([n.to(norms[0].device) for n in of]) for of in (norms, now))
                self._pending.append(self._read_back(((after - before).abs() > 0).any()))
        while self._pending and self._pending[0].ready(wait=False):
            if bool(self._pending.pop(0).value):
                self._changes, self._closely = self._changes + 1, AFTER
        self._forwards += 1
        self.due = self._closely > 0 or self._forwards % EVERY[0] == 0 or self._forwards % EVERY[1] == 0
