"""Processes that train in parallel, each one setting at a time up to a requested number of epochs."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.config import DTYPES, TrainConfig
from ekfac.lab.data.datasets import Dataset, load_dataset
from ekfac.lab.registry import loaded_plugins
from ekfac.lab.search.plan import start_worker
from ekfac.lab.training.run import Progress, train
from ekfac.lab.training.runs import RunFolder
from ekfac.lab.training.trainer import given


class _Deadline(Progress):
    """Ends a run when time is up, even within an epoch."""

    def __init__(self, when: float) -> None:
        self.when = when

    def step(self, step: int, steps: int) -> None:
        if time.time() > self.when:
            raise TimeoutError


_loaded: dict[tuple[str, str, torch.dtype], Dataset] = {}
# Cached records of untrained networks: evaluating them again for every setting would double the cost of an epoch.
_untrained: dict[tuple[Any, ...], dict[str, Any]] = {}


def dataset_on(config: TrainConfig, data_dir: str | Path | None) -> Dataset:
    """Load a run's dataset to its device; it is cached there for the next run of this process."""
    place = (given(config.dataset), config.device, DTYPES[config.dtype])
    if place not in _loaded:
        _loaded[place] = load_dataset(place[0], data_dir).to(torch.device(place[1]), place[2])
    return _loaded[place]


def advance(config: TrainConfig, folder: Path, data_dir: str | Path | None, end: float) -> str:
    """Train a setting up to the requested number of epochs; return how that went.

    An interrupted run keeps its whole epochs, and continues from the end of the stage before.
    """
    if time.time() > end:
        return "no time left"
    again = RunFolder(folder).checkpoint_file.exists()
    start = (config.task, config.dataset, config.width, config.limit, config.batch_norm, config.dtype, config.seed)
    try:
        run = train(
            config,
            folder,
            initial=_untrained.get(start),
            resume=again,
            overwrite=folder.exists() and not again,
            checkpoints="last",
            progress=_Deadline(end),
            data=dataset_on(config, data_dir),
        )
    except TimeoutError:
        return "cut"
    finally:
        if config.device.startswith("cuda"):  # free cached memory for other processes
            gc.collect()
            torch.cuda.empty_cache()
    _untrained[start] = run.history[0]
    return run.status


class Workers:
    """Processes that each run one setting at a time; a failed one is restarted while the others continue."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._context = multiprocessing.get_context("spawn")
        self._pools: dict[int, concurrent.futures.ProcessPoolExecutor] = {}

    def submit(self, worker: int, *job: Any) -> concurrent.futures.Future[str]:
        """Submit a job to a worker."""
        if worker not in self._pools:
            arguments = (self.number, loaded_plugins())
            self._pools[worker] = concurrent.futures.ProcessPoolExecutor(1, self._context, start_worker, arguments)
        return self._pools[worker].submit(advance, *job)

    def restart(self, worker: int) -> None:
        """End a worker; a new one replaces it at the next job."""
        self._pools.pop(worker).shutdown(wait=False, cancel_futures=True)

    def close(self, at_once: bool) -> None:
        """End all workers, interrupting their runs if it must be ``at_once``."""
        if at_once:
            for process in multiprocessing.active_children():
                process.terminate()
        for pool in self._pools.values():
            pool.shutdown(wait=not at_once, cancel_futures=True)
