"""The methods in the paper's figures, so that our figures can say what they lack and what they add."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ekfac.lab.labels import method, without_seed
from ekfac.lab.search.ladder import SEARCHED
from ekfac.lab.search.selection import whole_seeds
from ekfac.lab.show.looks import ordered, split
from ekfac.lab.training.runs import Run

FACTORED = ("KFAC", "EKFAC", "EKFAC-ra")
# The methods in each figure's legend.
METHODS: dict[str, tuple[str, ...]] = {
    "autoencoder": ("SGD + BN", "Adam + BN", *FACTORED),
    "frequency": FACTORED,
    "vgg11": ("SGD", "SGD + BN", *FACTORED),
    "resnet34": ("SGD + BN", "KFAC", "EKFAC-ra"),
    "batch-size": FACTORED,
    "schedule": ("SGD + BN", "KFAC", "EKFAC-ra"),
}
SHORTER = " beyond epoch "
NOTE = "\n† not in the paper"
BATCH_SIZES = {"vgg11": (200, 500, 1000), "resnet34": (200, 500)}
TASKS = {"batch-size": ("vgg11", "resnet34"), "schedule": ("vgg11", "resnet34")}


def added(figure: str, names: Iterable[str]) -> set[str]:
    """Return a figure's methods that are not in the paper's."""
    return {name for name in names if split(name)[0] not in METHODS.get(figure, ())}


def lacks(figure: str, runs: Sequence[Run]) -> list[str]:
    """Describe what the runs lack compared with the paper's figure: methods, intervals, batch sizes, lengths."""
    wanted = METHODS.get(figure)
    if wanted is None or not runs:
        return []
    found = []
    if figure not in TASKS:
        found += _absent("", wanted, runs)
    for task in TASKS.get(figure, ()):
        own = [run for run in runs if run.config.task == task]
        if not own:
            found.append(f"all of {task}")
            continue
        sizes = BATCH_SIZES[task] if figure == "batch-size" else ()
        if not sizes:
            found += _absent(f"{task}: ", wanted, own)
        for size in sizes:
            at = [run for run in own if run.config.batch_size == size]
            names = METHODS[task] if task == "resnet34" else wanted
            expected = [name for name in wanted if name in names]
            found += _absent(f"{task} at batch {size}: ", expected, at) if at else [f"{task} at batch {size}"]
    if figure == "frequency":
        found += _intervals(runs)
    searched = any(SEARCHED in run.about for run in runs)
    return found + _shorter(of_one_length(runs) if searched else runs) + _of_search(runs)


def _absent(where: str, wanted: Iterable[str], runs: Iterable[Run]) -> list[str]:
    there = {split(method(run.config))[0] for run in runs}
    missing = [name for name in wanted if name not in there]
    return [f"{where}{', '.join(missing)}"] if missing else []


def _intervals(runs: Sequence[Run]) -> list[str]:
    """Return the methods that lack an interval at which another was run."""
    own = [split(method(run.config)) for run in runs]
    every = sorted({variant for _, variant in own}, key=len)
    if len(every) < 2:
        return ["a second refresh interval"]
    return [f"{name}{variant}" for name in FACTORED for variant in every if (name, variant) not in own]


def _shorter(runs: Sequence[Run]) -> list[str]:
    """Return the methods that were run for fewer epochs than others, and those that diverged."""
    longest: dict[str, int] = {}
    for run in runs:
        name = method(run.config)
        longest[name] = max(longest.get(name, 0), 0 if run.status == "diverged" else run.config.epochs or 0)
    most = max(longest.values())
    found = []
    for name in (name for name in ordered(longest) if longest[name] < most):
        found.append(f"{name}{SHORTER}{longest[name]} of {most}" if longest[name] else f"{name}, which diverged")
    return found


def _of_search(runs: Sequence[Run]) -> list[str]:
    """Describe what a search by successive halving had no time for: last epochs of its finals, further seeds."""
    searched = [run for run in runs if SEARCHED in run.about]
    if not searched:
        return []
    kept = of_one_length(searched)
    wanted, longest = max(map(_nominal, searched)), max(map(_epochs, kept))
    seeds: dict[tuple[Any, ...], int] = {}
    for run in kept:
        seeds[_setting(run)] = seeds.get(_setting(run), 0) + 1
    found = [f"epochs {longest + 1} to {wanted}"] if longest < wanted else []
    return found + {1: ["a second and a third seed"], 2: ["a third seed"]}.get(max(seeds.values()), [])


def of_one_length(runs: Iterable[Run]) -> list[Run]:
    """Keep runs of the most common length, so that none of another length wins a selection.

    Ties go to the longest. Runs of a search by successive halving count with the length of its finals, whenever they
    were stopped, because up to there they are equal to a full run. If time ran out before the finals ended, all are cut
    to the length that most methods reached, and seeds that were stopped earlier than another seed of their setting are
    dropped; otherwise the mean over seeds would jump where one ends.
    """
    given = list(runs)
    lengths: dict[str, set[int]] = {}
    for run in given:
        lengths.setdefault(method(run.config), set()).add(_nominal(run))
    every = sorted({length for own in lengths.values() for length in own}, reverse=True)
    if not every:
        return []
    most = max(every, key=lambda length: sum(length in own for own in lengths.values()))
    kept = [run for run in given if _nominal(run) == most]
    return _cut(kept) if any(SEARCHED in run.about for run in kept) else kept


def _nominal(run: Run) -> int:
    return int(run.about.get(SEARCHED, run.config.epochs or 0))


def _cut(runs: Sequence[Run]) -> list[Run]:
    """Cut runs at the longest length that more than half of the methods reached; drop shorter seeds."""
    reached: dict[str, int] = {}
    for run in (run for run in runs if run.status != "diverged"):
        name = method(run.config)
        reached[name] = max(reached.get(name, 0), _epochs(run))
    length = sorted(reached.values())[(len(reached) - 1) // 2] if reached else max(map(_epochs, runs))
    found = [
        replace(
            run,
            config=replace(run.config, epochs=min(length, run.config.epochs or 0)),
            history=run.history[: length + 1],
        )
        for run in runs
    ]
    return whole_seeds(found)


def _setting(run: Run) -> tuple[Any, ...]:
    return without_seed(replace(run.config, epochs=1))


def _epochs(run: Run) -> int:
    return int(run.history[-1]["epoch"]) if run.history else 0
