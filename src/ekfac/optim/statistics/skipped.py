"""Steps that changed nothing, because a gradient was not finite."""

from __future__ import annotations

import warnings

#: After so many skipped steps without an applied one between them the user is warned.
SKIPPED_IN_A_ROW = 20


class SkippedSteps:
    """Counts skipped steps, and warns if there has been nothing else for a while."""

    def __init__(self) -> None:
        self.total = 0
        #: After how many applied steps the last one was skipped, and how many were skipped there.
        self._last = (0, 0)

    def count(self, applied: int) -> None:
        """Count one that was skipped after this many applied steps."""
        self.total += 1
        at, row = self._last
        self._last = applied, row + 1 if at == applied else 1
        if self._last[1] == SKIPPED_IN_A_ROW:
            warnings.warn(
                f"the last {SKIPPED_IN_A_ROW} steps were skipped, as their gradients were not finite: weights or data "
                "hold NaN or infinity, or the loss overflows. opt.stats()['skipped_steps'] counts them",
                RuntimeWarning,
                stacklevel=4,
            )
