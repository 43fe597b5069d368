"""What a figure is, and the names of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import Registry
from ekfac.lab.runs import Run


@dataclass(frozen=True)
class Request:
    """What a figure is to be drawn from.

    Attributes:
        runs: Recorded runs; none for a figure that computes what it shows.
        quick: Whether to be small and fast.
        dataset: Dataset of what is computed.
        data_dir: Folder of the data files.
    """

    runs: Sequence[Run] = ()
    quick: bool = False
    dataset: str = "mnist-5k"
    data_dir: str | Path | None = None


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        about: What it shows, in one line.
        draw: Draws it.
        quick: Settings of the small runs that ``--quick`` makes for it; ``None`` if it is computed on the spot.
        takes: Which of many runs are meant for it.
        alone: Whether it has something to show without any run.
    """

    about: str
    draw: Callable[[Request], Figure]
    quick: Callable[[], list[TrainConfig]] | None = None
    takes: Callable[[Run], bool] = lambda run: True
    alone: bool = False


FIGURES: Registry[FigureSpec] = Registry("figure")
