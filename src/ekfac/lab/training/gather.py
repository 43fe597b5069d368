"""Finds run folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ekfac.lab.registry import LabError
from ekfac.lab.training import paces
from ekfac.lab.training.runs import Run, load_run

# Runs below a folder of this name had the machine to themselves.
FINALS = "finals"


def find_runs(
    places: Iterable[str | Path],
    skip_broken: bool = False,
    timed: Iterable[str | Path] | None = None,
    left_out: list[str] | None = None,
) -> list[Run]:
    """Read every run in or below some folders, in the order of their paths.

    Args:
        places: Folders of runs, or folders that contain such folders at any depth.
        skip_broken: Skip runs that cannot be read instead of raising, for folders that are being written.
        timed: Folders whose runs had the machine to themselves; only their seconds count. ``None``: those below a
            folder named ``finals`` if there are any, else all except those that shared the machine. Runs whose steps
            were timed alone (:mod:`ekfac.lab.training.paces`) count too, at that pace.
        left_out: Receives a line with the reason for each skipped run.

    Raises:
        LabError: If a place does not exist or contains no run.
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
            except LabError as error:
                if not skip_broken:
                    raise
                if left_out is not None:
                    left_out.append(str(error))
                continue
            parents = file.resolve().parents
            run.timed = had_the_machine(run) if alone is None else any(folder in parents for folder in alone)
            found.append(run)
    if alone is None and any(map(_final, found)):
        for run in found:
            run.timed = run.timed and _final(run)
    paces.apply_all(found)
    return found


def had_the_machine(run: Run) -> bool:
    """Return whether a run was the only one on its machine, as far as it knows."""
    return int(run.about.get("machine", {}).get("processes") or 1) == 1


def _final(run: Run) -> bool:
    return run.path is not None and FINALS in run.path.resolve().parts
