"""``python -m ekfac.lab.reproduce``: the paper's runs within a time budget, with only torch and numpy.

    python -m ekfac.lab.reproduce vgg11 resnet34 --budget 600 --workers 14 --data-dir DATA --out runs/cifar

First the steps of each kind of run are timed one after another. Then trainings run in parallel, the most important
first, until all are done or time is up. Running the same command again continues. With matplotlib installed,
``ekfac reproduce NAME --out DIR --judge`` draws the figure and checks the paper's claims.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekfac import sealed
from ekfac.lab.boundary import CommandParser, outermost, resumable, stoppable, writing
from ekfac.lab.config import TrainConfig, parse_options
from ekfac.lab.data import padded  # noqa: F401  (registers a dataset)
from ekfac.lab.labels import counted, method
from ekfac.lab.registry import LabError
from ekfac.lab.search import cifar
from ekfac.lab.search.known import KNOWN
from ekfac.lab.search.ladder import Group, Ladder, Stage
from ekfac.lab.search.space import unique
from ekfac.lab.search.workers import dataset_on
from ekfac.lab.training import paces
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.runs import Run, machine, versions

FILE = "ladder.json"


def _silent(line: str) -> None:
    """Print nothing."""


# At most this fraction of the time goes into timing steps before anything is trained.
PACES = 0.2
NAMES = (*cifar.NAMES, *(name for name in KNOWN if name not in cifar.NAMES))


def time_again(out: str | Path, data_dir: str | Path | None = None, say: Callable[[str], None] = _silent) -> int:
    """Time the steps of every kind of run in a folder again, alone, and rewrite its paces; return how many."""
    folder = Path(out)
    configs = {paces.label(run.config): run.config for run in find_runs([folder])}
    of_data: dict[str | None, TrainConfig] = {config.dataset: config for config in configs.values()}

    def load(name: str) -> Any:
        return dataset_on(of_data[name], data_dir)

    paces.measure_all(configs.values(), folder, load=load, say=say, again=True)
    return len(configs)


def program(names: Sequence[str], seconds: float, changes: Mapping[str, Any] | None = None) -> list[Stage]:
    """Return the stages of some experiments: CIFAR-10's with their search, all others at known settings.

    Args:
        names: Names from :data:`NAMES`.
        seconds: The time budget.
        changes: Fields to change in every run, for trying things out.

    Raises:
        LabError: If a name is unknown.
    """
    for name in names:
        if name not in NAMES:
            raise LabError(f"unknown experiment {name!r}; known: {', '.join(NAMES)}")
    found = cifar.Program([n for n in names if n in cifar.NAMES], seconds, changes).stages
    known: list[Stage] = []
    for name in names:
        if name not in cifar.NAMES:
            known += _at_known_settings(name, changes or {})
    return known + found


def _at_known_settings(name: str, changes: Mapping[str, Any]) -> list[Stage]:
    """Return an experiment's runs in two stages, so that all have equal length if time runs out."""
    configs = unique([replace(config, **changes).resolved() for config in KNOWN[name]()])
    groups = [Group(f"{name} {method(c)} batch {c.batch_size}", c, seeds=(c.seed,)) for c in configs]
    halves = [Stage("best", group, max(1, (group.base.epochs or 1) // 2)) for group in groups]
    return halves + [Stage("best", group, group.base.epochs or 1) for group in groups]


def reproduce(
    names: Sequence[str],
    out: str | Path,
    seconds: float,
    *,
    workers: int = 1,
    data_dir: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Run], list[str]]:
    """Run as much of some experiments as the time allows; calling it again continues.

    Args:
        names: Names from :data:`NAMES`.
        out: Folder of the runs and of their paces.
        seconds: The total time budget.
        workers: Trainings in parallel.
        data_dir: Folder of the data files.
        changes: Fields to change in every run, for trying things out.
        say: Called with lines of progress.

    Returns:
        The runs, with their seconds on an otherwise idle machine, and what is left to do.
    """
    end, folder = time.time() + seconds, Path(out)
    ladder = Ladder(program(names, seconds, changes), folder / "runs", cifar.LANES)
    one_of_each = {paces.label(group.cautious): group.cautious for group in ladder.groups}
    of_data: dict[str | None, TrainConfig] = {config.dataset: config for config in one_of_each.values()}

    def load(name: str) -> Any:
        return dataset_on(of_data[name], data_dir)

    paces.measure_all(one_of_each.values(), folder, load=load, say=say, until=end - (1 - PACES) * seconds)
    ladder.run(end - time.time(), workers, data_dir, say)
    runs, left = ladder.settle(), ladder.remaining()
    # Time now what there was no time for at first, so that its seconds are known.
    paces.measure_all((run.config for run in runs), folder, load=load, say=say, until=end)
    paces.apply_all(runs)
    about = {"names": list(names), "seconds": seconds, "workers": workers, "machine": machine(), "versions": versions()}
    sealed.write(folder / FILE, sealed.dumps({**about, "left": left, "failed": ladder.failed}, indent=1))
    return runs, left


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parse = CommandParser(prog="python -m ekfac.lab.reproduce", description=__doc__, allow_abbrev=False)
    parse.add_argument("names", nargs="+", metavar="NAME", help=f"of: {', '.join(NAMES)}")
    parse.add_argument("--out", required=True, help="folder of the runs and their paces")
    parse.add_argument("--budget", type=float, default=600, help="seconds for all of it")
    parse.add_argument("--workers", type=int, default=1, help="trainings side by side")
    parse.add_argument("--data-dir", help="folder of the data files")
    parse.add_argument("--only-paces", action="store_true", help="time the steps of the runs in --out again, no more")
    parse.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="for tries: width=4 limit=2000")
    return parse


@resumable
def main(arguments: Sequence[str] | None = None) -> int:
    """Run experiments from a command line; return 0, 2 for bad usage, 130 on Ctrl-C, 143 on TERM, 129 on HUP."""
    start = time.time()
    values = parser().parse_args(arguments)
    if values.workers < 1:
        raise LabError(f"workers must be at least 1, not {values.workers}")
    if values.only_paces:
        count = time_again(values.out, values.data_dir, _say)
        _say(f"{counted(count, 'kind')} of runs timed in {time.time() - start:.0f} s")
        return 0
    with writing(vars(values)), stoppable():
        runs, left = reproduce(
            values.names,
            values.out,
            values.budget,
            workers=values.workers,
            data_dir=values.data_dir,
            changes=parse_options(values.set),
            say=_say,
        )
    _say(f"{counted(len(runs), 'run')} in {time.time() - start:.0f} s; {counted(len(left), 'stage')} left")
    _list(left)
    return 0


def _list(lines: Iterable[str]) -> None:
    for line in lines:
        _say(f"  {line}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(outermost(main))
