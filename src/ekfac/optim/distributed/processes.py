"""The processes that train together, and all collectives that this library uses."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

#: torch's default group, if torch.distributed is initialised.
DEFAULT = "default"

#: Seconds after which a waiting process warns.
PATIENCE = 20.0
#: The number of meetings so far, by purpose and ranks.
_MET: dict[str, int] = {}

#: Tensors by the rank, within the group, that they belong to.
ByOwner = Mapping[int, Sequence[Tensor]]


@dataclass
class Twin:
    """Another group of the same processes, and whether it is free on this process."""

    group: Any
    idle: bool = False


#: Twins by group, in the order in which all processes have created them.
_TWINS: dict[Any, list[Twin]] = {}


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
        """The group as an argument of torch's collectives; None means the default one."""
        return None if self.given == DEFAULT else self.given

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        if self.given is None or not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The rank of this process within the group."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    @property
    def ranks(self) -> list[int]:
        """The global ranks of these processes."""
        if self.given is None:
            return [dist.get_rank()]
        return sorted(dist.get_process_group_ranks(dist.group.WORLD if self.group is None else self.group))

    def twin(self, device: torch.device) -> Twin | None:
        """Return another group of the same processes, whose collectives are independent of this one's.

        It is one that is idle on all processes, or a new one. Groups are reused rather than destroyed, because torch
        would give a destroyed group's name to the next one of the same ranks.

        Returns:
            The group; None if the backend does not support two of them.
        """
        own: Any = dist.group.WORLD if self.group is None else self.group
        backend: str = dist.get_backend(own)
        kinds = dist.get_backend_config(own)
        if not all(kind.endswith((":gloo", ":nccl")) for kind in kinds.split(",")):
            return None
        known = dist.distributed_c10d._world.pg_map
        for group in [group for group in _TWINS if group not in known]:
            del _TWINS[group]
        twins = _TWINS.setdefault(own, [])
        idle = self.minimum(torch.tensor([float(t.idle) for t in twins] or [0.0], device=device)).tolist()
        if 1.0 in idle:
            found = twins[idle.index(1.0)]
        else:
            limit = getattr(own._get_backend(device).options, "_timeout", None)
            backend = kinds if backend == "undefined" else backend
            found = Twin(dist.new_group(self.ranks, timeout=limit, backend=backend, use_local_synchronization=True))
            twins.append(found)
        found.idle = False
        return found

    def meet(self, what: str) -> None:
        """Wait for all processes before collectives in a function that users might call on one process only.

        Raises:
            RuntimeError: Some processes did not arrive within the group's timeout; the message names them.
        """
        if self.size == 1:
            return
        me, ranks, store = dist.get_rank(), self.ranks, dist.distributed_c10d._get_default_store()
        place = f"ekfac/{what}/{'-'.join(map(str, ranks))}"
        count = _MET.get(place, 0) + 1
        store.set(f"{place}/{count}/{me}", "here")
        patience: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
        began, warned, missing = time.monotonic(), False, ranks
        while missing := [r for r in missing if not store.check([f"{place}/{count}/{r}"])]:
            message = (
                f"{what} was called on rank {me}, not on ranks {missing}, which own parts of the state: call it on all"
            )
            if time.monotonic() > began + patience:
                store.delete_key(f"{place}/{count}/{me}")
                raise RuntimeError(f"{message}. Gave up after {patience:.0f} s")
            if not warned and time.monotonic() > began + PATIENCE:
                warned = True
                warnings.warn(message, RuntimeWarning, stacklevel=5)
            time.sleep(0.002)
        store.delete_key(f"{place}/{count - 1}/{me}")  # all have left the previous meeting
        _MET[place] = count

    # --- collectives ----------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def minimum(self, tensor: Tensor) -> Tensor:
        """Take the minimum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tensor

    def differ(self, numbers: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """Return for each number whether it differs between processes; all get the same mask.

        Processes with None do not count.
        """
        none = torch.full((), torch.inf, dtype=torch.float64, device=device)
        mine = torch.stack([torch.stack([none, none] if n is None else [n.to(none), -n.to(none)]) for n in numbers])
        smallest, negative = self.minimum(mine).unbind(1)
        return -negative - smallest > 1e-6 * -negative

    def gather(self, value: Any) -> list[Any]:
        """Gather plain data from all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def sum_to_owners(self, tensors: ByOwner) -> None:
        """Sum tensors over processes, in place; only their owners get valid results.

        Uses one bucket per owner, dtype and device.
        """
        if self.size == 1:
            return
        buckets = [(owner, bucket) for owner, bucket in _by_kind(tensors, lambda t: (t.dtype, t.device))]
        flats = [torch.cat([t.reshape(-1) for t in bucket]) for _, bucket in buckets]
        works = [self.sum_packed(flat, owner) for flat, (owner, _) in zip(flats, buckets, strict=True)]
        for (flat, work), (owner, bucket) in zip(works, buckets, strict=True):
            work.wait()
            if owner == self.rank:
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def sum_packed(self, flat: Tensor, owner: int, group: Any = None) -> tuple[Tensor, Any]:
        """Start summing a tensor over processes, in place, at its owner; return it and the handle to wait for.

        Args:
            flat: The tensor.
            owner: Its owner.
            group: Another group of the same processes, to be used instead.
        """
        own: Any = dist.group.WORLD if self.group is None else self.group
        group = own if group is None else group
        if flat.is_cuda and "cuda:gloo" in dist.get_backend_config(group):  # gloo has no reduce on a GPU
            return flat, dist.all_reduce(flat, group=group, async_op=True)
        return flat, dist.reduce(flat, dst=dist.get_global_rank(own, owner), group=group, async_op=True)

    def broadcast(self, tensors: ByOwner) -> None:
        """Broadcast tensors from their owners to all processes, in place and bit for bit.

        Uses one bucket per owner and device, whatever the dtypes.
        """
        if self.size == 1:
            return
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

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], device: torch.device
    ) -> None:
        """Send tensors to every rank and receive theirs in place, in one all-to-all whatever the dtypes.

        Args:
            outgoing: The tensors to send, by receiving rank.
            incoming: The tensors to fill, by sending rank; their shapes and dtypes must match what that rank sends.
            device: The device of all of them.
        """
        if self.size == 1:
            for target, source in zip(incoming[0], outgoing[0], strict=True):
                target.copy_(source)
            return
        sent = [t.detach().reshape(-1).view(torch.uint8) for to_rank in outgoing for t in to_rank]
        sizes = [[sum(map(_bytes, of_rank)) for of_rank in side] for side in (outgoing, incoming)]
        flat = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        received = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, flat, sizes[1], sizes[0], group=self.group)
        targets = [t for from_rank in incoming for t in from_rank]
        for target, part in zip(targets, received.split([_bytes(t) for t in targets]), strict=True):
            if part.storage_offset() % target.element_size():
                part = part.clone()
            target.copy_(part.view(target.dtype).view(target.shape))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _by_kind(tensors: ByOwner, kind: Any) -> Iterator[tuple[int, list[Tensor]]]:
    """Group tensors into buckets by owner and kind, in the same order on all processes."""
    for owner in sorted(tensors):
        kinds: dict[Any, list[Tensor]] = {}
        for tensor in tensors[owner]:
            kinds.setdefault(kind(tensor), []).append(tensor)
        for bucket in kinds.values():
            yield owner, bucket
