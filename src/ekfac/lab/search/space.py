"""The settings of the paper's search: a grid, then random points around each of its points."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import has_option, key
from ekfac.lab.optimizers import build_optimizer
from ekfac.lab.registry import LabError
from ekfac.lab.tasks import TASKS

DECADES = (1e-1, 1e-2, 1e-3, 1e-4)
RANDOM_POINTS = 20
# The paper's batch sizes where it searches over several; elsewhere the task's own is the only one.
BATCH_SIZES = {"autoencoder": (200, 500)}

# Batch size, learning rate, damping.
Point = tuple[int | None, float | None, float | None]


@dataclass(frozen=True)
class Space:
    """What to search over.

    Attributes:
        lrs: Learning rates of the grid.
        dampings: Damping values of the grid; ``None`` stands for the decades, or for none where an optimizer has none.
        batch_sizes: Batch sizes; none stands for the task's.
        seeds: Each point is run with each of these.
        random_points: How many random points to try around each point of the grid.
        reach: Random points lie within this factor of their grid point, either way. With grid values a factor
            of 10 apart, sqrt(10) makes neighbouring cells meet.
        draw: Seed of the random points.
        axes: Options of the optimizer, or other settings, each with the values to try; every combination is.
    """

    lrs: Sequence[float] = DECADES
    dampings: Sequence[float] | None = None
    batch_sizes: Sequence[int] = ()
    seeds: Sequence[int] = (0,)
    random_points: int = RANDOM_POINTS
    reach: float = math.sqrt(10)
    draw: int = 0
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def settings(base: TrainConfig, space: Space) -> list[TrainConfig]:
    """Return all settings of a search, in the order in which they are to be tried.

    First the grid; then one random point around each grid point, then a second around each, and so on, so that a
    search that is cut short has still looked everywhere. Learning rate and damping are log-uniform around their
    grid values. The same arguments give the same list on every machine.

    Args:
        base: What all of them have in common.
        space: What to vary.

    Raises:
        LabError: If a value is impossible.
    """
    _check(space)
    usual: Sequence[float | None] = DECADES if has_option(base.optimizer, "damping") else (None,)
    dampings = usual if space.dampings is None else space.dampings
    sizes: Sequence[int | None] = space.batch_sizes or BATCH_SIZES.get(base.task, (base.batch_size,))
    grid: list[Point] = list(itertools.product(sizes, space.lrs, dampings))
    draw = random.Random(space.draw)

    def near(value: float | None) -> float | None:
        if value is None:
            return None
        # Rounded so that a plan written as JSON, a folder's name and a command line all say the same number.
        return float(f"{value * space.reach ** draw.uniform(-1, 1):.6g}")

    points = list(grid)
    for _ in range(space.random_points):
        points += [(size, near(lr), near(damping)) for size, lr, damping in grid]
    found = [
        replace(on_axes(base, values), batch_size=size, lr=lr, damping=damping, seed=seed).resolved()
        for (size, lr, damping), values, seed in itertools.product(points, combinations(space.axes), space.seeds)
    ]
    return unique(found)


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the axes' values; one that sets nothing where there are no axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def on_axes(base: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return a setting with these values: fields by their name, all else as options of the optimizer."""
    own = {item.name for item in fields(base)}
    changed = replace(base, **{name: value for name, value in values.items() if name in own})
    rest = {name: value for name, value in values.items() if name not in own}
    return replace(changed, options={**changed.options, **rest})


def check_options(configs: Sequence[TrainConfig]) -> None:
    """Make every optimizer once, so that an option that it refuses does not fail hundreds of trials.

    Raises:
        LabError: If an option is unknown, or its value is impossible.
    """
    kinds: dict[tuple[Any, ...], TrainConfig] = {}
    for config in configs:
        rest = {name: value for name, value in config.optimizer_options().items() if name not in ("lr", "damping")}
        kind = (config.task, config.optimizer, config.width, config.batch_norm, json.dumps(rest, default=str))
        kinds.setdefault(kind, config)
    for config in kinds.values():
        model = TASKS.get(config.task).build(config.width or TASKS.get(config.task).width, config.batch_norm)
        getattr(build_optimizer(config.optimizer, model, config.optimizer_options()), "close", lambda: None)()


def unique(configs: Sequence[TrainConfig]) -> list[TrainConfig]:
    """Return the same settings without repetitions, in the same order."""
    return list({key(config): config for config in configs}.values())


def _check(space: Space) -> None:
    for name, values in (("lr", space.lrs), ("damping", space.dampings), ("seed", space.seeds)):
        if values is not None and not values:
            raise LabError(f"{name} needs at least one value")
    if space.random_points < 0:
        raise LabError(f"random must be 0 or more, not {space.random_points}")
    if not (math.isfinite(space.reach) and space.reach > 1):
        raise LabError(f"reach must be more than 1, not {space.reach}")
