"""Parameters beside their offsets, listed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ekfac.optim.distributed.shards import held


def pieces(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return what this process holds of parameters, as real numbers."""
    return list(map(held, parameters))


class Pairs:
    """Parameters and their offsets in lists, as torch takes many at once.

    Args:
        offsets: The offset of each parameter.
    """

    def __init__(self, offsets: Mapping[nn.Parameter, Tensor]) -> None:
        self.parameters, self.offsets = list(offsets), list(offsets.values())
        #: Who they are, and those that are frozen.
        self.ids = [*map(id, self.parameters)]
        self.frozen = {p for p in self.parameters if not p.requires_grad}
        self._forms = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        p = self.parameters
        return [q.requires_grad for q in p], [q.dtype for q in p], [q.shape for q in p], [q.device for q in p]

    def hold(self) -> bool:
        """Tell whether the parameters are as they were: not frozen, thawed, cast, moved or of another shape."""
        return self._now() == self._forms
