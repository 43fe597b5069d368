"""What a step is asked, what it found before it computes, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ekfac.curvature.blocks import Block


@dataclass(frozen=True)
class Update:
    """What the optimizer asks of a step: per block or parameter, from its groups."""

    damping_of: Callable[[Block], float | Tensor]
    l2_of: Callable[[nn.Parameter], float] = lambda p: 0.0
    maximize_of: Callable[[nn.Parameter], bool] = lambda p: False


@dataclass
class Work:
    """What a step found on the host before it computes.

    Attributes:
        live: The parameters that have a gradient.
        n: The number of examples behind the gradient.
        n_statistics: The number of examples behind the statistics.
        rescaled: What each gradient that was touched since backward must be multiplied by to be as it was left.
        unknown: Layers of which nothing is known yet, and whose gradient is zero.
        bad: True on the device in a step that must change nothing; None where that is known not to be so.
    """

    live: list[nn.Parameter]
    n: float | Tensor = 0.0
    n_statistics: float | Tensor = 0.0
    rescaled: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    unknown: set[Block] = field(default_factory=set)
    bad: Tensor | None = None

    def masked(self, tensor: Tensor) -> Tensor:
        """The tensor, or zeros in a step that must change nothing."""
        return tensor if self.bad is None else tensor.masked_fill(self.bad, 0.0)


@dataclass(frozen=True)
class Direction:
    """A block's preconditioned gradient as a list in the order of its parameters, and what it was made of."""

    block: Block
    steps: list[Tensor]
    preconditioned: Callable[[], Tensor]

    @property
    def gradients(self) -> list[Tensor]:
        """What was preconditioned, in the order of the block's parameters."""
        return self.block.unstack(self.preconditioned())


def as_scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number, or a 0-dim tensor in the dtype and on the device of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else float(value)
