"""What a run is called in legends and tables, and what tells it from its neighbours."""

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

# What a search varies, and a setting's one line always says.
SEARCHED = ("lr", "damping", "batch_size")
# What does not change the result that a run is after, or only in name.
_OUTSIDE = ("device", "channels_last", "compile", "plugins")


def counted(number: int, noun: str) -> str:
    """Return ``1 run``, ``2 runs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def option(config: TrainConfig, name: str) -> Any:
    """Return an option of a run's optimizer: as set, else as its signature has it, else ``None``."""
    given = config.optimizer_options()
    if name in given:
        return given[name]
    if config.optimizer not in OPTIMIZERS:
        return None
    parameter = inspect.signature(OPTIMIZERS.get(config.optimizer).build).parameters.get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def has_option(optimizer: str, name: str) -> bool:
    """Tell whether an optimizer of the lab takes an option, such as ``damping``."""
    return name in inspect.signature(OPTIMIZERS.get(optimizer).build).parameters


def method(config: TrainConfig) -> str:
    """Return the method's name as the paper's legends have it: ``EKFAC-ra freq=50``, ``SGD + BN``."""
    name = NAMES.get(config.optimizer, config.optimizer)
    if config.batch_norm:
        name += " + BN"
    every = option(config, "refresh_every")
    return name if every is None else f"{name} freq={every}"


def varied(settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names that one line about each of these settings needs: the usual ones, and what else differs.

    Args:
        settings: As :meth:`TrainConfig.to_dict` gives them.
    """
    beside = {*SEARCHED, *_OUTSIDE, "task", "optimizer", "seed", "options"}
    names = [name for name in settings[0] if name not in beside] if settings else []
    return (*SEARCHED, *(name for name in names if len({one.get(name) for one in settings}) > 1))


def describe(config: TrainConfig, names: Iterable[str] = SEARCHED) -> str:
    """Return the settings that a search varies, and options that are not the usual ones, in one line.

    Such as ``lr 0.01, damping 0.001, batch 200, kl_clip 0.1``.
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
    """Return the lab's options of a run's optimizer, and those of its task where that is known here."""
    if config.optimizer not in OPTIMIZERS:
        return {}
    own = TASKS.get(config.task).settings.get(config.optimizer, {}) if config.task in TASKS else {}
    return {**OPTIMIZERS.get(config.optimizer).defaults, **own}


def touched(config: TrainConfig) -> bool:
    """Tell whether a run is named after the library's defaults and has others: tried, but not to be shown as such."""
    if config.optimizer != "ekfac-default":
        return False
    plain, usual = TrainConfig(config.task, config.optimizer), _usual(config)
    given = config.optimizer_options().items()
    changed = any(value != usual.get(name, option(plain, name)) for name, value in given)
    return bool(changed or config.cosine or config.halve_every)


def shown_method(config: TrainConfig) -> str:
    """Return the method's name; settings near the library's defaults are not called the defaults."""
    name = method(config)
    return name.replace("(defaults)", "(changed)") if touched(config) else name


def key(config: TrainConfig) -> str:
    """Return a name for a run's folder: readable, the same on every machine, and unlike for unlike settings.

    Args:
        config: The settings, resolved, so that a default and the same value written out are one run.
    """
    data = {name: value for name, value in config.to_dict().items() if name not in _OUTSIDE}
    if data["patience"] is None:
        del data["patience"]  # it came later: names of runs without it are what they were
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:8]
    words = [config.task, config.optimizer, *(["bn"] if config.batch_norm else [])]
    for letter, name in (("lr", "lr"), ("d", "damping"), ("b", "batch_size"), ("s", "seed")):
        value = getattr(config, name)
        if value is not None:
            words.append(f"{letter}{value:.3g}" if isinstance(value, float) else f"{letter}{value}")
    return "-".join([*words, digest])


def without_seed(config: TrainConfig) -> tuple[Any, ...]:
    """Return what the seeds of one setting have in common, as something to group by."""
    data = {name: value for name, value in config.to_dict().items() if name not in (*_OUTSIDE, "seed")}
    return tuple(json.dumps(data[f.name], sort_keys=True, default=str) for f in fields(config) if f.name in data)
