"""The learning rate's own course, for users who set none: warm-up, then a slow fall, or a cosine to a known end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ekfac import checks

#: Steps over which the rate rises: the first bases and second moments rest on few batches.
WARMUP = 100
#: Without a known end the rate falls as 1 / sqrt(1 + t / ANNEAL).
ANNEAL = 100.0


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


def course_of(decay_steps: float | str | None, total_steps: int | None, warms_up: bool) -> RateCourse:
    """Return the built-in course of the rate: where the user has given neither a rate nor one, warm-up and a slow fall.

    Args:
        decay_steps: See :class:`~ekfac.optim.options.StepSize`.
        total_steps: The length of the training, if it is known.
        warms_up: Whether no rate is given to a rule that warms up.
    """
    if total_steps is not None:
        return RateCourse(WARMUP, None, total_steps)
    if isinstance(decay_steps, str):
        return RateCourse(WARMUP, ANNEAL, automatic=True) if warms_up else RateCourse()
    return RateCourse(0, decay_steps)
