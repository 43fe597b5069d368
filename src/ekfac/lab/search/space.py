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
from ekfac.lab.tasks import build_network

DECADES = (1e-1, 1e-2, 1e-3, 1e-4)
RANDOM_POINTS = 20
# The paper's batch sizes if it searches over several; other tasks use only their own.
BATCH_SIZES = {"autoencoder": (200, 500)}

# Batch size, learning rate, damping.
Point = tuple[int | None, float | None, float | None]


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes:
        lrs: Learning rates of the grid.
        dampings: Damping values of the grid; ``None`` means the decades, or none for optimizers without damping.
        batch_sizes: Batch sizes; if empty, the task's.
        seeds: Seeds; each point is run with each of them.
        random_points: The number of random points around each grid point.
        reach: Random points are within this factor of their grid point, either way. With grid values a factor of 10
            apart, sqrt(10) makes neighbouring cells meet.
        draw: Seed of the random points.
        axes: Options of the optimizer or other settings, each with the values to try in all combinations.
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
    """Return all settings of a search, in the order in which to try them.

    First the grid, then one random point around each grid point, then a second around each, and so on, so that an
    interrupted search has covered the whole space. Learning rate and damping are log-uniform around their grid values.
    The same arguments give the same list on every machine.

    Args:
        base: The common settings.
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
        # Rounded so that a plan in JSON, a folder's name and a command line all contain the same number.
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
    """Return every combination of the axes' values; a single empty one if there are no axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def on_axes(base: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return a setting with these values: fields by name, anything else as an option of the optimizer."""
    own = {item.name for item in fields(base)}
    changed = replace(base, **{name: value for name, value in values.items() if name in own})
    rest = {name: value for name, value in values.items() if name not in own}
    return replace(changed, options={**changed.options, **rest})


def check_options(configs: Sequence[TrainConfig]) -> None:
    """Construct every optimizer once, so that a refused option does not fail hundreds of trials.

    Raises:
        LabError: If an option is unknown, or its value is impossible.
    """
    kinds: dict[tuple[Any, ...], TrainConfig] = {}
    for config in configs:
        rest = {name: value for name, value in config.optimizer_options().items() if name not in ("lr", "damping")}
        kind = (config.task, config.optimizer, config.width, config.batch_norm, json.dumps(rest, default=str))
        kinds.setdefault(kind, config)
    for config in kinds.values():
        model = build_network(config.task, config.width, config.batch_norm)
        getattr(build_optimizer(config.optimizer, model, config.optimizer_options()), "close", lambda: None)()


def unique(configs: Sequence[TrainConfig]) -> list[TrainConfig]:
    """Return the settings without duplicates, in the same order."""
    return list({key(config): config for config in configs}.values())


def _check(space: Space) -> None:
    for name, values in (("lr", space.lrs), ("damping", space.dampings), ("seed", space.seeds)):
        if values is not None and not values:
            raise LabError(f"{name} needs at least one value")
    if space.random_points < 0:
        raise LabError(f"random must be 0 or more, not {space.random_points}")
    if not (math.isfinite(space.reach) and space.reach > 1):
        raise LabError(f"reach must be more than 1, not {space.reach}")
