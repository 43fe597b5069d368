"""The suite's configuration: one JSON file of plain data, checked before anything runs."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ekfac.lab.optimizers import OPTIMIZERS, check_options
from ekfac.lab.registry import LabError
from ekfac.lab.suite.tasks import TASKS

SCHEDULES = ("own", "cosine", "constant")
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        name: Its name in the configuration.
        label: Its name in tables and pictures.
        optimizer: The optimizer's name in the lab.
        options: Its options.
        lr: The learning rates to try; with ``relative``, as multiples of the optimizer's default, whose built-in
            schedule stays in effect.
        relative: Whether ``lr`` are multiples of the default.
        schedules: ``"cosine"`` and ``"constant"``, both after the task's warm-up; ``"own"`` leaves the learning rate
            to the optimizer.
        decay: A factor for the task's weight decay; ``None`` leaves it to the optimizer.
        fixed: Whether the first learning rate counts; the others are then run with every seed to see whether they
            diverge.
        ours: Whether it is one of the methods that the report compares with the rivals.
    """

    name: str
    label: str
    optimizer: str
    options: Mapping[str, Any]
    lr: tuple[float, ...]
    relative: bool = False
    schedules: tuple[str, ...] = ("cosine", "constant")
    decay: float | None = None
    fixed: bool = False
    ours: bool = False


@dataclass(frozen=True)
class TaskPlan:
    """One task and its training, the same for every method.

    Attributes:
        name: Its name in the configuration.
        label: Its name in tables and pictures.
        task: The registered task.
        settings: Arguments of that task.
        steps: Steps of training; ``None`` with ``epochs``.
        epochs: Passes over the training data.
        warmup: Steps of linear warm-up.
        end: Fraction of the learning rate at which the cosine ends.
        clip: The norm to clip gradients to; ``None`` for no clipping.
        weight_decay: Weight decay, as in AdamW.
        decay_vectors: Whether biases and norms decay too.
        take: ``"last"`` or ``"best"``: the evaluation of a run that counts.
        methods: By method name, ``lr`` and ``options`` that differ on this task.
    """

    name: str
    label: str
    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: float | None = None
    warmup: int = 100
    end: float = 0.0
    clip: float | None = None
    weight_decay: float = 0.0
    decay_vectors: bool = True
    take: str = "last"
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The target: a method's final validation measure, to within a fraction of it."""

    method: str
    schedule: str = "cosine"
    within: float = 0.01


@dataclass(frozen=True)
class Suite:
    """A whole configuration.

    Attributes:
        tasks: The tasks by name.
        methods: The methods by name.
        seeds: Seeds of every setting.
        every_rate: Whether every learning rate is run with every seed; else only the best one on the first seed is.
        evaluations: The number of evenly spaced evaluations after the start.
        target: The target to reach.
        quick: Whether this is the small form.
    """

    tasks: Mapping[str, TaskPlan]
    methods: Mapping[str, Method]
    seeds: tuple[int, ...] = (0, 1, 2)
    every_rate: bool = False
    evaluations: int = 20
    target: Target = field(default_factory=lambda: Target("adamw"))
    quick: bool = False

    def selected(self, tasks: Sequence[str] = (), methods: Sequence[str] = (), schedules: Sequence[str] = ()) -> Suite:
        """Return the suite restricted to some tasks, methods and schedules; an empty list means all.

        Raises:
            LabError: If a name is unknown.
        """
        for kind, given, known in (
            ("task", tasks, self.tasks),
            ("method", methods, self.methods),
            ("schedule", schedules, SCHEDULES),
        ):
            for name in given:
                if name not in known:
                    raise LabError(f"the suite has no {kind} {name!r}; it has: {', '.join(known)}")
        kept = {name: self.methods[name] for name in methods or self.methods}
        if schedules:
            kept = {
                name: replace(method, schedules=tuple(s for s in method.schedules if s in schedules))
                for name, method in kept.items()
            }
        return replace(self, tasks={name: self.tasks[name] for name in tasks or self.tasks}, methods=kept)


def builtin() -> list[str]:
    """Return the names of the library's built-in configurations."""
    return sorted(file.stem for file in CONFIGS.glob("*.json"))


def load(where: str | Path, quick: bool = False) -> Suite:
    """Read a configuration.

    Args:
        where: A JSON file, or the name of one that comes with the library.
        quick: Whether to take the small form.

    Raises:
        LabError: If it cannot be read, or anything in it is wrong; the message says where.
    """
    return parse(read(where), quick)


