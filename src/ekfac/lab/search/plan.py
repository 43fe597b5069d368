"""``python -m ekfac.lab.search.plan FILE --out DIR``: runs a list of settings with only torch and numpy.

The list is a JSON array of settings, each an object with the fields of ``TrainConfig``; ``ekfac sweep --write-plan``
writes one. Every run gets its own folder under DIR; finished runs are not repeated, and interrupted ones resume from
their checkpoint. ``ekfac sweep --take-in DIR`` adds the results to a study.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ekfac import sealed
from ekfac.lab.boundary import CommandParser, Stopped, outermost, plainly, resumable, stoppable, writing
from ekfac.lab.config import TrainConfig
from ekfac.lab.data import padded  # noqa: F401  (registers a dataset)
from ekfac.lab.labels import key
from ekfac.lab.registry import LabError, load_plugin, loaded_plugins
from ekfac.lab.search.space import unique
from ekfac.lab.training.run import Progress, train
from ekfac.lab.training.runs import PROCESSES, Run, load_run


def write_plan(configs: Sequence[TrainConfig], file: str | Path) -> None:
    """Write settings as JSON for another machine, without the device, which is chosen there."""
    rows = [{name: value for name, value in c.to_dict().items() if name != "device"} for c in configs]
    sealed.write(file, ("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n").encode())


def read_plan(file: str | Path) -> list[TrainConfig]:
    """Read settings that :func:`write_plan`, or a user, wrote.

    Raises:
        LabError: If the file cannot be read, a setting is wrong, or it names a plugin that is not loaded.
    """
    try:
        rows = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LabError(f"plan {file} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise LabError(f"plan {file} must be a JSON list of settings, each an object")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(TrainConfig.from_dict(row).resolved())
        except LabError as error:
            raise LabError(f"plan {file}, setting {number + 1}: {error}") from error
    return unique(found)


def run_one(
    config: TrainConfig, out: str | Path, data_dir: str | Path | None = None, progress: Progress | None = None
) -> Run:
    """Run one setting in its own folder under ``out``; a finished run is only read.

    The checkpoint is removed at the end of the run, as those of a search would fill the disk.
    """
    config = config.resolved()
    folder = Path(out) / key(config)
    if (folder / "config.json").exists():
        run = load_run(folder)
        if run.status in ("finished", "diverged"):
            return run
    run = train(config, folder, data_dir=data_dir, resume=True, progress=progress)
    if run.status in ("finished", "diverged"):
        (folder / "checkpoint.pt").unlink(missing_ok=True)
    return run


@dataclass(frozen=True)
class Outcome:
    """How one setting of a list ended: with a run, or with an error."""

    config: TrainConfig
    run: Run | None
    error: str | None = None


Outcomes = Generator[tuple[int, Outcome], None, None]


def run_all(
    configs: Sequence[TrainConfig],
    out: str | Path,
    *,
    workers: int = 1,
    devices: Sequence[str] = (),
    data_dir: str | Path | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run settings one after another, or several at a time, each in its folder under ``out``.

    Args:
        configs: The settings.
        out: The folder of all runs.
        workers: The number of processes, which share the cores.
        devices: Devices that the workers use in turn; if empty, the settings' own.
        data_dir: Folder of the data files.
        on_outcome: Called in this process after each run.

    Returns:
        Their outcomes, in the order of the settings.

    Raises:
        LabError: If ``workers`` is wrong, or a worker died.
        OSError: If ``out`` cannot be created.
    """
    if workers < 1:
        raise LabError(f"workers must be at least 1, not {workers}")
    Path(out).mkdir(parents=True, exist_ok=True)
    jobs = [replace(c, device=devices[n % len(devices)]) if devices else c for n, c in enumerate(configs)]
    found: dict[int, Outcome] = {}
    iterator = _serial(jobs, out, data_dir) if workers == 1 else _parallel(jobs, out, data_dir, workers)
    with contextlib.closing(iterator):
        for number, outcome in iterator:
            found[number] = outcome
            on_outcome(outcome)
            if outcome.run is not None and outcome.run.status == "interrupted":
                raise stop_of(outcome.run)
    return [found[number] for number in range(len(jobs))]


