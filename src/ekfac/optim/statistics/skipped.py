"""Counts steps that were skipped because a gradient was not finite."""

from __future__ import annotations

import warnings

#: Warn after this many consecutive skipped steps.
SKIPPED_IN_A_ROW = 20


class SkippedSteps:
    """Counts skipped steps, and warns after many in a row."""

    def __init__(self) -> None:
        self.total = 0
        #: The number of applied steps before the last skipped one, and how many were skipped in a row.
        self._last = (0, 0)

    def count(self, applied: int) -> None:
        """Count a step that was skipped after this many applied ones."""
        self.total += 1
        at, row = self._last
        self._last = applied, row + 1 if at == applied else 1
        if self._last[1] == SKIPPED_IN_A_ROW:
            warnings.warn(
                f"the last {SKIPPED_IN_A_ROW} steps were skipped because their gradients were not finite: weights or "
                "data contain NaN or infinity, or the loss overflows. opt.stats()['skipped_steps'] counts such steps",
                RuntimeWarning,
                stacklevel=4,
            )
