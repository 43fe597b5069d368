"""What a capture keeps of a forward pass until the backward pass has brought the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NoReturn

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.counting import Counted
from ekfac.curvature.layers.base import Call

#: Receives all calls of one block in one record, once: (block, calls, n).
Receiver = Callable[[Block, list[Call], int], None]
#: Brings the examples of a tensor to the front.
Arrange = Callable[[Tensor], Tensor]


class Held:
    """Counts the bytes of captured tensors that are referred to, a storage that several layers read only once."""

    def __init__(self) -> None:
        self._references: dict[int, int] = {}
        #: Bytes that are held now.
        self.now = 0
        #: The most that was held at one time so far.
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
        """Discount a tensor that is let go."""
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
        """Count those of calls that are let go."""
        for call in calls:
            self.remove(call.x)
            self.remove(call.d)

    def reset(self) -> None:
        """Begin again from nothing kept."""
        self._references.clear()
        self.now = 0


class Input:
    """A layer's input, kept by the hook that waits for its output's gradient, and no longer than that.

    The hook itself lives as long as the graph: as long as somebody holds on to the loss.
    """

    def __init__(self, x: Tensor | None, arrange: Arrange | None = None) -> None:
        self.x = x
        #: What brings the examples of the output's gradient to the front, where they are not there.
        self.arrange = arrange
        #: The input within autograd's graph, where a pass that is differentiated may come to it.
        self.source: Tensor | None = None
        #: What the layer reads gradients of the source by, where these are of another form.
        self.read: Callable[[Tensor], Tensor] | None = None
        self._version = self._current_version()

    def _current_version(self) -> int:
        return 0 if self.x is None or self.x.is_inference() else self.x._version

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since; autograd does not mind where autocast has made a copy of it."""
        return self._current_version() != self._version


class Record:
    """One forward of the model: its examples, and what the backward pass has brought of it so far."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self.thread = threading.get_ident()
        #: None until the first layer that is reached has counted them, where the model's input cannot.
        self.n = None if counted.listed is not None else counted.n
        #: How often each block's layers were called; more calls than one must be summed before they are squared.
        self.calls: dict[Block, int] = {}
        #: Gradients that wait for the rest of their record, by the number of the call.
        self.waiting: dict[Block, dict[int, Call]] = {}
        #: Whether a backward pass has reached this record, in general and within ``statistics()``.
        self.reached = False
        self.reached_separately = False
        #: Whether one has come by the model's outputs.
        self.by_output = False
        #: Whether hooks on layers did nothing in this forward.
        self.quiet = False
        #: The graph was kept, so a second backward pass may add to these gradients.
        self.kept = False
        #: Blocks called again within the backward pass (checkpointing): more of their calls may come later in it.
        self.recomputed: set[Block] = set()
        #: Its gradients were differentiated, as those of MAML's inner batch: part of other examples' loss, none itself.
        self.inner = False
        #: Whether the capture looks after it; one that was dropped is, once more, when a backward pass reaches it.
        self.listed = False

    def settle(self, leading: int) -> int:
        """Settle N, now that a layer is called with, as far as it can tell, so many examples in its input."""
        if self.n is None:
            known, listed = self._counted.n, self._counted.listed
            self.n = leading if known is None or leading == listed else known
        return self.n

    def counted_by_features(self, x: Tensor) -> bool:
        """Tell whether one example, without a dimension that counts them, is all that the model was given."""
        return self.n is not None and self.n > 1 and len(x) == self.n and self._counted.dims == x.dim()

    def examples(self, matters: bool = True) -> int:
        """Return N, when a backward pass comes; 0 for a batch whose gradients are a part of another's loss.

        Args:
            matters: Whether anything reads it; else what nobody can count is one.
        """
        if self.inner:
            return 0
        n = self._counted.n if self.n is None else self.n
        if n is None and not matters:
            return 1
        if n is None:
            raise RuntimeError(
                "the model's input has no tensor that counts examples, and no covered layer was called: tell how many "
                "there are, by count=lambda *args, **kwargs: ... or with opt.batch(n)"
            )
        return n


def hand_on(receive: Receiver, held: Held, record: Record) -> None:
    """Hand on the gradients that waited for the rest of their record."""
    for block, calls in record.waiting.items():
        receive(block, list(calls.values()), record.examples())
        held.remove_calls(calls.values())
    record.waiting = {}


def refuse_changed(block: Block) -> NoReturn:
    """Raise, as an input is no longer what the layer has read."""
    raise RuntimeError(
        f"layer '{block.name}': its input was changed in place after the layer had read it, so it cannot be captured: "
        f"change a copy, or exclude=['{block.name}']"
    )


def as_batch(tensor: Tensor) -> Tensor:
    """Return an example as a batch of one."""
    return tensor[None]
