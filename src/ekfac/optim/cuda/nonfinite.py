"""Skips steps with non-finite gradients without stalling a GPU.

Checking would make the host wait for the backward pass. So the step proceeds with a 0-dim mask ``ok`` on the device
that guards every write, and the host reads the mask one step later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ekfac.optim.executor import Readback


class PinnedReadback(Readback):
    """A tensor on its way to the host."""

    late = True

    def __init__(self, value: Tensor) -> None:
        super().__init__(torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True))
        self.value.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(value.device))  # the value need not be on the current device

    def ready(self, wait: bool) -> bool:
        if wait:
            self._event.synchronize()
        return bool(self._event.query())


class NonFiniteMask:
    """Masks steps with non-finite gradients, and holds the mask that the host has not read yet."""

    def __init__(self) -> None:
        self._pending: Readback | None = None
        #: The mask of the last step.
        self.last: Tensor | None = None

    def mask(self, sizes: list[Tensor]) -> Tensor:
        """Return 1 on the device if all sizes are finite, else 0."""
        return torch.isfinite(torch.stack([size.float() for size in sizes])).all().double()

    def expect(self, ok: Tensor) -> None:
        """Start copying a mask to the host, which reads it one step later."""
        self.last = ok
        self._pending = PinnedReadback(ok)

    def was_skipped(self) -> bool:
        """Return whether the last step was masked; waits for the mask, which has long arrived."""
        readback, self._pending = self._pending, None
        return readback is not None and readback.ready(wait=True) and bool(readback.value == 0)
