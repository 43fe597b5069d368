"""Shows the progress of a search: a bar in a terminal, else a line at every change."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ekfac.lab.labels import counted
from ekfac.lab.show.duration import duration


class SweepProgress:
    """Shows how many settings are done, the best so far, and the time left.

    The time left is the mean time of trials that finished here, times the number of trials left, divided by the number
    of workers; it is not shown before a trial has finished.

    Args:
        console: The console.
        total: The number of settings.
        workers: The number of parallel workers.
        out: The search's folder.
    """

    def __init__(self, console: Console, total: int, workers: int, out: str) -> None:
        self.console, self.total, self.workers, self.out = console, total, workers, out
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> SweepProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self) -> None:
        """Print what is to be done, and show the bar."""
        what = f"{counted(self.total, 'setting')}, {self.workers} at a time"
        print(f"{what}; runs in {self.out}/runs", flush=True)
        if self.console.is_terminal:
            columns = BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.description}")
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()

    def state(self, found: Any) -> None:
        """Show the progress."""
        line = self.line(found)
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.update(self._task, completed=min(found.over, self.total), description=line)

    def line(self, found: Any) -> str:
        """Return the state in one line."""
        counts = ", ".join(f"{number} {name}" for name, number in sorted(found.counts.items()))
        words = [counts + (f" ({found.diverged} diverged)" if found.diverged else "")]
        left = max(0, self.total - found.over)
        if found.seconds is not None and left:
            words.append(f"about {duration(found.seconds * math.ceil(left / self.workers))} left")
        # Last, because a narrow terminal cuts off the end.
        if found.best is not None and not math.isinf(found.best):
            words.append(f"best loss {found.best:.4g}" + (f" ({found.setting})" if found.setting else ""))
        return "; ".join(words)
