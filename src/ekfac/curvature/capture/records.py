"""What a capture keeps of a forward pass until the backward pass has brought the rest."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call


class Held:
    """Counts the bytes of captured tensors that are referred to, a storage that several layers read only once."""

    def __init__(self) -> None:
        self._references: Counter[int] = Counter()
        self._now = 0
        #: The most that was held at one time so far.
        self.peak = 0

    def add(self, tensor: Tensor) -> None:
        """A tensor is kept."""
        storage = tensor.untyped_storage()
        if not self._references[storage.data_ptr()]:
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
        self._references[storage.data_ptr()] += 1

    def remove(self, tensor: Tensor) -> None:
        """It is let go."""
        storage = tensor.untyped_storage()
        self._references[storage.data_ptr()] -= 1
        if not self._references[storage.data_ptr()]:
            self._now -= storage.nbytes()

    def reset(self) -> None:
        """All is let go."""
        self._references.clear()
        self._now = 0


class Input:
    """A layer's input, kept by the hook that waits for its output's gradient, and no longer than that.

    The hook itself lives as long as the graph: as long as somebody holds on to the loss.
    """

    def __init__(self, x: Tensor | None) -> None:
        self.x = x
        self._version = self._current_version()

    def _current_version(self) -> int:
        return 0 if self.x is None or self.x.is_inference() else self.x._version

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since; autograd does not mind where autocast has made a copy of it."""
        return self._current_version() != self._version


class Record:
    """One forward of the model: its examples, and what the backward pass has brought of it so far."""

    def __init__(self, n: int) -> None:
        self.n = n
        #: How often each block's layers were called; more calls than one must be summed before they are squared.
        self.calls: Counter[Block] = Counter()
        #: Gradients that wait for the rest of their record, by the number of the call.
        self.waiting: dict[Block, dict[int, Call]] = {}
        #: Whether a backward pass has reached this record, in general and within ``statistics()``.
        self.reached = False
        self.reached_aside = False
        #: The graph was kept, so a second backward pass may add to these gradients.
        self.kept = False
        #: Blocks called again within the backward pass (checkpointing): more of their calls may come later in it.
        self.recomputed: set[Block] = set()
        #: Whether the capture looks after it; one that was dropped is, once more, when a backward pass reaches it.
        self.listed = False

    def forget(self) -> None:
        """Be as no backward pass had come yet."""
        self.waiting = {}
        self.listed = self.reached = self.reached_aside = self.kept = False
