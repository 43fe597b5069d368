"""The interface of a figure, and the registry of all figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import Registry
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.training.runs import Run


@dataclass(frozen=True)
class Request:
    """The inputs of a figure.

    Attributes:
        runs: Recorded runs; none for a figure that computes what it shows.
        quick: Whether to be small and fast.
        dataset: Dataset for what is computed.
        data_dir: Folder of the data files.
        measures: Stored and new measurements.
        grid: Runs that only show a method's sensitivity to its settings.
        lacks: What is missing from the figure for want of runs or data, in words; drawing adds to it.
    """

    runs: Sequence[Run] = ()
    quick: bool = False
    dataset: str = "mnist-5k"
    data_dir: str | Path | None = None
    measures: Measures = field(default_factory=Measures)
    grid: Sequence[Run] = ()
    lacks: list[str] = field(default_factory=list)

    def measured(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return a figure's stored measurements, or measure and store them."""
        found = self.measures.get(name, self.dataset, self.quick)
        if found is not None:
            return found
        self.measures.say(f"measuring for {name} on {self.dataset}{'' if self.quick else ', which may take minutes'}")
        return self.measures.put(name, compute(), self.dataset, self.quick)


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        about: What it shows, in one line.
        draw: Draws it.
        quick: Settings of the small runs that ``--quick`` makes for it; ``None`` if it is computed without runs.
        takes: Selects the runs that belong to it.
        alone: Whether it has something to show without any run.
    """

    about: str
    draw: Callable[[Request], Figure]
    quick: Callable[[], list[TrainConfig]] | None = None
    takes: Callable[[Run], bool] = lambda run: True
    alone: bool = False


FIGURES: Registry[FigureSpec] = Registry("figure", plugins=True)
