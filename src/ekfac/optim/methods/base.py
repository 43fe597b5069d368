"""What the engine asks of a method: EKFAC's (:mod:`ekfac.optim.methods.eigenbasis`) or KFAC's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.optim.methods.rules import State
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.statistics.refresh import Refresher


@dataclass(frozen=True)
class Step:
    """What a block's step needs besides its gradient.

    Attributes:
        n: The number of examples.
        s_star: s* of the examples, for rules that need it.
        ok: 0 on the device when the step must change nothing; None where that is known not to be so.
        damping: epsilon.
        ratio: What a gradient that was rescaled as a whole must be multiplied by to be as backward left it.
        left: That gradient itself, where its parts were not rescaled alike.
    """

    n: float | Tensor
    s_star: Tensor | None
    ok: Tensor | None
    damping: float | Tensor
    ratio: Tensor | None = None
    left: Tensor | None = None


class Method(Protocol):
    """How one block's gradient becomes a direction."""

    needs_examples: bool
    squares_penalty: bool
    has_alignment: bool
    damping_is_free: bool
    masks_turns: bool

    def ready(self, state: State) -> bool:
        """Whether what is derived from the factors has been computed before."""

    def numbers(self, block: Block) -> int:
        """How many numbers are kept for a block between steps, momentum and counts left out."""

    def refresh(self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Compute anew what is derived from the factors; the host may wait."""

    def turn(
        self, block: Block, state: State, A: Tensor, B: Tensor, damping: float | Tensor, refresher: Refresher,
        turns: tuple[int, int], ok: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Bring what is derived from the factors nearer to them; the host must not wait.

        With ``masks_turns``, nothing changes where ``ok`` is 0.
        """

    def basis(self, block: Block, state: State) -> Basis | None:
        """The basis that s* is to be taken in."""

    def direction(self, block: Block, state: State, gradient: Tensor | Rows, step: Step) -> Tensor:
        """The preconditioned gradient, ``[G, O, C]``."""

    def bend(self, block: Block, state: State, D: Tensor) -> Tensor:
        """d^T C d for a change D of the block, ``[G, O, C]``, with the curvature in use, not damped."""
