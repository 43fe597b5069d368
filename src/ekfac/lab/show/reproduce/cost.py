"""What runs will cost on this machine: a few steps of each kind are timed, and carried on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Dataset, load_dataset
from ekfac.lab.labels import option
from ekfac.lab.registry import LabError
from ekfac.lab.training.trainer import Trainer, given

STEPS = 6


def kind(config: TrainConfig) -> tuple[Any, ...]:
    """Return what the price of a step depends on."""
    return (
        config.task,
        config.optimizer,
        config.batch_norm,
        config.width,
        config.batch_size,
        config.dataset,
        config.dtype,
        config.sua,
        option(config, "refresh_every"),
    )


def seconds_of(
    configs: Sequence[TrainConfig],
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[float]:
    """Return about how many seconds each run takes here, evaluation included.

    Args:
        configs: The runs, resolved.
        data_dir: Folder of the data files.
        say: Is told which kind is timed.

    Raises:
        LabError: If the data are not here.
    """
    data: dict[str, Dataset] = {}
    found: dict[tuple[Any, ...], tuple[float, float]] = {}
    total = len({kind(config) for config in configs})
    for config in configs:
        if kind(config) not in found:
            name = given(config.dataset)
            if name not in data:
                data[name] = load_dataset(name, data_dir)
            say(f"timing a few steps, {len(found) + 1} of {total}: {config.task} by {config.optimizer}")
            found[kind(config)] = _probe(config, data[name])
    return [_whole(config, *found[kind(config)], data[given(config.dataset)]) for config in configs]


def _probe(config: TrainConfig, data: Dataset) -> tuple[float, float]:
    """Return the seconds of a step, renewals spread over all, and of evaluating one example."""
    size = given(config.batch_size)
    few = min(len(data.train.x) // size, STEPS)
    if few < 1:
        raise LabError(f"batch_size {size} is more than the {len(data.train.x)} training examples of {data.name}")
    trainer = Trainer(replace(config, limit=few * size, epochs=1), data)
    try:
        start = time.perf_counter()
        trainer.initial_record()
        evaluating = (time.perf_counter() - start) / sum(len(split.y) for split in trainer.data.splits.values())
        times = [time.perf_counter()]

        def on_step(step: int, steps: int) -> None:
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            times.append(time.perf_counter())

        trainer.train_epoch(on_step)
    finally:
        trainer.close()
    each = [after - before for before, after in itertools.pairwise(times)]
    usual = sorted(each)[len(each) // 2]
    # The first step renews every basis; later it does so once in so many.
    every = option(config, "refresh_every")
    return usual + max(0.0, each[0] - usual) / (every if isinstance(every, int) else 50), evaluating


def _whole(config: TrainConfig, step: float, evaluating: float, data: Dataset) -> float:
    examples: Mapping[str, int] = {name: len(split.y) for name, split in data.splits.items()}
    train = min(examples["train"], config.limit or examples["train"])
    steps: int = train // given(config.batch_size)
    seen = sum(examples.values()) - examples["train"] + train
    epochs: int = given(config.epochs)
    return epochs * (steps * step + seen * evaluating) + seen * evaluating