def read(where: str | Path) -> dict[str, Any]:
    """Return a configuration as plain data.

    Raises:
        LabError: If it cannot be read.
    """
    file = CONFIGS / f"{where}.json" if str(where) in builtin() else Path(where)
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise LabError(
            f"configuration {str(where)!r} is neither a file nor one of the library's: {', '.join(builtin())}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise LabError(f"configuration {where} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise LabError(f"configuration {where} must be a JSON object")
    return data


def parse(data: Mapping[str, Any], quick: bool = False) -> Suite:
    """Check a configuration and return it.

    Raises:
        LabError: If anything in it is wrong.
    """
    top = _Reader(data, "the configuration")
    top.only("about", "seeds", "every_rate", "evaluations", "target", "methods", "tasks", "quick")
    small = _Reader(top.get("quick", {}, dict), "quick")
    small.only("seeds", "evaluations", "schedules", "rates")
    chosen = small if quick else top
    rates = small.whole("rates", 0, least=0) if quick else 0
    methods = {name: _method(name, value, rates) for name, value in top.get("methods", None, dict).items()}
    schedules = small.strings("schedules", SCHEDULES) if quick else SCHEDULES
    _one_of("quick: schedules", schedules, SCHEDULES)
    if quick:
        methods = {
            name: replace(method, schedules=tuple(s for s in method.schedules if s in (*schedules, "own")))
            if set(method.schedules) & set(schedules)
            else method
            for name, method in methods.items()
        }
    tasks = {name: _task(name, value, quick, methods) for name, value in top.get("tasks", None, dict).items()}
    for kind, found in (("method", methods), ("task", tasks)):
        if not found:
            raise LabError(f"the configuration names no {kind}")
    return Suite(
        tasks,
        methods,
        _seeds(chosen.get("seeds", top.get("seeds", [0, 1, 2], list), list)),
        top.get("every_rate", False, bool),
        chosen.whole("evaluations", top.whole("evaluations", 20, least=2), least=2),
        _target(top.get("target", {}, dict), methods),
        quick,
    )


def _seeds(given: list[Any]) -> tuple[int, ...]:
    if not given or any(type(seed) is not int or seed < 0 for seed in given) or len(set(given)) != len(given):
        raise LabError(f"seeds must be one or more distinct integers of at least 0, not {given!r}")
    return tuple(given)


def _target(data: dict[str, Any], methods: Mapping[str, Method]) -> Target:
    at = _Reader(data, "target")
    at.only("method", "schedule", "within")
    target = Target(at.get("method", "adamw", str), at.get("schedule", "cosine", str), at.number("within", 0.01, 0.0))
    _one_of("target: method", [target.method], methods)
    _one_of("target: schedule", [target.schedule], SCHEDULES)
    return target


def _method(name: str, data: Any, rates: int) -> Method:
    at = _Reader(data, f"method {name}")
    at.only("label", "optimizer", "options", "lr", "lr_factors", "schedules", "decay", "fixed", "ours")
    optimizer, options = at.get("optimizer", name, str), at.get("options", {}, dict)
    if optimizer not in OPTIMIZERS:
        raise LabError(f"method {name}: unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}")
    check_options(optimizer, options)
    if ("lr" in data) == ("lr_factors" in data):
        raise LabError(f"method {name} needs either lr or lr_factors, a list of numbers")
    relative = "lr_factors" in data
    lr = at.numbers("lr_factors" if relative else "lr")
    fixed = at.get("fixed", False, bool)
    if rates:
        lr = lr[:1] if fixed else middle(lr, rates)
    schedules = at.strings("schedules", ("cosine", "constant"))
    _one_of(f"method {name}: schedules", schedules, SCHEDULES)
    decay = None if data.get("decay") is None else at.number("decay", 0.0, 0.0)
    label, ours = at.get("label", name, str), at.get("ours", False, bool)
    return Method(name, label, optimizer, options, lr, relative, schedules, decay, fixed, ours)


def middle(values: tuple[float, ...], number: int) -> tuple[float, ...]:
    """Return ``number`` values from the middle of a list; the lower ones if there are two choices."""
    start = max(0, (len(values) - number) // 2)
    return values[start : start + number]


def _task(name: str, data: Any, quick: bool, methods: Mapping[str, Method]) -> TaskPlan:
    where = f"task {name}"
    keys = ("label", "task", "settings", "steps", "epochs", "warmup", "end", "clip", "weight_decay", "decay_vectors")
    full = _Reader(data, where)
    full.only(*keys, "take", "methods", "quick")
    small = _Reader(full.get("quick", {}, dict), f"{where}: quick")
    small.only("settings", "steps", "epochs", "warmup")
    merged = {key: value for key, value in data.items() if key != "quick"}
    if quick:
        if {"steps", "epochs"} & small.data.keys():
            merged = {key: value for key, value in merged.items() if key not in ("steps", "epochs")}
        settings = {**full.get("settings", {}, dict), **small.get("settings", {}, dict)}
        merged |= {**small.data, "settings": settings}
    at = _Reader(merged, where)
    if ("steps" in merged) == ("epochs" in merged):
        raise LabError(f"{where} needs either steps or epochs")
    task = at.get("task", name, str)
    if task not in TASKS:
        raise LabError(f"{where}: unknown task {task!r}; known: {', '.join(TASKS)}")
    settings = at.get("settings", {}, dict)
    _check_settings(where, task, settings)
    take = at.get("take", "last", str)
    _one_of(f"{where}: take", [take], ("last", "best"))
    return TaskPlan(
        name,
        at.get("label", name, str),
        task,
        settings,
        at.whole("steps", 1) if "steps" in merged else None,
        at.number("epochs", 1.0, 0.0) if "epochs" in merged else None,
        at.whole("warmup", 100, least=0),
        at.number("end", 0.0, 0.0),
        None if merged.get("clip") is None else at.number("clip", 1.0, 0.0),
        at.number("weight_decay", 0.0, 0.0),
        at.get("decay_vectors", True, bool),
        take,
        _overrides(where, at.get("methods", {}, dict), methods),
    )


def _overrides(where: str, data: dict[str, Any], methods: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, value in data.items():
        _one_of(f"{where}: methods", [name], methods)
        at = _Reader(value, f"{where}: method {name}")
        at.only("lr", "options")
        check_options(methods[name].optimizer, at.get("options", {}, dict))
        if "lr" in value:
            lr, usual = at.numbers("lr"), methods[name].lr
            if methods[name].relative:
                raise LabError(f"{where}: method {name} has lr_factors, and no learning rates of its own here")
            # The quick form reduces the number of learning rates, here too.
            value = {**value, "lr": middle(lr, len(usual)) if len(lr) > len(usual) else lr}
        found[name] = dict(value)
    return found


def _check_settings(where: str, task: str, settings: Mapping[str, Any]) -> None:
    parameters = dict(list(inspect.signature(TASKS.get(task)).parameters.items())[1:])
    for key, value in settings.items():
        if key not in parameters:
            raise LabError(f"{where}: task {task} has no setting {key!r}; it has: {', '.join(parameters)}")
        kind = str(parameters[key].annotation)
        allowed: tuple[type, ...] = {"float": (int, float), "bool": (bool,)}.get(kind, (int,))
        if "None" in kind and value is None:
            continue
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise LabError(f"{where}: setting {key} must be of type {kind}, not {value!r}")


def _one_of(what: str, given: Sequence[str], known: Any) -> None:
    for name in given:
        if name not in known:
            raise LabError(f"{what}: unknown {name!r}; known: {', '.join(known)}")


class _Reader:
    """Reads values from a JSON object; errors say where, what and what is allowed."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise LabError(f"{where} must be a JSON object, not {data!r}")
        self.data, self.where = data, where

    def only(self, *keys: str) -> None:
        for key in self.data:
            if key not in keys:
                raise LabError(f"{self.where} has no entry {key!r}; it may have: {', '.join(keys)}")

    def get(self, key: str, default: Any, kind: type) -> Any:
        value = self.data.get(key, default)
        if not isinstance(value, kind):
            names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
            raise LabError(f"{self.where}: {key} must be {names[kind]}, not {value!r}")
        return value

    def whole(self, key: str, default: int, least: int = 1) -> int:
        value = self.data.get(key, default)
        if type(value) is not int or value < least:
            raise LabError(f"{self.where}: {key} must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, key: str, default: float, least: float) -> float:
        value = self.data.get(key, default)
        if not _is_number(value) or value < least:
            raise LabError(f"{self.where}: {key} must be a number of at least {least:g}, not {value!r}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not value or not all(_is_number(v) and v > 0 for v in value):
            raise LabError(f"{self.where}: {key} must be a list of positive numbers, not {value!r}")
        if len(set(value)) != len(value):
            raise LabError(f"{self.where}: {key} holds a number twice: {value!r}")
        return tuple(float(v) for v in value)

    def strings(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        value = self.data.get(key, list(default))
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise LabError(f"{self.where}: {key} must be a list of names, not {value!r}")
        return tuple(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
