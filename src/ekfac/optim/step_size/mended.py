"""Finds out whether somebody changes weights after every step: clamps, masks or normalises them, or adds noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.shards import held
from ekfac.optim.executor import Answer

#: The first two steps of so many are looked at.
EVERY = 10


class Mended:
    """Tells it by their norms: as they were shown after a step, and as they are when the next forward begins.

    What is made to hold of such weights must hold of those that are trained, so they cannot be averaged: the average
    alone would be clamped, and the gradients computed elsewhere. Nor can others, which were trained beside them. Only
    changes after two steps in a row count: weights that are put back now and then, or exchanged for an evaluation, are
    another matter.

    Args:
        answer: Brings a tensor to the host, perhaps later.
    """

    def __init__(self, answer: Callable[[Tensor], Answer]) -> None:
        self.found = False
        self._answer = answer
        self._shown: tuple[int, list[nn.Parameter], list[Tensor]] | None = None
        self._pending: list[tuple[int, list[nn.Parameter], Answer]] = []
        #: Who was changed after which step, at the last look.
        self._before: tuple[int, set[nn.Parameter]] = -1, set()

    def look(self, step: int, parameters: Iterable[nn.Parameter]) -> None:
        """Note what is shown after a step."""
        shown = list(parameters)
        self._shown = step, shown, list(torch._foreach_norm(list(map(held, shown)))) if shown else []

    def compare(self) -> None:
        """Find out who was changed since, as the next forward begins; a GPU tells it a few steps later."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._shown = None  # the host asks nothing while a graph is recorded
        if self._shown is not None:
            (step, parameters, norms), self._shown = self._shown, None
            now = torch._foreach_norm(list(map(held, parameters))) if parameters else []
            if parameters and all(a.device == b.device for a, b in zip(norms, now, strict=True)):
                shown, found = (torch.stack([n.to(norms[0].device) for n in of]) for of in (norms, now))
                self._pending.append((step, parameters, self._answer((shown - found).abs() > 0)))
        while self._pending and self._pending[0][2].ready(wait=False):
            step, parameters, answer = self._pending.pop(0)
            changed = {p for p, flag in zip(parameters, answer.value.tolist(), strict=True) if flag}
            last, before = self._before
            if last == step - 1:
                self.found |= bool(changed & before)
            self._before = step, changed
