"""What can be reproduced: every figure of the paper, and the tables of this project's pages.

An experiment has up to four levels. ``full`` is the paper's search, ``grid`` its grid alone, ``known`` each method at
the setting that a recorded search found, as long as the paper has it, and ``quick`` the small runs of ``--quick``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import Registry
from ekfac.lab.search import space
from ekfac.lab.show.figures import FIGURES
from ekfac.lab.show.reproduce.claims import CLAIMS, Claim

LEVELS = ("full", "grid", "known", "quick")


@dataclass(frozen=True)
class Experiment:
    """One figure of the paper, or one table of ours.

    Attributes:
        figure: The figure that is drawn.
        where: Where it stands, in the paper or on a page.
        claims: What is said of it there, each with the rule by which it is judged.
        dataset: Dataset of what is computed without runs.
        known: Each method at a setting that is known to work; ``None`` if no run is needed.
        search: What the paper searches over: settings that each stand for a method.
    """

    figure: str
    where: str
    claims: tuple[Claim, ...] = ()
    dataset: str = "mnist"
    known: Callable[[], list[TrainConfig]] | None = None
    search: Callable[[], list[TrainConfig]] | None = None

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that there are, the most thorough first; none where nothing is trained."""
        quick = FIGURES.get(self.figure).quick
        there = {"full": self.search, "grid": self.search, "known": self.known, "quick": quick if self.known else None}
        return tuple(level for level in LEVELS if there[level] is not None)

    def settings(self, level: str) -> list[TrainConfig]:
        """Return the runs of a level, resolved."""
        quick = FIGURES.get(self.figure).quick
        if level == "quick" and quick is not None:
            found: Iterable[TrainConfig] = quick()
        elif level == "known" and self.known is not None:
            found = self.known()
        else:
            found = _searched(self.search() if self.search else [], space.RANDOM_POINTS if level == "full" else 0)
        return space.unique([config.resolved() for config in found])


def _searched(bases: Sequence[TrainConfig], random_points: int) -> list[TrainConfig]:
    """Return the paper's grid around every method, and random points around it."""
    found: list[TrainConfig] = []
    for base in bases:
        sizes = () if base.batch_size is None else (base.batch_size,)
        found += space.settings(base, space.Space(batch_sizes=sizes, random_points=random_points))
    return found


# Found by recorded searches on full MNIST; docs/mnist.md has them. KFAC stays on a plateau with the pi correction.
_KFAC: dict[str, Any] = {"deterministic": True, "factor_every": 1, "pi_correction": False}
AUTOENCODER: dict[str, dict[str, Any]] = {
    "sgd": {"batch_norm": True, "lr": 0.01},
    "adam": {"batch_norm": True, "lr": 0.001},
    "kfac": {"lr": 0.1, "damping": 0.1, "refresh_every": 50, "options": _KFAC},
    "ekfac": {"lr": 0.01, "damping": 0.01, "refresh_every": 50},
    "ekfac-ra": {"lr": 0.01, "damping": 0.001, "refresh_every": 50},
    "ekfac-default": {},
}
_AE = TrainConfig("autoencoder", dataset="mnist", epochs=20)
FACTORED = ("kfac", "ekfac", "ekfac-ra")


def _autoencoder() -> list[TrainConfig]:
    return [replace(_AE, optimizer=n, batch_size=size, **s) for size in (200, 500) for n, s in AUTOENCODER.items()]


def _autoencoder_search() -> list[TrainConfig]:
    """Return the paper's methods without their learning rates and dampings, which the search is for."""
    found = []
    for name, setting in AUTOENCODER.items():
        if name != "ekfac-default":
            kept = {key: value for key, value in setting.items() if key not in ("lr", "damping")}
            found.append(replace(_AE, optimizer=name, **kept))
    return found


def _frequency() -> list[TrainConfig]:
    base = replace(_AE, batch_size=200)
    methods = {name: AUTOENCODER[name] for name in FACTORED}
    found = [
        replace(base, optimizer=n, **{**s, "refresh_every": e}) for n, s in methods.items() for e in (50, 100, 500)
    ]
    return found + [replace(base, optimizer=n, **{**s, "refresh_every": 1}, epochs=3) for n, s in methods.items()]


