"""The folder of recorded runs, and how its numbers are selected and formatted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import numpy

from ekfac.lab.labels import method, touched
from ekfac.lab.registry import LabError
from ekfac.lab.search.selection import Curve, best_final, best_of_each, by_method, curves, final_settings
from ekfac.lab.show.figures.frequency import takes as has_interval
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.looks import ordered
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.runs import Run

# Runs below a folder of this name had the machine to themselves; only their seconds count.
TIMED = "finals"
# The training loss averaged over an epoch's batches.
LOSS = "train_loss_mean"
MISSING = "not run yet"


class Record:
    """The recorded runs.

    Args:
        folder: ``results/``: ``mnist/finals``, ``mnist/seeds``, ``mnist/search``, ``mnist/frequency``, its ``finals``,
            ``mnist/measures.json``, ``sensitivity`` and ``comparison/TASK``, of which any may be missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise LabError(f"{folder}, which should hold recorded runs, is not a folder")

    def runs(self, *places: str) -> list[Run]:
        """Return the finished runs in some folders; missing folders are skipped."""
        there = [self.folder / place for place in places if any((self.folder / place).rglob("config.json"))]
        found = find_runs(there, timed=self.timed)
        return [run for run in found if run.status in ("finished", "diverged")]

    @cached_property
    def timed(self) -> list[Path]:
        """Folders whose runs had the machine to themselves."""
        return [path for path in sorted(self.folder.rglob(TIMED)) if path.is_dir()]

    @cached_property
    def measures(self) -> Measures:
        """The measurements on full MNIST."""
        return Measures(self.folder / "mnist" / "measures.json")

    @cached_property
    def mnist(self) -> list[Run]:
        """The auto-encoder's runs that count, without the search for their settings."""
        return self.runs("mnist/finals", "mnist/seeds")

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes of these runs."""
        return sorted({run.config.batch_size or 0 for run in self.mnist})

    @property
    def tasks(self) -> list[str]:
        """The tasks of the comparison."""
        folder = self.folder / "comparison"
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    def autoencoder(self, batch_size: int) -> dict[str, Curve]:
        """Return each method's final setting at a batch size."""
        return chosen(self.mnist_at(batch_size))

    def mnist_at(self, batch_size: int) -> list[Run]:
        """Return the auto-encoder's runs that count at a batch size."""
        return [run for run in self.mnist if run.config.batch_size == batch_size]

    @cached_property
    def frequency(self) -> list[Run]:
        """Methods at several refresh intervals, including those of the other runs at the same batch size."""
        found = self.runs("mnist/frequency")
        sizes = {run.config.batch_size for run in found}
        return found + [run for run in self.mnist if run.config.batch_size in sizes and has_interval(run)]

    @cached_property
    def grid(self) -> list[Run]:
        """Settings around each method's best."""
        return self.runs("sensitivity")

    @cached_property
    def cifar(self) -> list[Run]:
        """The paper's methods on CIFAR-10, with the searches for their settings: selection is per epoch there."""
        return self.runs("cifar/runs")

    def from_grid(self, batch_size: int) -> dict[str, Curve]:
        """Return the grid's best for each method that was not run otherwise at a batch size."""
        known = {method(run.config) for run in self.mnist_at(batch_size)}
        best = chosen(run for run in self.grid if run.config.batch_size == batch_size)
        return {name: curve for name, curve in best.items() if name not in known}

    def shown(self, batch_size: int) -> dict[str, Curve]:
        """Return the curves in table and picture at a batch size: the final settings, and those only in the grid."""
        found = self.autoencoder(batch_size) | self.from_grid(batch_size)
        return {name: found[name] for name in ordered(found)}


def chosen(runs: Iterable[Run]) -> dict[str, Curve]:
    """Return each method's finished setting with the lowest final training loss."""
    best = best_of_each(curves(runs))
    return {name: best[name] for name in ordered(best)}


def lost(runs: Iterable[Run]) -> dict[str, str]:
    """Return the methods without a final setting that all seeds finished, and how many diverged."""
    found = {}
    for name, group in by_method(curve for curve in curves(runs) if not touched(curve.config)).items():
        finals = final_settings(group)
        if best_final(finals) is None:
            diverged, seeds = min((sum(r.status == "diverged" for r in c.runs), len(c.runs)) for c in finals)
            found[name] = "diverged" if seeds == 1 else f"{diverged} of {seeds} seeds diverged"
    return found


def tried(runs: Iterable[Run]) -> dict[str, int]:
    """Count the optimizer settings tried for each method, including short runs and all batch sizes."""
    outside = ("seed", "epochs", "batch_size", "device", "compile", "plugins")
    found: dict[str, set[str]] = {}
    for run in runs:
        settings = {name: value for name, value in asdict(run.config).items() if name not in outside}
        found.setdefault(method(run.config), set()).add(json.dumps(settings, sort_keys=True, default=str))
    return {name: len(settings) for name, settings in found.items()}


def at_epoch(curve: Curve, epoch: int, name: str = LOSS) -> tuple[float, float | None]:
    """Return a quantity minus its floor after an epoch, and its standard error over seeds if there are several.

    It is NaN if the setting was not run that long.
    """
    where = numpy.flatnonzero(curve.mean("epoch") == epoch)
    if not len(where):
        return math.nan, None
    value = float(curve.mean(name)[where[0]]) - curve.floor_of(name)
    return value, float(curve.standard_error(name)[where[0]]) if len(curve.runs) > 1 else None


def at_end(curve: Curve, name: str = LOSS) -> tuple[float, float | None]:
    """Return a quantity minus its floor after the last epoch, and its standard error."""
    return at_epoch(curve, int(curve.mean("epoch")[-1]), name)


def write(value: float | None, error: float | None = None) -> str:
    """Format a number to three digits, or as many as its standard error needs."""
    if value is None or not math.isfinite(value):
        return ""
    decimals = max(2 - _size(value), -_size(error) if error else 0)
    decimals = min(max(0, decimals), 6)
    return f"{value:.{decimals}f}" + (f" ± {error:.{decimals}f}" if error is not None else "")


def _size(value: float) -> int:
    """Return the decimal exponent of a number's first digit: 0 for 1 to 9, -1 for tenths."""
    return math.floor(math.log10(abs(value))) if value else 0


def percent(value: float, error: float | None = None) -> str:
    """Format a fraction as a percentage with one decimal; empty if there is none."""
    if math.isnan(value):
        return ""
    return f"{100 * value:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "") + " %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table; the first columns and settings are text, the others numbers."""
    sides = ["---" if n < words or name == "setting" else "---:" for n, name in enumerate(head)]
    lines = [" | ".join(head), " | ".join(sides)]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
