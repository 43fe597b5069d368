"""What a capture keeps of a forward pass until its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.counting import Counted
from ekfac.curvature.layers.base import Call

if TYPE_CHECKING:
    from ekfac.curvature.capture.derivatives import Source

#: Receives all calls of one block in one record, once: (block, calls, n).
Receiver = Callable[[Block, list[Call], int], None]
#: Moves the examples of a tensor to the front.
Arrange = Callable[[Tensor], Tensor]


class Held:
    """Counts the bytes of captured tensors; a storage that several layers read counts once."""

    def __init__(self) -> None:
        self._references: dict[int, int] = {}
        #: The current bytes.
        self.now = 0
        #: The peak so far.
        self.peak = 0

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that is kept."""
        storage, references = tensor.untyped_storage(), self._references
        address = storage.data_ptr()
        known = references.get(address, 0)
        if not known:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        references[address] = known + 1

    def remove(self, tensor: Tensor) -> None:
        """Discount a tensor that is freed."""
        storage, references = tensor.untyped_storage(), self._references
        address = storage.data_ptr()
        left = references.get(address, 0) - 1
        if left:
            references[address] = left
        else:
            del references[address]
            self.now -= storage.nbytes()

    def add_calls(self, calls: Iterable[Call]) -> None:
        """Count inputs and output gradients of calls that are kept."""
        for call in calls:
            self.add(call.x)
            self.add(call.d)

    def remove_calls(self, calls: Iterable[Call]) -> None:
        """Discount inputs and output gradients of calls that are freed."""
        for call in calls:
            self.remove(call.x)
            self.remove(call.d)

    def reset(self) -> None:
        """Reset the count to zero."""
        self._references.clear()
        self.now = 0


class Input:
    """A layer's input, kept until the gradient of its output arrives.

    The hook that holds this object lives as long as the graph, and so as long as the loss.
    """

    def __init__(self, x: Tensor | None, arrange: Arrange | None = None) -> None:
        self.x = x
        #: Moves the examples of the output's gradient to the front, if necessary.
        self.arrange = arrange
        #: The input within autograd's graph, if a differentiated pass may reach it.
        self.source: Source | None = None
        #: Converts gradients of the source to the form that the layer reads, if theirs differs.
        self.read: Callable[[Tensor], Tensor] | None = None
        self._version = self._current_version()

    def _current_version(self) -> int:
        return 0 if self.x is None or self.x.is_inference() else self.x._version

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since; autograd does not detect this if autocast copied it."""
        return self._current_version() != self._version


class Record:
    """One forward of the model: its examples, and the output gradients that have arrived so far."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self.thread = threading.get_ident()
        #: The number of examples; None until the first covered layer sets it, if the model's input does not.
        self.n = None if counted.listed is not None else counted.n
        #: The number of calls of each block; several calls must be summed before squaring.
        self.calls: dict[Block, int] = {}
        #: Gradients that wait for the rest of their record, by call number.
        self.waiting: dict[Block, dict[int, Call]] = {}
        #: Whether a backward pass has reached this record: of the training loss, and within ``statistics()``.
        self.reached = False
        self.reached_separately = False
        #: Whether one went through the model's outputs.
        self.by_output = False
        #: Whether hooks on layers did nothing in this forward.
        self.quiet = False
        #: Whether the graph was retained, so that another backward pass may add to these gradients.
        self.kept = False
        #: Blocks called again within the backward pass (checkpointing), of which more calls may follow.
        self.recomputed: set[Block] = set()
        #: Whether its gradients were differentiated, as for MAML's inner batch, and are part of another batch's loss.
        self.inner = False
        #: Whether the capture tracks it; a dropped one is tracked again when a backward pass reaches it.
        self.listed = False

    def settle(self, leading: int) -> int:
        """Determine N, given the number of examples that a layer's input appears to have."""
        if self.n is None:
            known, listed = self._counted.n, self._counted.listed
            self.n = leading if known is None or leading == listed else known
        return self.n

    def counted_by_features(self, x: Tensor) -> bool:
        """Return whether the model was given a single example without a batch dimension."""
        return self.n is not None and self.n > 1 and len(x) == self.n and self._counted.dims == x.dim()

    def examples(self, matters: bool = True) -> int:
        """Return N; 0 for a batch whose gradients are part of another batch's loss.

        Args:
            matters: Whether N is used; if not, an unknown N is 1 instead of an error.
        """
        if self.inner:
            return 0
        n = self._counted.n if self.n is None else self.n
        if n is None and not matters:
            return 1
        if n is None:
            raise RuntimeError(
                "the model's input has no tensor that shows the number of examples, and no covered layer was called: "
                "set that number by count=lambda *args, **kwargs: ... or with opt.batch(n)"
            )
        return n


def deliver(receive: Receiver, held: Held, record: Record) -> None:
    """Pass on the gradients that waited for the rest of their record."""
    for block, calls in record.waiting.items():
        receive(block, list(calls.values()), record.examples())
        held.remove_calls(calls.values())
    record.waiting = {}


def refuse_changed(block: Block) -> NoReturn:
    """Raise because an input was changed after the layer had read it."""
    raise RuntimeError(
        f"layer '{block.name}': its input was changed in place after the layer had read it, so it cannot be captured: "
        f"change a copy, or exclude=['{block.name}']"
    )


def as_batch(tensor: Tensor) -> Tensor:
    """Return an example as a batch of one."""
    return tensor[None]
