"""Estimates the cost of runs on this machine, by timing a few steps of each kind."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Dataset, Split, load_dataset
from ekfac.lab.labels import method, option
from ekfac.lab.registry import LabError
from ekfac.lab.training.trainer import Trainer, given

STEPS = 4
# The number of examples with which evaluation is timed.
EXAMPLES = 500

# Cached seconds per step and per evaluated example, by kind.
_timed: dict[tuple[Any, ...], tuple[float, float]] = {}


def kind(config: TrainConfig) -> tuple[Any, ...]:
    """Return the settings that the cost of a step depends on."""
    return (
        config.task,
        config.optimizer,
        config.batch_norm,
        config.width,
        config.batch_size,
        config.dataset,
        config.dtype,
        config.sua,
        config.device,
        option(config, "refresh_every"),
    )


def seconds_of(
    configs: Sequence[TrainConfig],
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[float]:
    """Estimate the seconds that each run takes here, including evaluation.

    Args:
        configs: The runs, resolved.
        data_dir: Folder of the data files.
        say: Called with the kind that is timed.

    Raises:
        LabError: If the data are missing.
    """
    data: dict[str, Dataset] = {}
    new = {kind(config): config for config in configs if kind(config) not in _timed}
    for name in {given(config.dataset) for config in configs}:
        data[name] = load_dataset(name, data_dir)
    for number, (key, config) in enumerate(new.items(), 1):
        what = f"{config.task} by {method(config)}, batch {config.batch_size}"
        say(f"timing a few steps, {number} of {len(new)}: {what}")
        _timed[key] = _probe(config, data[given(config.dataset)])
    return [_whole(config, *_timed[kind(config)], data[given(config.dataset)]) for config in configs]


def _probe(config: TrainConfig, data: Dataset) -> tuple[float, float]:
    """Return the average seconds of a step, including refreshes, and of evaluating one example."""
    size = given(config.batch_size)
    few = min(len(data.train.x) // size, STEPS)
    if few < 1:
        raise LabError(f"batch_size {size} is more than the {len(data.train.x)} training examples of {data.name}")
    splits = {n: Split(*(part[:EXAMPLES] for part in split)) for n, split in data.splits.items()}
    splits["train"] = Split(*(part[: few * size] for part in data.train))
    trainer = Trainer(replace(config, limit=None, epochs=1), replace(data, splits=splits))
    try:
        start = time.perf_counter()
        trainer.initial_record()
        evaluating = (time.perf_counter() - start) / sum(len(split.y) for split in trainer.data.splits.values())
        times = [time.perf_counter()]

        def on_step(step: int, steps: int) -> None:
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            times.append(time.perf_counter())

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these steps are discarded
            trainer.train_epoch(on_step)
    finally:
        trainer.close()
    each = [after - before for before, after in itertools.pairwise(times)]
    usual = sorted(each)[len(each) // 2]
    # The first step updates every basis; later, one in ``every`` steps does.
    every = option(config, "refresh_every")
    return usual + max(0.0, each[0] - usual) / (every if isinstance(every, int) else 50), evaluating


def _whole(config: TrainConfig, step: float, evaluating: float, data: Dataset) -> float:
    examples: Mapping[str, int] = {name: len(split.y) for name, split in data.splits.items()}
    train = min(examples["train"], config.limit or examples["train"])
    steps: int = train // given(config.batch_size)
    seen = sum(examples.values()) - examples["train"] + train
    epochs: int = given(config.epochs)
    return epochs * (steps * step + seen * evaluating) + seen * evaluating
