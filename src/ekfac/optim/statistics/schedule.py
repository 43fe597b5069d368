"""What is due when: full solves, warm refreshes, and the batches that A and B take in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ekfac.curvature.blocks import Block
from ekfac.optim.methods.base import Method
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.partition import Partition, members

#: So many first steps refresh all bases, with the step's own batch among the factors: while these still gain rank, a
#: basis that has not seen a batch takes its gradient for one without curvature. Until step START others follow, each
#: after GROWTH times as many steps: the first bases are stale almost at once.
EARLY = 10
GROWTH = 1.15
START = 100
#: So many first steps take their batches into A and B of all layers; later ones so many in an interval, in fractions
#: of the layers, one after another.
DENSE = 20
BATCHES = 4
FRACTIONS = 4
#: The interval where none is given: orthogonal iteration is cheap beside a step on a GPU, and dear on a CPU.
INTERVALS = {"cuda": 20}
INTERVAL = 50
#: A side wider than this is refreshed more rarely, by the square of its width: the price goes with the cube.
WIDE_SIDE = 1024
#: A warm refresh that has strayed is followed by another after the next step, and so many in a row by a full solve.
TRIES = 3


@dataclass(frozen=True)
class Intervals:
    """Which steps renew which bases, by the number of applied ones; every basis is solved for at its first step.

    Attributes:
        every: The interval, in applied steps.
        deterministic: Solve in full for all bases within every ``every``-th step, as Algorithm 1 has it. Otherwise each
            is renewed once in an interval by orthogonal iteration, after a step, one side of one block at a time, so
            that no step pays for all; and all of them within the steps of :func:`early_steps`.
    """

    every: int
    deterministic: bool

    def solves(self, applied: int) -> bool:
        """Whether the step after this many applied ones begins with a full solve of all bases."""
        return self.deterministic and applied % self.every == 0

    def warm_within(self, applied: int, stretch: int = 1) -> bool:
        """Whether the step after this many applied ones refreshes a side, warm, before it uses it.

        Args:
            applied: How many steps have been applied.
            stretch: How many times longer the side's interval is.
        """
        return not self.deterministic and applied in early_steps(self.every, stretch)

    def warm_after(self, applied: int, index: int, blocks: int, stretches: tuple[int, int] = (1, 1)) -> tuple[int, int]:
        """How many iterations sides A and B of block ``index`` get when this many steps have been applied."""
        if self.deterministic or applied < min(self.every, EARLY):
            return 0, 0
        iterations = []
        for side, stretch in enumerate(stretches):
            interval = self.every * stretch
            phase = (2 * index + side) * interval // max(1, 2 * blocks)
            iterations.append(int((applied + phase) % interval == 0))
        return iterations[0], iterations[1]

    def takes_factors(self, applied: int, layer: int, given: int | None) -> bool:
        """Whether A and B of a layer take in the batch of the step after this many applied ones.

        At first they take in every batch, later four in an interval, not all layers the same, so that no step pays
        for all. There are a few fractions of layers, as every one is another step for a CUDA graph to hold.

        Args:
            applied: How many steps have been applied.
            layer: The layer's place among all of the model.
            given: The user's own interval, at which all layers take in the same batches.
        """
        if given is not None or applied < DENSE:
            return applied % (given or 1) == 0
        interval = max(1, self.every // BATCHES)
        fractions = 1 if self.deterministic else min(FRACTIONS, interval)
        return applied % interval == layer % fractions * interval // fractions


@cache
def early_steps(every: int, stretch: int = 1) -> frozenset[int]:
    """The steps, by the number of applied ones before them, that refresh a side before they use it."""
    steps, at = set(range(min(every, max(1, EARLY // stretch)))), float(EARLY)
    while at < START:
        steps.add(round(at))
        at *= GROWTH**stretch
    return frozenset(steps)


def stretches(block: Block) -> tuple[int, int]:
    """How many times longer than others' the intervals of a block's sides A and B are."""
    A, B = (max(1, round((width / WIDE_SIDE) ** 2)) for width in (block.shape.inputs, block.shape.out))
    return 1 if block.diagonal_A else A, 1 if block.diagonal_B else B


class Schedule:
    """Knows what the step under way does with each block.

    Args:
        options: The interval, and which batches A and B take in.
        method: What is done with blocks that a layer covers.
        partition: The blocks and their state.
    """

    def __init__(self, options: EngineOptions, method: Method[Any], partition: Partition) -> None:
        self.applied_steps = 0
        self._options = options
        self._method = method
        self._partition = partition
        self._intervals: Intervals | None = None
        #: Whether a step that refreshes bases may be found later to be one that changes nothing: not where the next
        #: forward pass would have taken something else, had that been known.
        self.maskable = (
            method.masks_refreshes
            and not method.needs_examples
            and options.factor_every in (None, 1)
            and options.factor_decay > 0
        )

    @property
    def intervals(self) -> Intervals:
        """Which steps renew which bases."""
        if self._intervals is None:  # the device is known when the partition has its parameters
            every = self._options.refresh_every or INTERVALS.get(self._partition.device.type, INTERVAL)
            self._intervals = Intervals(every, self._options.deterministic)
        return self._intervals

    def solves(self, block: Block) -> bool:
        """Whether this step begins with a full solve for the block's basis."""
        if not block.covered:
            return False
        strayed = self._partition.peek(block).strayed >= TRIES
        return strayed or not self.ready(block) or self.intervals.solves(self.applied_steps)

    def ready(self, block: Block) -> bool:
        """Whether there is a basis, here or at the block's owner."""
        state = self._partition.peek(block)
        return self._method.ready(state) or members(block) in self._partition.ready_elsewhere

    def renews(self, block: Block) -> bool:
        """Whether this step uses a basis that is not known before it."""
        return self.solves(block) or (block.covered and any(self.iterations_within(block)))

    def iterations_within(self, block: Block) -> tuple[int, int]:
        """How many iterations the two sides of the block's basis get within this step, before it uses them."""
        A, B = (int(self.intervals.warm_within(self.applied_steps, stretch)) for stretch in stretches(block))
        return A, B

    def iterations_after(self, block: Block) -> tuple[int, int]:
        """How many iterations the two sides of the block's basis get after this step."""
        if strayed := self._partition.peek(block).strayed:
            return (1, 1) if strayed < TRIES else (0, 0)  # the next step solves for it
        covered = self._partition.covered
        return self.intervals.warm_after(self.applied_steps + 1, covered[block], len(covered), stretches(block))

    def takes_factors(self, block: Block) -> bool:
        """Whether this step takes its batch into the block's A and B."""
        every, decay, layer = (
            self._options.factor_every,
            self._options.factor_decay,
            self._partition.layer_of[block.key],
        )
        if decay > 0 and self.intervals.takes_factors(self.applied_steps, layer, every):
            return True
        return self.renews(block) or (decay == 0 and any(self.iterations_after(block)))

    def waits(self, block: Block) -> bool:
        """Whether this step begins with something for which the host waits: a solve."""
        return self.solves(block) if self.maskable else self.renews(block)

    def count_strays(self) -> None:
        """Count what is known of warm refreshes: between two steps, as what a step captures depends on it."""
        for block in self._partition.covered:
            state = self._partition.peek(block)
            if "near" in state:
                state.strayed = 0 if state.near else state.strayed + 1
                del state["near"]
