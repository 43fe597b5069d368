"""The built-in learning rate schedule: by default a warm-up, then a slow decay.

With ``total_steps`` it also decays to zero over the last fifth. An lr set by the user has no schedule, or, with
``total_steps``, a warm-up and a cosine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ekfac import checks
from ekfac.optim.step_size.default_lr import default_lr, default_warmup

#: Warm-up steps of the cosine schedule.
WARMUP = 100
#: The built-in rate decays as 1 / sqrt(1 + t / ANNEAL).
ANNEAL = 100.0
#: For losses with derivatives, (a, b): a times the rate, decaying as 1 / (1 + t / b).
OF_DERIVATIVES = (2.0, 200.0)
#: The last fraction of training, over which the built-in rate decays to zero if ``total_steps`` is known.
END = 0.2


@dataclass(frozen=True)
class LRSchedule:
    """The factor of lr as a function of the step t.

    Attributes:
        warmup: Steps of linear warm-up.
        anneal: Decay as 1 / sqrt(1 + t / anneal); None for no decay.
        total_steps: Decay to zero over this many steps: along a cosine or, if automatic, linearly at the end.
        automatic: Whether this is the built-in schedule; an lr set by the user has another, :attr:`explicit`.
        scale: What the built-in schedule multiplies the default lr by: more than 1 if inputs are sparse.
    """

    warmup: int = 0
    anneal: float | None = None
    total_steps: int | None = None
    automatic: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.integer("warmup", self.warmup, least=0)
        if self.anneal is not None:
            checks.number("anneal", self.anneal, above=0)
        if self.total_steps is not None:
            checks.integer("total_steps", self.total_steps, least=1)

    @functools.cached_property
    def explicit(self) -> LRSchedule:
        """The schedule of an lr set by the user: constant, or a cosine if ``total_steps`` is known."""
        if not self.automatic:
            return self
        return LRSchedule() if self.total_steps is None else LRSchedule(WARMUP, total_steps=self.total_steps)

    def factor(self, t: int, derivatives: bool = False) -> float:
        """Return the factor of the step after t applied ones."""
        warmup = self.warmup if self.total_steps is None else min(self.warmup, max(1, self.total_steps // 10))
        rise = min(1.0, (t + 1) / warmup) if warmup else 1.0
        done = 0.0 if self.total_steps is None else min(1.0, t / self.total_steps)
        if self.total_steps is not None and not self.automatic:
            return rise * 0.5 * (1 + math.cos(math.pi * done))
        rise *= self.scale * min(1.0, (1 - done) / END)
        if self.automatic and derivatives:
            return rise * OF_DERIVATIVES[0] / (1 + t / OF_DERIVATIVES[1])
        return rise if self.anneal is None else rise * (1 + t / self.anneal) ** -0.5

    def narrowed(self, width: float, narrower: float) -> LRSchedule:
        """Return the schedule of a network that is narrower, by what its inputs carry, than the one lr is for."""
        return replace(self, warmup=default_warmup(narrower), scale=default_lr(narrower) / default_lr(width))

    def save(self) -> dict[str, float] | None:
        """Return what :meth:`narrowed` has changed, if this is the built-in schedule."""
        return {"scale": self.scale, "warmup": self.warmup} if self.automatic else None

    def load(self, saved: Any) -> LRSchedule:
        """Return the schedule with what :meth:`save` returned; older checkpoints have none."""
        if not self.automatic:
            return self
        if saved is None:
            return replace(self, scale=1.0)
        if not isinstance(saved, Mapping) or not {"scale", "warmup"} <= saved.keys():
            raise ValueError(f"state_dict, 'lr_schedule': {str(saved)[:80]} must have 'scale' and 'warmup'")
        checks.number("state_dict, 'lr_schedule', 'scale'", saved["scale"], above=0)
        checks.integer("state_dict, 'lr_schedule', 'warmup'", saved["warmup"], least=0)
        return replace(self, scale=saved["scale"], warmup=saved["warmup"])


def make_lr_schedule(decay_steps: float | str | None, total_steps: int | None, warmup: int | None) -> LRSchedule:
    """Return the schedule for these arguments: the built-in one if neither lr nor ``decay_steps`` is given.

    Args:
        decay_steps: See :class:`~ekfac.optim.options.StepSize`.
        total_steps: The length of training, if known.
        warmup: Steps of the built-in warm-up; None if lr is given, or the rule has no warm-up.
    """
    if decay_steps == "auto" and warmup is not None:
        return LRSchedule(warmup, ANNEAL, total_steps, automatic=True)
    if total_steps is not None:
        return LRSchedule(warmup or WARMUP, total_steps=total_steps)
    return LRSchedule(0, None if isinstance(decay_steps, str) else decay_steps)
