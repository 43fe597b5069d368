"""Support for ``with Join([ddp, opt])``: ranks that run out of batches keep updating the blocks that they own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ekfac.optim.distributed.processes import Processes

if TYPE_CHECKING:
    from ekfac.optim.engine import Engine


class Joinable:
    """The interface that :class:`torch.distributed.algorithms.join.Join` requires of an optimizer."""

    engine: Engine
    #: Set by the context manager; None outside of it.
    _join_config: Any = None

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook that a rank without batches runs in place of a step."""
        return OwnerHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self.engine.partition.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that share statistics."""
        processes: Processes = self.engine.options.processes
        return dist.group.WORLD if processes.group is None else processes.group

    def _notify_join(self) -> None:
        """Notify ranks that have run out of batches that this one takes another step."""
        from torch.distributed.algorithms.join import Join

        Join.notify_join_context(self)  # type: ignore[arg-type]


class OwnerHook:
    """A step without a batch: gradients come from the ranks that have one."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take a step together with the ranks that have a batch."""
        config, self._optimizer._join_config = self._optimizer._join_config, None
        try:
            self._optimizer.zero_grad()
            self._optimizer.step()
        finally:
            self._optimizer._join_config = config

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do nothing: replicas are equal."""
