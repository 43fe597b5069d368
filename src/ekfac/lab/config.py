"""The settings of one training run, shared by the command line, scripts and the run's folder."""

from __future__ import annotations

import ast
import inspect
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

import torch

from ekfac.lab.data.datasets import DATASETS
from ekfac.lab.optimizers import OPTIMIZERS
from ekfac.lab.registry import LabError, portable, require_plugins
from ekfac.lab.tasks import TASKS

# What bfloat16 means: forward and backward under autocast; parameters stay float32.
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}

# The fields that are options of the optimizer; they are passed on only if set.
OPTIMIZER_FIELDS = ("lr", "damping", "damping_mode", "refresh_every", "sua")


def _option(kind: type, help: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True)
class TrainConfig:
    """One run. ``None`` means the default of the task or the optimizer, which :meth:`resolved` fills in."""

    task: str
    optimizer: str = _option(str, f"one of: {', '.join(OPTIMIZERS)}, or a plugin's [default: ekfac-ra]", "ekfac-ra")
    batch_norm: bool = _option(bool, "put batch-norm into the network", False)
    dataset: str | None = _option(str, "dataset, by name [default: the task's]")
    width: int | None = _option(int, "width of the first layer; the others shrink with it [default: the paper's]")
    limit: int | None = _option(int, "train on only the first examples, this many")
    batch_size: int | None = _option(int, "examples a step [default: the task's]")
    epochs: int | None = _option(int, "passes over the training data [default: the task's]")
    lr: float | None = _option(float, "learning rate [default: the task's for this optimizer]")
    damping: float | None = _option(float, "damping epsilon")
    damping_mode: str | None = _option(str, "how damping is added: spectral, plain, factored or relative")
    refresh_every: int | None = _option(int, "steps between refreshes of the basis (or inverse)")
    sua: bool | None = _option(bool, "spatially uncorrelated approximation of convolutions")
    halve_every: int | None = _option(int, "halve the learning rate every this many epochs")
    cosine: bool = _option(bool, "let the learning rate fall to zero along a cosine over all epochs", False)
    patience: int | None = _option(int, "stop after this many epochs without better validation")
    seed: int = _option(int, "seed of the initial weights and of the order of examples", 0)
    device: str = _option(str, "cpu, cuda, ... or auto", "auto")
    dtype: str = _option(str, "float32, float64, or bfloat16 (autocast; parameters stay float32)", "float32")
    channels_last: bool = _option(
        bool, "lay images out with the channels last, which convolutions on a GPU prefer", False
    )
    compile: bool = _option(bool, "compile the network with torch.compile", False)
    options: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, for JSON."""
        return {**asdict(self), "options": dict(self.options), "plugins": list(self.plugins)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """Read the settings back.

        Raises:
            LabError: If a name is unknown, ``task`` is missing, or a value has the wrong type.
        """
        known = {f.name: f for f in fields(cls)}
        for name in data:
            if name not in known:
                raise LabError(f"unknown setting {name!r}; known: {', '.join(known)}")
        if not isinstance(data.get("task"), str):
            raise LabError(f"a task must be named; known: {', '.join(TASKS)}")
        for name, value in data.items():
            _check_kind(name, value)
        if not isinstance(data.get("options", {}), Mapping):
            raise LabError(f"options must be an object, not {data['options']!r}")
        plugins = data.get("plugins", ())
        if not isinstance(plugins, list | tuple) or not all(isinstance(name, str) for name in plugins):
            raise LabError(f"plugins must be a list of names, not {plugins!r}")
        return cls(**{**data, "plugins": tuple(data.get("plugins", ())), "options": dict(data.get("options", {}))})

    def optimizer_options(self) -> dict[str, Any]:
        """Return the options that are passed to the optimizer."""
        given = {name: getattr(self, name) for name in OPTIMIZER_FIELDS}
        return {**{name: value for name, value in given.items() if value is not None}, **self.options}

    def resolved(self) -> TrainConfig:
        """Return the same run with every default written out, so that it can be repeated later.

        Raises:
            LabError: If a name is unknown, a value is impossible, or a plugin is named that is not loaded.
        """
        require_plugins(self.plugins)
        task, entry = TASKS.get(self.task), OPTIMIZERS.get(self.optimizer)
        base = {
            "dataset": task.dataset,
            "width": task.width,
            "batch_size": task.batch_size,
            "epochs": task.epochs,
        }
        usual = {**base, **entry.defaults, **task.settings.get(self.optimizer, {})}
        own = {f.name for f in fields(self)}
        # An option with a field of its own, like lr, is stored only in that field.
        set_fields = {name: value for name, value in self.options.items() if name in OPTIMIZER_FIELDS}
        for name, value in set_fields.items():
            _check_kind(name, value)
        missing = {name: value for name, value in usual.items() if name in own and getattr(self, name) is None}
        options = {name: value for name, value in {**usual, **self.options}.items() if name not in {*own, *set_fields}}
        if self.cosine and "anneal" in inspect.signature(entry.build).parameters:
            options.setdefault("anneal", None)  # one schedule is enough
        config = replace(self, **{**missing, **set_fields}, options=options, device=_device(self.device))
        config._check()
        return config

    def _check(self) -> None:
        DATASETS.get(str(self.dataset))
        for name in ("width", "limit", "batch_size", "epochs", "refresh_every", "halve_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} must be at least 1, not {value}")
        for name in ("lr", "damping"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= sys.float_info.max:
                raise LabError(f"{name} must be a positive number, not {value}")
        check_seed(self.seed)
        if self.dtype not in DTYPES:
            raise LabError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")

    def command(self) -> str:
        """Return the command line that repeats this run, also on another machine.

        It contains no folder of this machine: data files are in ``EKFAC_DATA`` or ``--data-dir``.
        """
        words = ["ekfac", "train", self.task]
        for f in fields(self):
            value = getattr(self, f.name)
            usual = f.default is not MISSING and value == f.default and f.name != "optimizer"
            if "kind" not in f.metadata or value is None or usual:
                continue
            flag = f.name.replace("_", "-")
            if f.metadata["kind"] is bool:
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        for name, value in self.options.items():
            words += ["--set", f"{name}={value}"]
        for plugin in self.plugins:
            words += ["--plugin", portable(plugin)]
        return shlex.join(words)


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy does not accept.

    Raises:
        LabError: If it is out of range.
    """
    if not 0 <= seed < 2**32:
        raise LabError(f"seed must be between 0 and 2**32 - 1, not {seed}")


def _check_kind(name: str, value: Any) -> None:
    """Refuse a setting of the wrong type; ``None`` is allowed in fields whose default it is."""
    known = next(f for f in fields(TrainConfig) if f.name == name)
    kind = known.metadata.get("kind")
    if kind is None or (value is None and known.default is None):
        return
    if not _is(value, kind):
        raise LabError(f"{name} must be of type {kind.__name__}, not {value!r}")


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise LabError(f"device {name!r} cannot be used: {reason}") from error
    return name


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Turn ``["kl_clip=0.1", "on_refresh=carry", "nesterov=true"]`` into typed options.

    Raises:
        LabError: If one is not of the form ``name=value``.
    """
    words = {"true": True, "false": False, "none": None}
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name.isidentifier():
            raise LabError(f"--set takes name=value, not {pair!r}")
        try:
            options[name] = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
            json.dumps(options[name])
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # the last two: nested too deeply
            options[name] = text
    return options