def stop_of(run: Run) -> KeyboardInterrupt:
    """Return the exception that interrupted a run, to be raised again."""
    return KeyboardInterrupt() if run.stopped_by is None else Stopped(run.stopped_by)


def _serial(jobs: Sequence[TrainConfig], out: str | Path, data_dir: str | Path | None) -> Outcomes:
    for number, config in enumerate(jobs):
        yield number, _attempt(config, out, data_dir)


def _parallel(jobs: Sequence[TrainConfig], out: str | Path, data_dir: str | Path | None, workers: int) -> Outcomes:
    with worker_pool(workers) as pool:
        futures = {pool.submit(_attempt, job, out, data_dir): number for number, job in enumerate(jobs)}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise LabError("a worker process died; run the same command to resume") from None


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Start processes that share the cores, and end them with the block.

    They end immediately if this process is killed, or the block is left by an error or Ctrl-C, which they leave to this
    process. Interrupted runs can resume from their checkpoints.
    """
    # Spawned, not forked: CUDA and OpenMP do not survive a fork.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    with concurrent.futures.ProcessPoolExecutor(workers, context, start_worker, (workers, loaded_plugins())) as pool:
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def start_worker(workers: int, plugins: Sequence[str]) -> None:
    """Set up a worker process: it leaves Ctrl-C to its parent, ends with it, and uses its share of the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.formatwarning = plainly
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_cores(workers)
    for plugin in plugins:
        load_plugin(plugin)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # An exception would not do: the main thread may be in the middle of an epoch, or waiting for a job.
        os._exit(1)


def share_cores(workers: int) -> None:
    """Limit this process to its share of the cores, and mark its runs as sharing the machine."""
    os.environ[PROCESSES] = str(workers)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _attempt(config: TrainConfig, out: str | Path, data_dir: str | Path | None) -> Outcome:
    try:
        return Outcome(config, run_one(config, out, data_dir))
    except Exception as error:
        # A failing setting (out of memory, for example) must not stop the others.
        return Outcome(config, None, f"{type(error).__name__}: {error}")


def tell(outcome: Outcome, done: int, total: int) -> str:
    """Describe in one line how a setting ended."""
    name = f"{done:>4} of {total}  {key(outcome.config)}"
    if outcome.run is None:
        return f"{name}  failed: {(outcome.error or '').splitlines()[0]}"
    loss = outcome.run.history[-1]["train_loss"] if outcome.run.history else None
    return f"{name}  {outcome.run.status}" + (f", training loss {loss:.4g}" if loss is not None else "")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parse = CommandParser(prog="python -m ekfac.lab.search.plan", description=__doc__, allow_abbrev=False)
    parse.add_argument("plan", help="JSON list of settings")
    parse.add_argument("--out", required=True, help="folder that gets a folder for each run")
    parse.add_argument("--workers", type=int, default=1, help="processes that run settings at the same time")
    parse.add_argument("--devices", default="", help="devices that the workers take in turn: cuda:0,cuda:1")
    parse.add_argument("--data-dir", help="folder of the data files")
    parse.add_argument(
        "--plugin", action="append", default=[], help="your file or module that the plan's settings need"
    )
    return parse


@resumable
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a plan; return 0, 1 if a setting failed, 2 for bad usage, 130 on Ctrl-C, 143 on TERM, 129 on HUP."""
    outcomes: list[Outcome] = []
    values: dict[str, Any] = vars(parser().parse_args(arguments))
    for plugin in values["plugin"]:
        load_plugin(plugin)
    configs = read_plan(values["plan"])

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(tell(outcome, len(outcomes), len(configs)), flush=True)

    with writing(values), stoppable():
        run_all(
            configs,
            values["out"],
            workers=values["workers"],
            devices=[name for name in values["devices"].split(",") if name],
            data_dir=values["data_dir"],
            on_outcome=on_outcome,
        )
    return int(any(outcome.run is None for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(outermost(main))
