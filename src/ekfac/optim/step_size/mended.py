"""Finds out whether somebody changes weights between steps: clamps, masks, projects or loads them, or adds noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.shards import held
from ekfac.optim.executor import Answer

#: The first steps are looked at, and so many after a change; then those that are multiples of one of two primes. What
#: somebody does every few steps falls on one of these before long.
FIRST, AFTER = 10, 20
EVERY = 7, 17
#: So many changes are no accident.
ENOUGH = 2


class Mended:
    """Tells it by their norms: as they were shown after a step, and as they are when the next forward begins.

    What is made to hold of such weights must hold of those that are trained, so they cannot be averaged: the average
    alone would be clamped, and the gradients computed elsewhere. Nor can others, which were trained beside them. What
    is exchanged for an evaluation and put back is as it was, and one change may be an accident.

    Args:
        answer: Brings a tensor to the host, perhaps later.
    """

    def __init__(self, answer: Callable[[Tensor], Answer]) -> None:
        self._answer = answer
        self._forwards = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew, as weights come from elsewhere."""
        self._changes, self._closely = 0, FIRST
        #: Whether to look after the step under way.
        self.looks = True
        self._shown: tuple[list[nn.Parameter], list[Tensor]] | None = None
        self._pending: list[Answer] = []

    @property
    def found(self) -> bool:
        """Whether somebody does."""
        return self._changes >= ENOUGH

    def look(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note what is shown after a step."""
        self._closely -= 1
        if shown := list(parameters):
            self._shown = shown, list(torch._foreach_norm(list(map(held, shown))))

    def compare(self) -> None:
        """Find out whether it was changed since, as the next forward begins; a GPU tells it a few steps later."""
        seen, self._shown = self._shown, None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.looks = False  # the host asks nothing while a graph is recorded
            return
        if seen is not None:
            parameters, norms = seen
            now = torch._foreach_norm(list(map(held, parameters)))
            if all((a.device, a.dtype) == (b.device, b.dtype) for a, b in zip(norms, now, strict=True)):
                before, after = (torch.stack([n.to(norms[0].device) for n in of]) for of in (norms, now))
                self._pending.append(self._answer(((after - before).abs() > 0).any()))
        while self._pending and self._pending[0].ready(wait=False):
            if bool(self._pending.pop(0).value):
                self._changes, self._closely = self._changes + 1, AFTER
        self._forwards += 1
        self.looks = self._closely > 0 or self._forwards % EVERY[0] == 0 or self._forwards % EVERY[1] == 0
