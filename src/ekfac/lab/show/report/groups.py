"""Groups runs that a report compares, and chooses the setting that represents a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ekfac.lab.labels import shown_method
from ekfac.lab.search.ladder import SEARCHED
from ekfac.lab.search.selection import Curve, best_final, by_method, curves, last, whole_seeds
from ekfac.lab.training.runs import Run

SEARCH = "a search by halving"


@dataclass(frozen=True)
class Group:
    """Comparable runs: one network on the same data, of equal length, with the same schedule.

    Attributes:
        key: What they have in common.
        name: The same in words, as far as it distinguishes this group from others.
        curves: Their settings.
    """

    key: tuple[Any, ...]
    name: str
    curves: list[Curve]


def searched(curve: Curve) -> bool:
    """Return whether a setting is from a search by successive halving."""
    return SEARCHED in curve.runs[0].about


def name_of(curve: Curve) -> str:
    """Return the name of a setting's method."""
    return shown_method(curve.config)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group comparable runs, the longest runs of each task first.

    Batch sizes are in one group, as settings to choose from, unless two or more methods were run at the same several
    sizes; then each size is a separate comparison.
    """
    found: dict[tuple[Any, ...], list[Curve]] = {}
    by_search: dict[Any, list[Run]] = {}
    for run in runs:
        by_search.setdefault(run.about.get(SEARCHED), []).append(run)
    each = [curves(own if epochs is None else whole_seeds(own)) for epochs, own in by_search.items()]
    for curve in (curve for several in each for curve in several):
        found.setdefault(_key(curve), []).append(curve)
    for key in list(found):
        sizes = _common_sizes(found[key])
        if sizes:
            for curve in found.pop(key):
                size = curve.config.batch_size
                found.setdefault((*key[:-1], size if size in sizes else None), []).append(curve)
    tasks = list(dict.fromkeys(key[:2] for key in found))
    order = sorted(found, key=lambda key: (tasks.index(key[:2]), -(key[4] or 0), str(key)))
    return [Group(key, _name(key, list(found)), found[key]) for key in order]


def _key(curve: Curve) -> tuple[Any, ...]:
    config, seconds = curve.config, curve.runs[0].about.get("race_seconds")
    if seconds is not None:  # a race's runs have equal length in seconds
        return config.task, config.dataset, config.width, config.limit, None, f"{seconds:g} s of training each", None
    schedule = f"learning rate halved every {config.halve_every} epochs" if config.halve_every else ""
    schedule += "learning rate along a cosine" if config.cosine else ""
    schedule += ", " if schedule and searched(curve) else ""
    # Runs that a search by halving ended early belong with its finals, and with nothing else.
    epochs = curve.runs[0].about.get(SEARCHED, config.epochs)
    schedule += SEARCH if searched(curve) else ""
    return config.task, config.dataset, config.width, config.limit, epochs, schedule, None


def _common_sizes(found: Sequence[Curve]) -> set[Any]:
    sizes = [{curve.config.batch_size for curve in group} for group in by_method(found, name_of).values()]
    several = [own for own in sizes if len(own) > 1]
    common = {size for own in several for size in own if sum(size in other for other in several) > 1}
    return common if len(common) > 1 else set()


def _name(key: tuple[Any, ...], keys: Sequence[tuple[Any, ...]]) -> str:
    """Return a group's name: the part of its key that differs between groups of its task and data."""
    task, dataset, width, limit, epochs, schedule, batch = key
    like = [other for other in keys if other[:2] == key[:2]]
    words = [f"{task} on {dataset}"]
    parts = (f"width {width or 'as the task has it'}", f"first {limit} examples" if limit else "all examples")
    length = None if epochs is None else f"{epochs} epoch{'' if epochs == 1 else 's'}"
    for place, text in enumerate((*parts, length), start=2):
        if text is not None and len({other[place] for other in like}) > 1:
            words.append(text)
    words += [f"batch {batch}"] if batch is not None else []
    return ", ".join([*words, *([schedule] if schedule else [])])


def leader(candidates: Sequence[Curve]) -> Curve | None:
    """Return a method's best setting, at its end or, if none has ended, so far; ``None`` if all diverged."""
    if any(SEARCHED in run.about for curve in candidates for run in curve.runs):
        most = max(curve.length for curve in candidates)
        candidates = [curve for curve in candidates if curve.length == most]
    usable = [curve for curve in candidates if math.isfinite(last(curve))]
    return best_final(candidates) or min(usable, key=last, default=None)


def shown(candidates: Sequence[Curve]) -> Curve:
    """Return the setting that represents a method: its best or, if all diverged, the one that got furthest."""
    return leader(candidates) or max(candidates, key=lambda curve: curve.length)


def timed(candidates: Sequence[Curve]) -> Curve | None:
    """Return the best timed setting, with only its timed runs; ``None`` if there is none."""
    best = leader([curve for curve in candidates if curve.timed is not None])
    return None if best is None else best.timed
