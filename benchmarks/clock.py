"""How long a benchmark has taken and will take, said on the standard error while it runs."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Clock:
    """Counts the parts of a benchmark; the time left is that of the parts so far, carried on.

    Args:
        parts: How many there are.
        stream: Where to say it; the standard error unless another is given.
        every: Least seconds between two lines.
    """

    def __init__(self, parts: int, stream: TextIO | None = None, every: float = 5.0) -> None:
        self.parts, self.done, self.stream, self.every = parts, 0, stream or sys.stderr, every
        self.started = self.said = time.perf_counter()

    def part(self, name: str) -> None:
        """Say that a part is over, and how much is left."""
        self.done += 1
        now = time.perf_counter()
        if now - self.said < self.every and self.done < self.parts:
            return
        self.said, seconds = now, now - self.started
        left = seconds / self.done * (self.parts - self.done)
        rest = f"about {duration(left)} left" if self.done < self.parts else "all done"
        print(f"{self.done} of {self.parts} ({name}): {duration(seconds)}, {rest}", file=self.stream, flush=True)


def duration(seconds: float) -> str:
    """Return seconds as a person would say them: 8 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