def _sensitivity() -> list[TrainConfig]:
    base, found = replace(_AE, batch_size=500), []
    for name in ("kfac", "ekfac-ra", "ekfac-default", "adam"):
        setting = AUTOENCODER[name]
        lr, damping = setting.get("lr", 0.01), None if name == "adam" else setting.get("damping", 1e-8)
        for by in (0.1, 1 / 3, 1, 3, 10):
            for factor in (1,) if damping is None else (0.01, 0.1, 1, 10, 100):
                rest = {key: value for key, value in setting.items() if key not in ("lr", "damping")}
                own = None if damping is None else float(f"{damping * factor:.3g}")
                found.append(replace(base, optimizer=name, lr=float(f"{lr * by:.1g}"), damping=own, **rest))
    return found


def _network(task: str, every: int = 500, **more: Any) -> Callable[[], list[TrainConfig]]:
    """Return the paper's methods on a CIFAR-10 network at the lab's own settings: no search is recorded of these."""

    def configs() -> list[TrainConfig]:
        base = TrainConfig(task, epochs=100, channels_last=True, **more)
        found = [replace(base, optimizer="sgd", batch_norm=True)]
        found += [replace(base, optimizer="sgd")] if task == "vgg11" else []
        methods = FACTORED if task == "vgg11" else ("kfac", "ekfac-ra")
        return found + [replace(base, optimizer=name, refresh_every=every) for name in methods]

    return configs


def _batch_sizes() -> list[TrainConfig]:
    found = []
    for task, sizes in (("vgg11", (200, 500, 1000)), ("resnet34", (200, 500))):
        factored = [config for config in _network(task)() if config.optimizer in FACTORED]
        found += [replace(config, batch_size=size) for config in factored for size in sizes]
    return found


def _schedule() -> list[TrainConfig]:
    return [c for task in ("vgg11", "resnet34") for c in _network(task, halve_every=20)() if c.optimizer != "ekfac"]


# The best of eight learning rates each in recorded searches; docs/comparison.md has them.
COMPARED: dict[str, tuple[dict[str, Any], int, bool, dict[str, float]]] = {
    "classifier": ({"dataset": "mnist"}, 20, False, {"adamw": 0.01, "muon": 0.03, "sgd": 0.3, "soap": 0.01}),
    "vgg11": ({"channels_last": True}, 20, True, {"adamw": 3e-4, "muon": 3e-3, "sgd": 3e-3, "soap": 3e-4}),
    "resnet34": (
        {"channels_last": True, "dtype": "bfloat16"},
        20,
        True,
        {"adamw": 5e-4, "muon": 0.03, "sgd": 0.03, "soap": 2e-3},
    ),
    "charlm": ({}, 5, False, {"adamw": 1e-3, "muon": 0.03, "sgd": 0.05, "soap": 3e-3}),
}


def _compared(task: str) -> Callable[[], list[TrainConfig]]:
    def configs() -> list[TrainConfig]:
        more, epochs, norm, rates = COMPARED[task]
        base = TrainConfig(task, "ekfac-default", epochs=epochs, **more)
        return [base, *(replace(base, optimizer=n, lr=lr, batch_norm=norm) for n, lr in rates.items())]

    return configs


EXPERIMENTS: Registry[Experiment] = Registry("experiment")
for _name, _experiment in {
    "rescaling": Experiment("rescaling", "Fig. 1"),
    "convolution": Experiment("convolution", "appendix, a diagram"),
    "correlation": Experiment("correlation", "Fig. 3, left", CLAIMS["correlation"]),
    "error": Experiment("error", "Fig. 3, right", CLAIMS["error"]),
    "autoencoder": Experiment(
        "autoencoder", "Fig. 4; mnist.md", CLAIMS["autoencoder"], known=_autoencoder, search=_autoencoder_search
    ),
    "frequency": Experiment("frequency", "Fig. 5; mnist.md", CLAIMS["frequency"], known=_frequency),
    "vgg11": Experiment(
        "vgg11", "Fig. 6", CLAIMS["vgg11"], "cifar10", known=_network("vgg11"), search=_network("vgg11")
    ),
    "resnet34": Experiment(
        "resnet34", "Fig. 7", CLAIMS["resnet34"], "cifar10", known=_network("resnet34"), search=_network("resnet34")
    ),
    "batch-size": Experiment("batch-size", "appendix", CLAIMS["batch-size"], "cifar10", known=_batch_sizes),
    "schedule": Experiment("schedule", "appendix", CLAIMS["schedule"], "cifar10", known=_schedule),
    "sensitivity": Experiment("sensitivity", "Fig. 4d; mnist.md", CLAIMS["sensitivity"], known=_sensitivity),
    **{
        f"comparison-{task}": Experiment("comparison", "comparison.md", CLAIMS["comparison"], known=_compared(task))
        for task in COMPARED
    },
}.items():
    EXPERIMENTS.add(_name, _experiment)
