"""Sends statistics to their owners during the backward pass.

After every step all processes make the same plan for the next one: which buckets to send, in which order, and after how
many backward passes. A hook sends the plan's next bucket as soon as its blocks are complete. In the step, every process
first sends all buckets that any other has sent, so that no process waits for one that had no batch or did not use a
layer. Buckets outside the plan are sent in the step, and so again are those whose statistics have changed since.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.buckets import Bucket, Sent, layout, reduce_statistics
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.distributed.processes import Twin
from ekfac.optim.statistics.partition import identity
from ekfac.optim.statistics.sums import BlockSums, Expected

if TYPE_CHECKING:
    from ekfac.optim.distributed.agreement import RollCall
    from ekfac.optim.statistics.partition import Partition
    from ekfac.optim.types import StepInputs

#: In place of a block's position in the order of arrival: it came in the step itself, or not at all.
LATE = 1e9
#: In place of a block's position: its statistics have changed since they were sent.
CHANGED = 2e9

Sums = Mapping[Block, BlockSums]


class Overlap:
    """Sends buckets of statistics during backward passes.

    Args:
        owners: The owners of blocks.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        #: A separate group: its collectives follow the plan, whatever else the processes' own group does in between.
        self._twin: Twin | None = None
        #: The buckets to send, in order, and after how many passes.
        self.plan: list[Bucket] = []
        self._passes = 1
        #: The buckets already sent, and the statistics in them.
        self.sent: dict[Bucket, Sent] = {}
        self._made_of: dict[Block, tuple[Any, Any]] = {}
        #: How often each block's statistics have arrived since the last step, and the last position in that order.
        self._counts: Counter[Block] = Counter()
        self._order: dict[Block, int] = {}
        #: Each block's position in this step, the maximum over processes, by its first parameter.
        self._places: dict[nn.Parameter, float] = {}
        #: The same in the last step that used the block's statistics.
        self._usual: dict[Block, float] = {}
        self._lock = threading.Lock()  # backward passes run one thread per device

    def connect(self, device: torch.device) -> None:
        """Set up the separate group; all processes must call this together."""
        if self._twin is None or self._twin.group not in dist.distributed_c10d._world.pg_map:
            self.drop()
            self._twin = self._owners.processes.twin(device)
            if self._twin is not None:
                weakref.finalize(self, _release, self._twin, self.sent).atexit = False

    # --- during a backward pass -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Reset the order of arrival."""
        self._counts.clear()
        self._order.clear()

    def received(self, block: Block, sums: Sums) -> None:
        """Record the arrival of a block's statistics; send the plan's next buckets if they are complete."""
        with self._lock:
            self._counts[block] += 1
            self._order[block] = self._counts.total()
            while len(self.sent) < len(self.plan):
                if any(self._counts[b] < self._passes for b in self.plan[len(self.sent)].blocks):
                    return
                self._send_next(sums)

    def _send_next(self, sums: Sums) -> None:
        assert self._twin is not None  # without it there is no plan
        bucket = self.plan[len(self.sent)]
        self._made_of.update((b, _content(sums, b)) for b in bucket.blocks)
        self.sent[bucket] = self._owners.processes.sum_packed(bucket.pack(sums), bucket.owner, self._twin.group)

    # --- in a step ------------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """The number of backward passes that have brought statistics."""
        return max(self._counts.values(), default=0)

    def place(self, block: Block, sums: Sums) -> float:
        """Return a block's position in the order of arrival, or LATE, or CHANGED."""
        if block in self._made_of and not all(map(_same, self._made_of[block], _content(sums, block))):
            return CHANGED
        complete = block in self._order and self._counts[block] == self.passes
        return float(self._order[block]) if complete else LATE

    def catch_up(self, call: RollCall, offered: list[nn.Parameter], sums: Sums) -> None:
        """Send all buckets that any other process has sent."""
        while len(self.sent) < call.sent:
            self._send_next(sums)
        self._places, self._passes = dict(zip(offered, call.places, strict=True)), call.passes or self._passes

    def drop(self) -> dict[Bucket, Sent]:
        """Discard the plan; return the sent buckets that no process has changed since."""
        good = {b: s for b, s in self.sent.items() if all(self._place(block) < CHANGED for block in b.blocks)}
        self.plan, self._made_of = [], {}
        self.sent.clear()
        return good

    def _place(self, block: Block) -> float:
        return self._places.get(block.key, LATE)

    def share(
        self, inputs: StepInputs, expected: Mapping[Block, Expected], counts: bool, partition: Partition
    ) -> list[Tensor]:
        """Sum a step's statistics over processes; return the number of examples behind gradients and statistics.

        Args:
            inputs: The step's inputs.
            expected: What every process has gathered for each block.
            counts: Whether this process counts its examples; of several with the same batch, only one does.
            partition: Records which blocks have factors on other processes.
        """
        self._usual.update((b, self._place(b)) for b, what in expected.items() if what.factors or what.scaling)
        assert inputs.agreed is not None
        somewhere = {p for p, seen in zip(partition.offered, inputs.agreed.seen, strict=True) if seen}
        unseen = {block for block in partition.covered if block.key not in somewhere}
        numbers = [int(inputs.n) * counts, int(inputs.n_statistics) * counts]
        totals = reduce_statistics(self._owners, inputs.sums, expected, unseen, self.drop(), numbers, partition.device)
        there = [b for b, what in expected.items() if what.factors and b not in unseen]
        partition.factors_elsewhere.update(identity(b) for b in there if not self._owners.mine(b))
        return totals

    def look_ahead(self, expected: Mapping[Block, Expected]) -> None:
        """Make the next plan: buckets whose blocks arrived during the last backward pass, in that order.

        Args:
            expected: What the next step needs of each block.
        """
        self.drop()
        if self._twin is None:
            return

        def last(bucket: Bucket) -> float:
            return max(self._usual.get(block, LATE) for block in bucket.blocks)

        buckets = layout(self._owners, expected)
        self.plan = sorted((bucket for bucket in buckets if last(bucket) < LATE), key=last)
        self._usual = {block: place for block, place in self._usual.items() if block in expected}

    def described(self) -> list[Any]:
        """Return the plan as plain data."""
        return [(b.owner, [block.name for block in b.blocks]) for b in self.plan]


def _content(sums: Sums, block: Block) -> tuple[Any, Any]:
    of = sums.get(block)
    return (None, None) if of is None else (of.factors, of.scaling)


def _same(one: Any, other: Any) -> bool:
    return one is other


def _release(twin: Twin, sent: dict[Bucket, Sent]) -> None:
    """Release a group for reuse, unless processes might have sent different buckets."""
    twin.idle = not sent
