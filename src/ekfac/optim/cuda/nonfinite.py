"""Steps that must change nothing because a gradient was not finite, found out without stalling a GPU.

On the CPU the answer is there at once. On a GPU asking for it would make the host wait for the backward pass, so the
step goes on with a 0-dim ``ok`` on the device that masks every change, and the host reads the answer one step later.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Verdicts:
    """Judges whether steps are good, and keeps the answers that the host has not read yet."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def judge(self, sizes: list[Tensor], at_once: bool) -> tuple[bool, Tensor | None]:
        """Whether to go on, and the mask to go on with (None where the step is known to be good).

        Args:
            sizes: The largest magnitude of every gradient.
            at_once: Make the host wait for the answer (a step that renews bases waits for the solver anyway).
        """
        devices = {size.device for size in sizes}
        if len(devices) != 1 or next(iter(devices)).type != "cuda" or at_once:
            found = [torch.stack([s.double() for s in sizes if s.device == device]) for device in devices]
            return all(bool(torch.isfinite(s).all()) for s in found), None
        ok = self.mask(sizes)
        self.expect(ok)
        return True, ok

    def mask(self, sizes: list[Tensor]) -> Tensor:
        """1 on the device if all is finite, else 0."""
        return torch.isfinite(torch.stack([size.float() for size in sizes])).all().double()

    def expect(self, ok: Tensor) -> None:
        """Have the host read a mask one step later."""
        answer = torch.empty((), dtype=ok.dtype, pin_memory=True)
        answer.copy_(ok, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (answer, event)

    def settle(self) -> bool:
        """Whether the last step turned out to have been skipped; waits for its answer, which is long there."""
        if self._pending is None:
            return False
        answer, event = self._pending
        self._pending = None
        event.synchronize()
        return bool(answer == 0)
