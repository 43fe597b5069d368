"""Statistics that go to their owners while the backward pass goes on.

After every step all processes make the same plan for the next one: which buckets are sent, in which order, and after
how many backward passes. A hook sends the next bucket of the plan when it has all its blocks. At the step every process
sends what any other has sent already, so that nobody waits in vain for one that had no batch or did not use a layer.
What is not in the plan goes in the step; so does, once more, a bucket whose statistics have changed since.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.buckets import Bucket, Sent, layout, reduce_statistics
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.distributed.processes import Twin
from ekfac.optim.statistics.partition import members
from ekfac.optim.statistics.sums import BlockSums, Expected

if TYPE_CHECKING:
    from ekfac.optim.distributed.agreement import RollCall
    from ekfac.optim.statistics.partition import Partition
    from ekfac.optim.types import StepInputs

#: In place of a block's number in the order of arrival: it came in the step itself, or not at all.
LATE = 1e9
#: In its place, too: it was sent, and has changed since.
CHANGED = 2e9

Sums = Mapping[Block, BlockSums]


class Overlap:
    """Sends buckets of statistics during backward passes.

    Args:
        owners: Who owns what.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        #: Its collectives come in the order of the plan; those of the processes' own group come in between anywhere.
        self._twin: Twin | None = None
        #: What to send next, and after how many passes.
        self.plan: list[Bucket] = []
        self._passes = 1
        #: What was sent, and the statistics that it was made of.
        self.sent: dict[Bucket, Sent] = {}
        self._made_of: dict[Block, tuple[Any, Any]] = {}
        #: How often each block's statistics have come since the last step, and when they last did.
        self._counts: Counter[Block] = Counter()
        self._order: dict[Block, int] = {}
        #: When those of each block came in this step, on the last of all processes, by its first parameter.
        self._places: dict[nn.Parameter, float] = {}
        #: The same at the last step that took them.
        self._usual: dict[Block, float] = {}
        self._lock = threading.Lock()  # backward passes on several devices have threads of their own

    def connect(self, device: torch.device) -> None:
        """Have a group for this; all processes call it at the same time."""
        if self._twin is None or self._twin.group not in dist.distributed_c10d._world.pg_map:
            self.drop()
            self._twin = self._owners.processes.twin(device)
            if self._twin is not None:
                weakref.finalize(self, _release, self._twin, self.sent).atexit = False

    # --- during a backward pass -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget what has come since the last step."""
        self._counts.clear()
        self._order.clear()

    def received(self, block: Block, sums: Sums) -> None:
        """Note that a backward pass has brought a block's statistics; send what is complete now."""
        with self._lock:
            self._counts[block] += 1
            self._order[block] = self._counts.total()
            while len(self.sent) < len(self.plan):
                if any(self._counts[b] < self._passes for b in self.plan[len(self.sent)].blocks):
                    return
                self._send_next(sums)

    def _send_next(self, sums: Sums) -> None:
        assert self._twin is not None  # or there would be no plan
        bucket = self.plan[len(self.sent)]
        self._made_of.update((b, _content(sums, b)) for b in bucket.blocks)
        self.sent[bucket] = self._owners.processes.sum_packed(bucket.pack(sums), bucket.owner, self._twin.group)

    # --- in a step ------------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """How many backward passes have brought statistics."""
        return max(self._counts.values(), default=0)

    def place(self, block: Block, sums: Sums) -> float:
        """Return a block's number in the order of arrival, LATE, or CHANGED."""
        if block in self._made_of and not all(map(_same, self._made_of[block], _content(sums, block))):
            return CHANGED
        complete = block in self._order and self._counts[block] == self.passes
        return float(self._order[block]) if complete else LATE

    def catch_up(self, call: RollCall, offered: list[nn.Parameter], sums: Sums) -> None:
        """Send what other processes have sent, as far as the one that has come furthest."""
        while len(self.sent) < call.sent:
            self._send_next(sums)
        self._places, self._passes = dict(zip(offered, call.places, strict=True)), call.passes or self._passes

    def drop(self) -> dict[Bucket, Sent]:
        """Let go of the plan; returns the buckets that were sent and have not changed since, on any process."""
        good = {b: s for b, s in self.sent.items() if all(self._place(block) < CHANGED for block in b.blocks)}
        self.plan, self._made_of = [], {}
        self.sent.clear()
        return good

    def _place(self, block: Block) -> float:
        return self._places.get(block.key, LATE)

    def share(self, inputs: StepInputs, expected: Mapping[Block, Expected], speaks: bool, partition: Partition) -> None:
        """Sum a step's statistics over processes.

        Args:
            inputs: The step's inputs.
            expected: What every process has gathered for each block.
            speaks: Whether this process speaks for those that have the same examples.
            partition: Told whose owners have factors now.
        """
        self._usual.update((b, self._place(b)) for b, what in expected.items() if what.factors or what.scaling)
        counts = [int(inputs.n) * speaks, int(inputs.n_statistics) * speaks]
        inputs.n, inputs.n_statistics = reduce_statistics(
            self._owners, inputs.sums, expected, inputs.unseen, self.drop(), counts, partition.device
        )
        there = [b for b, what in expected.items() if what.factors and b not in inputs.unseen]
        partition.factors_elsewhere.update(members(b) for b in there if not self._owners.mine(b))

    def look_ahead(self, expected: Mapping[Block, Expected]) -> None:
        """Make a plan: buckets of blocks that came during the backward pass, in the order in which they did.

        Args:
            expected: What the next step takes of each block.
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
    """Let others use a group; not if processes might have sent different things."""
    twin.idle = not sent
