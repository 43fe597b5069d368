"""The learning rate's own course, for users who set none: warm-up, then a slow fall, or a cosine to a known end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ekfac import checks

#: Steps of warm-up where a rate is named and an end is known.
WARMUP = 100
#: Fewest and most steps over which the built-in rate rises, and how many columns are worth one of them: the first bases
#: and second moments rest on few batches, and wide ones need more.
RISE = (10, 100, 8)
#: The rate of networks up to ``NARROW`` wide; wider ones get less, by the square root.
LARGEST_RATE = 0.02
NARROW = 64
#: Without a known end the rate falls as 1 / sqrt(1 + t / ANNEAL).
ANNEAL = 100.0


def width_of(weights: Iterable[Tensor]) -> float:
    """Return how wide a network is: the geometric mean, over all its weights, of their layers' inputs (or channels)."""
    matrices = [p for p in weights if p.is_floating_point() and p.dim() > 1 and p.numel()]
    size = sum(p.numel() for p in matrices)
    return math.exp(sum(p.numel() / size * math.log(p.shape[1]) for p in matrices))


def usual_rate(width: float) -> float:
    """Return the rate for a network: 0.02 sqrt(64 / width), at most 0.02.

    A step moves every weight by about the same amount, but what that does to an output grows with how many weights the
    output sums over.
    """
    return LARGEST_RATE * min(1.0, math.sqrt(NARROW / width))


def usual_warmup(width: float) -> int:
    """Return the steps over which the rate of a network rises."""
    least, most, columns = RISE
    return min(most, max(least, round(width / columns)))


@dataclass(frozen=True)
class RateCourse:
    """What lr is multiplied by over the steps t.

    Attributes:
        warmup: Steps of linear warm-up.
        anneal: Without ``total_steps``, fall as 1 / sqrt(1 + t / anneal); None for no fall.
        total_steps: Fall to zero over so many steps along a cosine.
        automatic: Nobody has asked for it: a rate that somebody names has no course.
    """

    warmup: int = 0
    anneal: float | None = None
    total_steps: int | None = None
    automatic: bool = False

    def __post_init__(self) -> None:
        checks.integer("warmup", self.warmup, least=0)
        if self.anneal is not None:
            checks.number("anneal", self.anneal, above=0)
        if self.total_steps is not None:
            checks.integer("total_steps", self.total_steps, least=1)

    def factor(self, t: int) -> float:
        """Return the factor of the step after t applied ones."""
        warmup = self.warmup if self.total_steps is None else min(self.warmup, max(1, self.total_steps // 10))
        rise = min(1.0, (t + 1) / warmup) if warmup else 1.0
        if self.total_steps is not None:
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, t / self.total_steps)))
        return rise if self.anneal is None else rise * (1 + t / self.anneal) ** -0.5


def course_of(decay_steps: float | str | None, total_steps: int | None, warmup: int | None) -> RateCourse:
    """Return the built-in course of the rate: where the user has given neither a rate nor one, warm-up and a slow fall.

    Args:
        decay_steps: See :class:`~ekfac.optim.options.StepSize`.
        total_steps: The length of the training, if it is known.
        warmup: Steps of the built-in warm-up; None where a rate is given, or the rule has none.
    """
    if total_steps is not None:
        return RateCourse(warmup or WARMUP, None, total_steps)
    if isinstance(decay_steps, str):
        return RateCourse() if warmup is None else RateCourse(warmup, ANNEAL, automatic=True)
    return RateCourse(0, decay_steps)
