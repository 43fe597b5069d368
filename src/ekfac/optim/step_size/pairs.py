"""Parameters beside their offsets, listed once."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class Pairs:
    """Parameters and their offsets in lists, as torch takes many at once.

    Args:
        offsets: The offset of each parameter.
    """

    def __init__(self, offsets: Mapping[nn.Parameter, Tensor]) -> None:
        self.parameters, self.offsets = list(offsets), list(offsets.values())
        #: Those that are frozen.
        self.frozen = {p for p in self.parameters if not p.requires_grad}
        self._forms = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        p = self.parameters
        return [q.requires_grad for q in p], [q.dtype for q in p], [q.shape for q in p], [q.device for q in p]

    def are(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Tell whether these are the parameters, in the same order."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    def hold(self) -> bool:
        """Tell whether the parameters are as they were: not frozen, thawed, cast, moved or of another shape."""
        return self._now() == self._forms
