"""Every picture that recorded runs are there for, into the folder of the pages' images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekfac.lab.show.evidence.record import MISSING, Record
from ekfac.lab.show.figures import FIGURES, comparison, make
from ekfac.lab.training.runs import Run

CIFAR = ("vgg11", "resnet34", "schedule", "batch-size")
# Figures that are drawn again from what they measured.
MEASURED = ("rescaling", "correlation", "error")


@dataclass(frozen=True)
class Picture:
    """A figure, the runs that it is drawn from, what is added to its name, and runs for its plane of settings."""

    figure: str
    runs: Sequence[Run]
    suffix: str = ""
    grid: Sequence[Run] = ()


def pictures(record: Record) -> list[Picture]:
    """Return what can be drawn."""
    found = []
    for size in record.batch_sizes:
        runs = [run for curve in record.shown(size).values() for run in curve.runs]
        grid = [run for run in record.grid if run.config.batch_size == size and run not in runs]
        found.append(Picture("autoencoder", runs, f"-{size}", grid))
    found.append(Picture("frequency", record.frequency))
    found.append(Picture("sensitivity", record.grid))
    compared = record.runs("comparison")
    found.append(Picture("comparison", compared if comparison.chosen(compared) else ()))
    found += [Picture(name, [run for run in record.cifar if FIGURES.get(name).takes(run)]) for name in CIFAR]
    return [picture for picture in found if picture.runs]


def link(record: Record, figure: str, suffix: str = "") -> str:
    """Return the picture as a page shows it, if it can be drawn."""
    there = any((picture.figure, picture.suffix) == (figure, suffix) for picture in pictures(record))
    return f"![{figure.capitalize()}](images/{figure}{suffix}.png)" if there else MISSING


def draw(record: Record, images: str | Path, say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Draw all of them as PNG, and what was measured; return the files."""
    files: list[Path] = []
    measures = record.measures.file
    todo = pictures(record)
    todo += [Picture(name, ()) for name in MEASURED if record.measures.get(name) is not None]
    for picture in todo:
        say(f"drawing {picture.figure}{picture.suffix}")
        (made,) = make(
            [picture.figure],
            images,
            runs=picture.runs,
            grid=picture.grid,
            dataset="mnist",
            measures=measures,
            formats=("png",),
            suffix=picture.suffix,
        )
        files += made.files
    return files
