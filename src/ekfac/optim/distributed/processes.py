"""The processes that train together, and every collective that this library uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

#: Stands for torch's default group, if torch.distributed runs.
DEFAULT = "default"

#: Tensors by the rank, within the group, that they belong to.
ByOwner = Mapping[int, Sequence[Tensor]]


@dataclass(frozen=True)
class Processes:
    """The ranks that share statistics.

    Attributes:
        given: A process group, ``DEFAULT``, or None for this process alone.
    """

    given: Any = DEFAULT

    def __post_init__(self) -> None:
        if self.given is None or self.given == DEFAULT:
            return
        if not dist.is_available() or not isinstance(self.given, dist.ProcessGroup):
            if dist.is_available() and self.given is dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    "process_group: this process is not in the group. Allowed: a group that it is in, None"
                )
            raise ValueError(
                f"process_group={self.given!r} must be a torch.distributed process group, 'default' for the default "
                "one, or None to share statistics with no other process"
            )

    @property
    def group(self) -> Any:
        """The group as torch's collectives want it: None stands for the default one."""
        return None if self.given == DEFAULT else self.given

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        if self.given is None or not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    # --- collectives ----------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        """Take the least of all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return every process's plain data, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def sum_to_owners(self, tensors: ByOwner) -> None:
        """Sum tensors over processes, each at its owner, in place; elsewhere they are of no use afterwards.

        One bucket for every owner, dtype and device.
        """
        buckets = [(owner, bucket) for owner, bucket in _by_kind(tensors, lambda t: (t.dtype, t.device))]
        flats = [torch.cat([t.reshape(-1) for t in bucket]) for _, bucket in buckets]
        works = [self._sum_at(flat, owner) for flat, (owner, _) in zip(flats, buckets, strict=True)]
        for work, flat, (owner, bucket) in zip(works, flats, buckets, strict=True):
            work.wait()
            if owner == self.rank:
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def _sum_at(self, flat: Tensor, owner: int) -> Any:
        if flat.is_cuda and "gloo" in dist.get_backend(self.group):  # which sums on a GPU for all or for none
            return dist.all_reduce(flat, group=self.group, async_op=True)
        return dist.reduce(flat, group_dst=owner, group=self.group, async_op=True)

    def hand_round(self, tensors: ByOwner) -> None:
        """Copy tensors from their owners to all processes, in place and to the bit.

        One bucket for every owner and device, whatever the dtypes.
        """
        buckets = []
        for owner, bucket in _by_kind(tensors, lambda t: t.device):
            bucket = sorted(bucket, key=Tensor.element_size, reverse=True)  # so that every part is aligned
            if owner == self.rank:
                flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in bucket])
            else:
                count = sum(t.numel() * t.element_size() for t in bucket)
                flat = torch.empty(count, dtype=torch.uint8, device=bucket[0].device)
            work = dist.broadcast(flat, group_src=owner, group=self.group, async_op=True)
            buckets.append((owner, bucket, flat, work))
        for owner, bucket, flat, work in buckets:
            work.wait()
            if owner != self.rank:
                parts = flat.split([t.numel() * t.element_size() for t in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _by_kind(tensors: ByOwner, kind: Any) -> Iterator[tuple[int, list[Tensor]]]:
    """Sort tensors into buckets by owner and kind, in the same order on all processes."""
    for owner in sorted(tensors):
        kinds: dict[Any, list[Tensor]] = {}
        for tensor in tensors[owner]:
            kinds.setdefault(kind(tensor), []).append(tensor)
        for bucket in kinds.values():
            yield owner, bucket
