"""The paper's experiments on CIFAR-10 as a program for :mod:`ekfac.lab.search.ladder`.

VGG11 and ResNet34 without batch-norm are trained by KFAC, EKFAC and EKFAC-ra with the appendix's initialisation and
damping and the spatially uncorrelated approximation, updating bases every 500 steps as in Algorithm 1, without momentum
or clipping. Baselines are SGD with momentum, with and without batch-norm, and Adam with it. ``EKFAC(model)`` is this
library's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError
from ekfac.lab.search.ladder import Group, Stage

# In the order of their importance.
NAMES = ("vgg11", "resnet34", "schedule", "batch-size", "damping", "every-step")
BATCH_SIZES = {"vgg11": (200, 500, 1000), "resnet34": (200, 500)}
LANES = {"resnet34": 0.35}
EVERY = 500

_PAPER: dict[str, Any] = {"sua": True, "refresh_every": EVERY, "batch_size": 500}
_KFAC = {"deterministic": True, "factor_every": 1, "pi_correction": False, "momentum": 0.0, "kl_clip": None}
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd"},
    "SGD + BN": {"optimizer": "sgd", "batch_norm": True},
    "Adam + BN": {"optimizer": "adam", "batch_norm": True},
    "KFAC": {"optimizer": "kfac", **_PAPER, "options": _KFAC},
    "EKFAC": {"optimizer": "ekfac", **_PAPER, "damping_mode": "factored"},
    "EKFAC-ra": {"optimizer": "ekfac-ra", **_PAPER, "damping_mode": "factored", "options": {"kl_clip": None}},
    "EKFAC (defaults)": {"optimizer": "ekfac-default"},
}
FACTORED = ("KFAC", "EKFAC", "EKFAC-ra")
_RATES: dict[str, tuple[float, ...]] = {"SGD": (0.1, 0.01, 0.001), "SGD + BN": (0.1, 0.01, 0.001)}
_RATES |= {"Adam + BN": (0.01, 0.001, 1e-4), "EKFAC (defaults)": (), **dict.fromkeys(FACTORED, (0.1, 0.01, 0.001))}
_DAMPINGS = {"vgg11": (0.1, 0.01, 0.001), "resnet34": (1.0, 0.1, 0.01)}
OF_TASK = {
    "vgg11": tuple(METHODS),
    "resnet34": ("SGD + BN", "Adam + BN", "KFAC", "EKFAC-ra", "EKFAC (defaults)"),
}
SCHEDULED = ("SGD + BN", "KFAC", "EKFAC-ra")


@dataclass(frozen=True)
class Size:
    """The size of a network's experiment.

    Attributes:
        halving: Stage by stage, how many settings are kept and for how many epochs.
        epochs: The lengths of the finals, in stages.
        seeds: The number of seeds of a final.
        tries: The most settings of a method that are tried for one epoch.
    """

    halving: Sequence[tuple[int, int]]
    epochs: Sequence[int]
    seeds: int = 3
    tries: int = 24


# Sizes by the time budget in seconds: for a few minutes of a fast GPU, and the paper's.
SIZES: Sequence[tuple[float, dict[str, Size]]] = (
    (0, {"vgg11": Size(((3, 3), (2, 8)), (20, 50), 3, 17), "resnet34": Size(((2, 3),), (10, 20), 3, 15)}),
    (3600, {"vgg11": Size(((4, 3), (2, 10)), (20, 30)), "resnet34": Size(((3, 3), (2, 8)), (15, 30))}),
    (7200, {"vgg11": Size(((4, 4), (3, 12)), (25, 50)), "resnet34": Size(((4, 4), (3, 12)), (25, 50))}),
)


class Program:
    """The stages of some of the paper's figures.

    Args:
        names: Names from :data:`NAMES`.
        seconds: The time budget, on which the length of the finals depends.
        changes: Fields to change in every run, such as a smaller width, for trying things out.
    """

    def __init__(self, names: Iterable[str], seconds: float = 0.0, changes: Mapping[str, Any] | None = None) -> None:
        self.names = tuple(names)
        for name in self.names:
            if name not in NAMES:
                raise LabError(f"unknown experiment {name!r}; known: {', '.join(NAMES)}")
        self.sizes = next(sizes for least, sizes in reversed(SIZES) if seconds >= least)
        self.changes = dict(changes or {})
        self._groups: dict[tuple[str, ...], Group] = {}
        self._searched: dict[str, Stage] = {}
        self.stages = self._stages()

    def group(self, task: str, method: str, **more: Any) -> Group:
        """Return a method on a network, cached; ``more`` defines a variant of it."""
        words = [f"{name} {value}" for name, value in more.items()]
        place = (task, method, *words)
        if place not in self._groups:
            own = {**METHODS[method], **more}
            base = TrainConfig(task, epochs=self.sizes[task].epochs[-1], dtype="bfloat16", channels_last=True, **own)
            dampings = _DAMPINGS[task] if method in FACTORED else ()
            seeds = range(self.sizes[task].seeds)
            name = " ".join([task, method, *words])
            self._groups[place] = Group(name, replace(base, **self.changes), _RATES[method], dampings, seeds)
            self._groups[place].most = self.sizes[task].tries
        return self._groups[place]

    def _search(self, group: Group, size: Size) -> list[Stage]:
        """Return a search's stages: the grid, hill climbing, then fewer and fewer settings for longer."""
        if not group.lrs:
            return []
        stages = [Stage("grid", group, 1)]
        stages.append(Stage("around", group, 1, by=1, needs=(stages[0],)))
        by = 1
        for keep, epochs in size.halving:
            stages.append(Stage("best", group, epochs, by, keep, needs=(stages[-1],)))
            by = epochs
        return stages

    def _network(self, task: str) -> tuple[list[Stage], list[Stage]]:
        """Return the stages of a network's figure, and those of its other seeds."""
        size = self.sizes[task]
        searches = [self._search(self.group(task, method), size) for method in OF_TASK[task]]
        # Stage by stage, not method by method, so that all methods are equally far when time runs out.
        longest = max(map(len, searches))
        first = [stages[n] for n in range(longest) for stages in searches if n < len(stages)]
        finals, seeds = [], []
        by = size.halving[-1][1]
        for epochs in size.epochs:
            for method, stages in zip(OF_TASK[task], searches, strict=True):
                finals.append(Stage("best", self.group(task, method), epochs, by, needs=tuple(stages[-1:])))
        for method, stages in zip(OF_TASK[task], searches, strict=True):
            seeds.append(Stage("seeds", self.group(task, method), size.epochs[-1], by, needs=tuple(stages[-1:])))
            self._searched[f"{task} {method}"] = stages[-1] if stages else finals[-1]
        return first + finals, seeds

    def _variant(self, task: str, method: str, climb: bool, **more: Any) -> list[Stage]:
        """Return the stages of a variant, which starts from the two best settings without it, and may climb."""
        size, source = self.sizes[task], self.group(task, method)
        by, epochs = size.halving[-1][1], size.epochs[-1]
        needs = (self._searched[f"{task} {method}"],)
        group = self.group(task, method, **more)
        if not climb:
            return [Stage("best", group, epochs, by, 2, needs, source)]
        first = Stage("best", group, 1, by, 2, needs, source)
        around = Stage("around", group, 1, by=1, needs=(first,))
        return [first, around, Stage("best", group, epochs, 1, needs=(around,))]

    def _stages(self) -> list[Stage]:
        tasks = [task for task in OF_TASK if {task, "schedule", "batch-size", "damping"} & {*self.names}]
        if "resnet34" in tasks and not {"resnet34", "schedule", "batch-size"} & {*self.names}:
            tasks.remove("resnet34")
        found: list[Stage] = []
        seeds: dict[str, list[Stage]] = {}
        for task in tasks:
            stages, seeds[task] = self._network(task)
            found += stages
        found += seeds["vgg11"] if "vgg11" in self.names else []
        later: list[Callable[[str], list[Stage]]] = []
        if "schedule" in self.names:
            later.append(self._schedule)
        if "batch-size" in self.names:
            later.append(self._batch_sizes)
        for make in later:
            found += make("vgg11")
        found += seeds["resnet34"] if "resnet34" in self.names else []
        if "damping" in self.names:
            found += self._variant("vgg11", "EKFAC-ra", True, damping_mode="plain")
        for make in later:
            found += make("resnet34")
        return found + (self._every_step() if "every-step" in self.names else [])

    def _every_step(self) -> list[Stage]:
        """Return the search for KFAC that inverts at every update: the auto-encoder's strong baseline."""
        setting: dict[str, Any] = {"deterministic": True, "factor_every": 1, "pi_correction": False}
        base = TrainConfig(
            "autoencoder", "kfac", dataset="mnist", batch_size=200, epochs=3, refresh_every=1, options=setting
        )
        group = Group("autoencoder KFAC", replace(base, **self.changes), (1.0, 0.1, 0.01), (1.0, 0.1, 0.01))
        self._groups["autoencoder", "KFAC"] = group
        return self._search(group, Size(((2, 3),), (3,)))

    def _schedule(self, task: str) -> list[Stage]:
        # In proportion to every 20 of 50 epochs.
        halve = max(1, round(0.4 * self.sizes[task].epochs[-1]))
        return [s for method in SCHEDULED for s in self._variant(task, method, False, halve_every=halve)]

    def _batch_sizes(self, task: str) -> list[Stage]:
        found = []
        for size in BATCH_SIZES[task]:
            for method in FACTORED:
                if size != 500 and method in OF_TASK[task]:
                    found += self._variant(task, method, True, batch_size=size)
        return found

    @property
    def groups(self) -> list[Group]:
        """All methods on all networks, in all variants."""
        return list(self._groups.values())
