"""One run on several processes started by torchrun: each has a part of every batch; the first writes and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ekfac.lab.registry import LabError
from ekfac.lab.training.runs import RunFolder


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and which of them this is.

    Attributes:
        rank: The rank of this process; the first writes the folder and shows progress.
        size: The number of processes.
        local: The rank of this process on its machine, and the index of its GPU.
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    def device(self, name: str) -> torch.device:
        """Return this process's device of a kind."""
        device = torch.device(name)
        if self.size > 1 and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", self.local)
            torch.cuda.set_device(device)
        return device

    def check(self, batch_size: int) -> None:
        """Refuse batches that leave a process without an example."""
        if batch_size < self.size:
            raise LabError(f"batch_size {batch_size} is less than the {self.size} processes that share a batch")

    def part(self, items: Any) -> Any:
        """Return this process's part of a batch: a tensor or a sequence."""
        start, end = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[start:end]

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Wrap a model so that gradients are averaged over processes."""
        return model if self.size == 1 else DistributedDataParallel(model)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def share_buffers(self, model: nn.Module) -> None:
        """Broadcast the first process's buffers, as running statistics differ between processes."""
        for buffer in model.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)

    def meet(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


def from_torchrun(device: str) -> Ranks:
    """Connect to the processes started by torchrun; without torchrun, return this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        return Ranks()
    if not dist.is_available():
        raise LabError("torchrun has started several processes, but torch was built without torch.distributed")
    if not dist.is_initialized():
        cuda = torch.device(device).type == "cuda" if device != "auto" else torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))


def leave(code: int | str | None) -> NoReturn:
    """Exit; with several processes without cleanup, as gloo's threads could otherwise abort the process."""
    if not (dist.is_available() and dist.is_initialized()):
        sys.exit(code)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def is_first() -> bool:
    """Return whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


class Follower(RunFolder):
    """The folder of a run that another process writes; this one only reads its checkpoint."""

    def clear(self) -> None:
        """Leave it to the first process."""

    def start(self, config: Any, about: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Leave it to the first process."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Leave it to the first process."""

    def add_steps(self, losses: Sequence[float], before: int) -> None:
        """Leave it to the first process."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Leave it to the first process, although all contribute to the state."""

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Leave it to the first process."""
