"""Cached lists of parameters and their offsets, for torch's foreach functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ekfac.optim.distributed.shards import held


def pieces(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this process's parameters or shards, as real tensors."""
    return list(map(held, parameters))


class Pairs:
    """Parameters and their offsets in lists, for torch's foreach functions.

    Args:
        offsets: The offset of each parameter.
    """

    def __init__(self, offsets: Mapping[nn.Parameter, Tensor]) -> None:
        self.parameters, self.offsets = list(offsets), list(offsets.values())
        #: The parameters' identities, and those that are frozen.
        self.ids = [*map(id, self.parameters)]
        self.frozen = {p for p in self.parameters if not p.requires_grad}
        self._forms = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        p = self.parameters
        return [q.requires_grad for q in p], [q.dtype for q in p], [q.shape for q in p], [q.device for q in p]

    def unchanged(self) -> bool:
        """Return whether no parameter has been frozen, unfrozen, cast, moved or reshaped."""
        return self._now() == self._forms
