"""Finding run folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ekfac.lab.registry import LabError
from ekfac.lab.training.runs import Run, load_run


def find_runs(
    places: Iterable[str | Path], skip_broken: bool = False, timed: Iterable[str | Path] | None = None
) -> list[Run]:
    """Read every run in some folders and below them, in the order of their paths.

    Args:
        places: Folders of runs, or folders that hold such folders at any depth.
        skip_broken: Leave out what cannot be read instead of complaining: for folders that are being written.
        timed: Folders whose runs had the machine to themselves: only their seconds count. ``None``: all do.

    Raises:
        LabError: If a place does not exist or holds no run.
    """
    found = []
    alone = None if timed is None else [Path(folder).resolve() for folder in timed]
    for place in map(Path, places):
        if not place.is_dir():
            raise LabError(f"{place} is not a folder")
        files = sorted(place.rglob("config.json"))
        if not files and not skip_broken:
            raise LabError(f"{place} holds no run: there is no config.json in it or below")
        for file in files:
            try:
                run = load_run(file.parent)
            except LabError:
                if not skip_broken:
                    raise
                continue
            parents = file.resolve().parents
            run.timed = alone is None or any(folder in parents for folder in alone)
            found.append(run)
    return found
