"""Settings of the small runs that ``--quick`` makes: minutes on two cores, on the bundled digits only.

Learning rates and damping come from a small search of these same small networks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.data.padded import NAME as PADDED

NOTE_DIGITS = "quick: 2,000 digits of mnist-5k, width 100"
NOTE_COMPARISON = "quick: digits of mnist-5k, small networks, a few epochs"
NOTE_CIFAR = "quick: small network; digits of mnist-5k padded to 32 x 32 x 3 in place of CIFAR-10"

# A decade above the paper's grid: these runs are a tenth as long as the paper's.
DECADES = (1.0, 1e-1, 1e-2, 1e-3)

_RA: dict[str, Any] = {"optimizer": "ekfac-ra", "options": {"on_refresh": "kronecker"}}
_CLIPPED: dict[str, Any] = {"momentum": 0.9, "kl_clip": 1.0}

_AUTOENCODER = TrainConfig(
    "autoencoder", dataset="mnist-5k", width=100, limit=2000, batch_size=100, epochs=10, device="cpu"
)
AUTOENCODER: dict[str, dict[str, Any]] = {
    "SGD + BN": {"optimizer": "sgd", "batch_norm": True, "lr": 0.01},
    "Adam + BN": {"optimizer": "adam", "batch_norm": True, "lr": 0.01},
    "KFAC": {"optimizer": "kfac", "lr": 0.3, "damping": 0.1, "refresh_every": 10, "options": _CLIPPED},
    "EKFAC": {"optimizer": "ekfac", "lr": 0.03, "damping": 1e-3, "refresh_every": 10},
    "EKFAC-ra": {**_RA, "lr": 0.03, "damping": 1e-3, "refresh_every": 10},
    "EKFAC (defaults)": {"optimizer": "ekfac-default"},
}
FACTORED = ("KFAC", "EKFAC", "EKFAC-ra")


def autoencoder(name: str, **changes: Any) -> TrainConfig:
    """Return the small auto-encoder run of a method."""
    return replace(_AUTOENCODER, **{**AUTOENCODER[name], **changes})


def planes() -> list[TrainConfig]:
    """Return the grid of (learning rate, damping) for each of the factored methods, a few epochs each."""
    base = {"epochs": 4, "batch_size": 200}
    return [
        autoencoder(name, lr=lr, damping=damping, **base) for name in FACTORED for lr in DECADES for damping in DECADES
    ]


def frequencies() -> list[TrainConfig]:
    """Return the factored methods at several refresh intervals."""
    return [autoencoder(name, refresh_every=every, epochs=3) for name in FACTORED for every in (1, 10, 50)]


def sensitivity() -> list[TrainConfig]:
    """Return the planes, and lines over the learning rate for Adam and SGD."""
    lines = [
        autoencoder(name, lr=lr, epochs=4, batch_size=200)
        for name in ("SGD + BN", "Adam + BN")
        for lr in (0.1, 0.03, 0.01, 0.003)
    ]
    return planes() + lines


def comparison() -> list[TrainConfig]:
    """Return the library's defaults, Adam and SGD on a small auto-encoder and a small classifier, two seeds each."""
    small = {"dataset": "mnist-5k", "limit": 2000, "batch_size": 100, "epochs": 4, "device": "cpu"}
    methods: list[dict[str, Any]] = [{"optimizer": "ekfac-default"}]
    methods += [{"optimizer": "sgd", "lr": 0.1}, {"optimizer": "adamw", "lr": 0.01}]
    found = []
    for task, width, batch_norm in (("autoencoder", 100, True), ("classifier", 50, False)):
        for method in methods:
            base = TrainConfig(task, width=width, **small, **method)  # type: ignore[arg-type]
            if batch_norm and method["optimizer"] != "ekfac-default":
                base = replace(base, batch_norm=True, lr=0.01)
            found += [replace(base, seed=seed) for seed in (0, 1)]
    return found


# As in the paper, the baselines take smaller batches than the factored methods.
_NETWORKS = {
    "vgg11": TrainConfig("vgg11", dataset=PADDED, width=8, limit=1000, batch_size=100, epochs=5, device="cpu"),
    "resnet34": TrainConfig("resnet34", dataset=PADDED, width=4, limit=500, batch_size=50, epochs=4, device="cpu"),
}
_PLAIN: dict[str, Any] = {"momentum": 0.0}
CIFAR: dict[str, dict[str, list[dict[str, Any]]]] = {
    "vgg11": {
        "SGD": [{"optimizer": "sgd", "lr": 0.01, "batch_size": 50}],
        "SGD + BN": [{"optimizer": "sgd", "batch_norm": True, "lr": lr, "batch_size": 50} for lr in (0.01, 0.03)],
        "KFAC": [{"optimizer": "kfac", "lr": 0.01, "damping": d, "options": _PLAIN} for d in (0.01, 0.1)],
        "EKFAC": [{"optimizer": "ekfac", "lr": lr, "damping": 0.01} for lr in (0.01, 0.003)],
        "EKFAC-ra": [{**_RA, "lr": lr, "damping": 0.01} for lr in (0.01, 0.003)],
    },
    "resnet34": {
        "SGD + BN": [{"optimizer": "sgd", "batch_norm": True, "lr": 0.01, "batch_size": 25}],
        "KFAC": [{"optimizer": "kfac", "lr": 0.1, "damping": 0.1, "options": {"momentum": 0.0, "kl_clip": 0.01}}],
        "EKFAC-ra": [{**_RA, "lr": lr, "damping": 0.01} for lr in (0.01, 0.005)],
    },
}


def cifar(task: str, methods: Iterable[str] | None = None, first: bool = False, **changes: Any) -> list[TrainConfig]:
    """Return small runs of a convolutional network.

    Args:
        task: ``"vgg11"`` or ``"resnet34"``.
        methods: The methods; all by default.
        first: Only the first setting of each, not all settings to select from.
        changes: Settings to change in all of them.
    """
    found = []
    for name in methods or CIFAR[task]:
        for setting in CIFAR[task][name][: 1 if first else None]:
            more = {} if setting["optimizer"] == "sgd" else {"refresh_every": 20}
            found.append(replace(_NETWORKS[task], **{**setting, **more, **changes}))
    return found
