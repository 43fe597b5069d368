"""Names of runs in legends and tables, and of the settings that distinguish them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.optimizers import OPTIMIZERS
from ekfac.lab.tasks import TASKS

NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "muon": "Muon", "kfac": "KFAC", "ekfac": "EKFAC"}
NAMES |= {"soap": "SOAP", "ekfac-ra": "EKFAC-ra", "ekfac-default": "EKFAC (defaults)"}

# What a search varies; a description of a setting always includes these.
SEARCHED = ("lr", "damping", "batch_size")
# Fields that do not affect a run's result.
_OUTSIDE = ("device", "channels_last", "compile", "plugins")


def counted(number: int, noun: str) -> str:
    """Return ``1 run``, ``2 runs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def option(config: TrainConfig, name: str) -> Any:
    """Return an option of a run's optimizer: as set, else its default, else ``None``."""
    given = config.optimizer_options()
    if name in given:
        return given[name]
    if config.optimizer not in OPTIMIZERS:
        return None
    parameter = inspect.signature(OPTIMIZERS.get(config.optimizer).build).parameters.get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def has_option(optimizer: str, name: str) -> bool:
    """Return whether an optimizer of the lab has an option, such as ``damping``."""
    return name in inspect.signature(OPTIMIZERS.get(optimizer).build).parameters


def method(config: TrainConfig) -> str:
    """Return the method's name as in the paper's legends: ``EKFAC-ra freq=50``, ``SGD + BN``."""
    name = NAMES.get(config.optimizer, config.optimizer)
    if config.batch_norm:
        name += " + BN"
    every = option(config, "refresh_every")
    return name if every is None else f"{name} freq={every}"


def varied(settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names needed to describe each of these settings: the usual ones, and others that differ.

    Args:
        settings: Settings from :meth:`TrainConfig.to_dict`.
    """
    beside = {*SEARCHED, *_OUTSIDE, "task", "optimizer", "seed", "options"}
    names = [name for name in settings[0] if name not in beside] if settings else []
    return (*SEARCHED, *(name for name in names if len({one.get(name) for one in settings}) > 1))


def describe(config: TrainConfig, names: Iterable[str] = SEARCHED) -> str:
    """Describe in one line the settings that a search varies and options that differ from the lab's.

    For example ``lr 0.01, damping 0.001, batch 200, kl_clip 0.1``.
    """
    words = {"batch_size": "batch", "refresh_every": "freq"}
    found = []
    for name in names:
        value = getattr(config, name) if hasattr(config, name) else None
        value = option(config, name) if value is None else value
        if value is not None:
            text = f"{value:.3g}" if isinstance(value, float) else str(value)
            found.append(f"{words.get(name, name)} {text}")
    usual = _usual(config)
    found += [f"{name} {value}" for name, value in config.options.items() if name not in usual or usual[name] != value]
    return ", ".join(found)


def _usual(config: TrainConfig) -> dict[str, Any]:
    """Return the lab's options of a run's optimizer, and its task's if the task is registered."""
    if config.optimizer not in OPTIMIZERS:
        return {}
    own = TASKS.get(config.task).settings.get(config.optimizer, {}) if config.task in TASKS else {}
    return {**OPTIMIZERS.get(config.optimizer).defaults, **own}


def touched(config: TrainConfig) -> bool:
    """Return whether a run is named after the library's defaults but changes some of them."""
    if config.optimizer != "ekfac-default":
        return False
    plain, usual = TrainConfig(config.task, config.optimizer), _usual(config)
    given = config.optimizer_options().items()
    changed = any(value != usual.get(name, option(plain, name)) for name, value in given)
    return bool(changed or config.cosine or config.halve_every)


def shown_method(config: TrainConfig) -> str:
    """Return the method's name; changed settings are not called the library's defaults."""
    name = method(config)
    return name.replace("(defaults)", "(changed)") if touched(config) else name


def key(config: TrainConfig) -> str:
    """Return a name for a run's folder: readable, the same on every machine, and unique to the settings.

    Args:
        config: The settings, resolved, so that an implicit and an explicit default are the same run.
    """
    data = {name: value for name, value in config.to_dict().items() if name not in _OUTSIDE}
    if data["patience"] is None:
        del data["patience"]  # added later: names of runs without it must not change
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:8]
    words = [config.task, config.optimizer, *(["bn"] if config.batch_norm else [])]
    for letter, name in (("lr", "lr"), ("d", "damping"), ("b", "batch_size"), ("s", "seed")):
        value = getattr(config, name)
        if value is not None:
            words.append(f"{letter}{value:.3g}" if isinstance(value, float) else f"{letter}{value}")
    return "-".join([*words, digest])


def without_seed(config: TrainConfig) -> tuple[Any, ...]:
    """Return a key that groups the seeds of one setting."""
    data = {name: value for name, value in config.to_dict().items() if name not in (*_OUTSIDE, "seed")}
    return tuple(json.dumps(data[f.name], sort_keys=True, default=str) for f in fields(config) if f.name in data)
