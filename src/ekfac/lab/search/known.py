"""Each method at a setting that is known to work, for ``ekfac reproduce`` without a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ekfac.lab.config import TrainConfig

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


def autoencoder() -> list[TrainConfig]:
    """Return the auto-encoder's methods at both batch sizes."""
    return [replace(_AE, optimizer=n, batch_size=size, **s) for size in (200, 500) for n, s in AUTOENCODER.items()]


def autoencoder_search() -> list[TrainConfig]:
    """Return the paper's methods without learning rates and dampings, which are to be searched."""
    found = []
    for name, setting in AUTOENCODER.items():
        if name != "ekfac-default":
            kept = {key: value for key, value in setting.items() if key not in ("lr", "damping")}
            found.append(replace(_AE, optimizer=name, **kept))
    return found


def frequency() -> list[TrainConfig]:
    """Return the factored methods with bases updated every 50, 100 and 500 steps, and at every step."""
    base = replace(_AE, batch_size=200)
    methods = {name: AUTOENCODER[name] for name in FACTORED}
    found = [
        replace(base, optimizer=n, **{**s, "refresh_every": e}) for n, s in methods.items() for e in (50, 100, 500)
    ]
    return found + [replace(base, optimizer=n, **{**s, "refresh_every": 1}, epochs=3) for n, s in methods.items()]


def sensitivity() -> list[TrainConfig]:
    """Return learning rates and dampings around each method's best."""
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


def network(task: str, every: int = 500, **more: Any) -> Callable[[], list[TrainConfig]]:
    """Return the paper's methods on a CIFAR-10 network at the lab's settings, which no recorded search has chosen."""

    def configs() -> list[TrainConfig]:
        base = TrainConfig(task, epochs=100, channels_last=True, **more)
        found = [replace(base, optimizer="sgd", batch_norm=True)]
        found += [replace(base, optimizer="sgd")] if task == "vgg11" else []
        methods = FACTORED if task == "vgg11" else ("kfac", "ekfac-ra")
        return found + [replace(base, optimizer=name, refresh_every=every) for name in methods]

    return configs


def batch_sizes() -> list[TrainConfig]:
    """Return the factored methods at several batch sizes, on both networks."""
    found = []
    for task, sizes in (("vgg11", (200, 500, 1000)), ("resnet34", (200, 500))):
        factored = [config for config in network(task)() if config.optimizer in FACTORED]
        found += [replace(config, batch_size=size) for config in factored for size in sizes]
    return found


def schedule() -> list[TrainConfig]:
    """Return both networks with the learning rate halved every 20 epochs."""
    return [c for task in ("vgg11", "resnet34") for c in network(task, halve_every=20)() if c.optimizer != "ekfac"]


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


def compared(task: str) -> Callable[[], list[TrainConfig]]:
    """Return the library's defaults and its rivals on a task."""

    def configs() -> list[TrainConfig]:
        more, epochs, norm, rates = COMPARED[task]
        base = TrainConfig(task, "ekfac-default", epochs=epochs, **more)
        return [base, *(replace(base, optimizer=n, lr=lr, batch_norm=norm) for n, lr in rates.items())]

    return configs


KNOWN: dict[str, Callable[[], list[TrainConfig]]] = {
    "autoencoder": autoencoder,
    "frequency": frequency,
    "vgg11": network("vgg11"),
    "resnet34": network("resnet34"),
    "batch-size": batch_sizes,
    "schedule": schedule,
    "sensitivity": sensitivity,
    **{f"comparison-{task}": compared(task) for task in COMPARED},
}
