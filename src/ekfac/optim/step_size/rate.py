"""The course of the rate over a training: by default it warms up, then falls slowly.

Where the end is known, the built-in course also falls to zero over the last fifth. A rate that somebody names has no
course, or, to a known end, a warm-up and a cosine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ekfac import checks

#: Steps of warm-up where a rate is named and an end is known.
WARMUP = 100
#: The built-in rate falls as 1 / sqrt(1 + t / ANNEAL).
ANNEAL = 100.0
OF_DERIVATIVES = (2.0, 200.0)  # so many times the rate, which falls as 1 / (1 + t / so many)
#: The last part of a training of known length, in which the built-in rate falls to zero.
END = 0.2


@dataclass(frozen=True)
class RateCourse:
    """What lr is multiplied by over the steps t.

    Attributes:
        warmup: Steps of linear warm-up.
        anneal: Fall as 1 / sqrt(1 + t / anneal); None for no such fall.
        total_steps: Fall to zero over so many steps: along a cosine, or, if automatic, linearly in the last of them.
        automatic: Nobody has asked for it: a rate that somebody names has another course, :attr:`named`.
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

    @functools.cached_property
    def named(self) -> RateCourse:
        """The course of rates that somebody names: none, or to a known end."""
        if not self.automatic:
            return self
        return RateCourse() if self.total_steps is None else RateCourse(WARMUP, total_steps=self.total_steps)

    def factor(self, t: int, derivatives: bool = False) -> float:
        """Return the factor of the step after t applied ones."""
        warmup = self.warmup if self.total_steps is None else min(self.warmup, max(1, self.total_steps // 10))
        rise = min(1.0, (t + 1) / warmup) if warmup else 1.0
        done = 0.0 if self.total_steps is None else min(1.0, t / self.total_steps)
        if self.total_steps is not None and not self.automatic:
            return rise * 0.5 * (1 + math.cos(math.pi * done))
        rise *= min(1.0, (1 - done) / END)
        if self.automatic and derivatives:
            return rise * OF_DERIVATIVES[0] / (1 + t / OF_DERIVATIVES[1])
        return rise if self.anneal is None else rise * (1 + t / self.anneal) ** -0.5


def course_of(decay_steps: float | str | None, total_steps: int | None, warmup: int | None) -> RateCourse:
    """Return the built-in course of the rate: where the user has given neither a rate nor one, warm-up and a slow fall.

    Args:
        decay_steps: See :class:`~ekfac.optim.options.StepSize`.
        total_steps: The length of the training, if it is known.
        warmup: Steps of the built-in warm-up; None where a rate is given, or the rule has none.
    """
    if decay_steps == "auto" and warmup is not None:
        return RateCourse(warmup, ANNEAL, total_steps, automatic=True)
    if total_steps is not None:
        return RateCourse(warmup or WARMUP, total_steps=total_steps)
    return RateCourse(0, None if isinstance(decay_steps, str) else decay_steps)
