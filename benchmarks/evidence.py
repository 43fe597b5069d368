"""Runs the experiments behind docs/mnist.md and docs/comparison.md and records them in results/.

    python benchmarks/evidence.py mnist-search sensitivity --data-dir DATA --workers 16 --minutes 9
    python benchmarks/evidence.py mnist-seeds --data-dir DATA --workers 16
    python benchmarks/evidence.py mnist-finals --data-dir DATA

The parts of one call run side by side; those that end in "finals" are timed, so give them a call and the machine to
themselves. Seeds and finals take each method's best setting of the search that is recorded by then. What is recorded
already is not run again; what is not over when time is, or on Ctrl-C, is left out. `make figures` makes pages and
pictures of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.search.plan import worker_pool
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.run import Progress, train
from ekfac.lab.training.runs import load_run, source_digest

Job = tuple[str, TrainConfig]

EPOCHS, SEEDS, BATCHES = 20, range(5), (200, 500)
SEARCH_EPOCHS = 5
EVERY_STEP_EPOCHS = 3
AE: dict[str, Any] = {"task": "autoencoder", "dataset": "mnist"}


def grid(*lrs: float, dampings: Iterable[float]) -> list[tuple[float, float | None]]:
    """Return every pair."""
    return [(lr, damping) for lr in lrs for damping in dampings]


# Eight trials for each, of (lr, damping) where there is one, else of lr with and without batch-norm. The paper's
# methods on the paper's schedule: all bases solved for in full at every 50th step, statistics from every batch. With
# the pi correction KFAC does not leave the plateau of the mean image.
KFAC_50 = {"refresh_every": 50, "options": {"deterministic": True, "factor_every": 1, "pi_correction": False}}
EVERY_50 = {"refresh_every": 50}
TRIALS: list[tuple[dict[str, Any], list[tuple[float, float | None]]]] = [
    ({"optimizer": "sgd", "batch_norm": True}, [(lr, None) for lr in (3e-4, 1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 5e-2, 1e-1)]),
    *(
        ({"optimizer": name, "batch_norm": norm}, [(lr, None) for lr in (3e-4, 1e-3, 3e-3, 1e-2)])
        for name in ("adam", "adamw")
        for norm in (True, False)
    ),
    *(
        ({"optimizer": name, "batch_norm": norm}, [(lr, None) for lr in (1e-3, 3e-3, 1e-2, 3e-2)])
        for name in ("muon", "soap")
        for norm in (True, False)
    ),
    ({"optimizer": "kfac", **KFAC_50}, [*grid(0.1, 0.03, dampings=(0.1, 0.03, 0.01)), (0.3, 0.3), (0.01, 0.01)]),
    ({"optimizer": "ekfac", **EVERY_50}, [*grid(0.01, 0.003, dampings=(0.1, 0.03, 0.01)), (0.03, 0.1), (0.003, 0.003)]),
    (
        {"optimizer": "ekfac-ra", **EVERY_50},
        [*grid(0.01, 0.003, dampings=(1e-2, 3e-3, 1e-3)), (0.03, 1e-2), (0.03, 3e-3)],
    ),
]
# Around which the sensitivity to lr and damping is shown.
CENTRES: list[tuple[dict[str, Any], float, float | None]] = [
    ({"optimizer": "ekfac-default"}, 0.01, 1e-8),
    ({"optimizer": "ekfac-ra", **EVERY_50}, 0.01, 3e-3),
    ({"optimizer": "kfac", **KFAC_50}, 0.1, 0.1),
    ({"optimizer": "adam", "batch_norm": True}, 1e-3, None),
    ({"optimizer": "muon", "batch_norm": True}, 1e-2, None),
    ({"optimizer": "soap", "batch_norm": True}, 1e-2, None),
]
# Epochs of a search and of what follows it, and whether rivals get batch-norm.
COMPARED: dict[str, tuple[dict[str, Any], int, int, bool]] = {
    "classifier": ({"dataset": "mnist"}, 4, 20, False),
    "vgg11": ({"channels_last": True}, 3, 20, True),
    "resnet34": ({"channels_last": True, "dtype": "bfloat16"}, 2, 20, True),
    "charlm": ({}, 1, 5, False),
}
RIVALS = {
    "sgd": (1e-3, 3e-3, 1e-2, 3e-2, 5e-2, 1e-1, 3e-1, 1.0),
    "adamw": (3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2),
    "muon": (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2, 1e-1),
    "soap": (3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2),
}


def made(base: Mapping[str, Any], **more: Any) -> TrainConfig:
    """Return a setting."""
    return TrainConfig.from_dict({**base, **{name: value for name, value in more.items() if value is not None}})


def mnist_search(results: Path) -> Iterator[Job]:
    """Short runs of every method over a few settings."""
    for base, points in TRIALS:
        for lr, damping in points:
            yield "mnist/search", made({**AE, **base}, lr=lr, damping=damping, epochs=SEARCH_EPOCHS)


def mnist_best(results: Path, each_norm: bool = True) -> list[TrainConfig]:
    """The defaults, and every other method at its best of the search, with and without batch-norm or the better."""
    return [made(AE, optimizer="ekfac-default"), *best_of(results / "mnist" / "search", SEARCH_EPOCHS, each_norm)]


def mnist_final(results: Path, each_norm: bool = True) -> list[TrainConfig]:
    """Those for 20 epochs, and KFAC that inverts at every step for fewer."""
    best = mnist_best(results, each_norm)
    every = [replace(c, refresh_every=1, epochs=EVERY_STEP_EPOCHS) for c in best if c.optimizer == "kfac"]
    return [*(replace(c, epochs=EPOCHS) for c in best), *every]


def mnist_seeds(results: Path) -> Iterator[Job]:
    """All methods, five seeds."""
    for config in mnist_final(results):
        for batch in BATCHES:
            for seed in SEEDS:
                yield "mnist/seeds", replace(config, batch_size=batch, seed=seed)


def mnist_finals(results: Path) -> Iterator[Job]:
    """The same, one seed, timed; rivals with batch-norm or without, whichever was better."""
    for config in mnist_final(results, each_norm=False):
        for batch in BATCHES:
            yield "mnist/finals", replace(config, batch_size=batch)


def mnist_frequency(results: Path) -> Iterator[Job]:
    """How rarely the basis can be renewed; every step for fewer epochs."""
    for config in mnist_best(results):
        if config.optimizer in ("kfac", "ekfac", "ekfac-ra"):
            for every in (1, 50, 100, 500):
                epochs = EVERY_STEP_EPOCHS if every == 1 else EPOCHS
                yield "mnist/frequency", replace(config, refresh_every=every, epochs=epochs)


def mnist_frequency_finals(results: Path) -> Iterator[Job]:
    """The same, timed, but for what is among the other finals."""
    final = mnist_final(results)
    for place, config in mnist_frequency(results):
        if config not in final:
            yield f"{place}/finals", config


def sensitivity(results: Path) -> Iterator[Job]:
    """Learning rates and dampings around each centre."""
    for base, lr, damping in CENTRES:
        for by in (0.1, 1 / 3, 1, 3, 10):
            for factor in (None,) if damping is None else (0.01, 0.1, 1, 10, 100):
                yield (
                    "sensitivity",
                    made(
                        {**AE, **base, "batch_size": 500, "epochs": EPOCHS},
                        lr=float(f"{lr * by:.1g}"),
                        damping=None if damping is None or factor is None else float(f"{damping * factor:.3g}"),
                    ),
                )


def autoencoder_cosine(results: Path) -> Iterator[Job]:
    """The best setting known: the defaults under a cosine to zero."""
    for seed in SEEDS:
        yield "start/cosine", made(AE, optimizer="ekfac-default", cosine=True, epochs=EPOCHS, batch_size=200, seed=seed)


def vgg11_decay(results: Path) -> Iterator[Job]:
    """VGG11 under weight decay, beside SGD and Adam with batch-norm."""
    base = {"task": "vgg11", "channels_last": True, "epochs": EPOCHS}
    for seed in range(3):
        for decay in (2.0, 4.0, 6.0):
            yield "start/decay", made(base, optimizer="ekfac-default", options={"weight_decay": decay}, seed=seed)
        for name, lr in (("sgd", 1e-2), ("sgd", 3e-2), ("adam", 1e-3)):
            yield "start/decay", made(base, optimizer=name, lr=lr, batch_norm=True, seed=seed)


def compared_search(task: str) -> Callable[[Path], Iterator[Job]]:
    """Eight learning rates of each rival on a task, for a few epochs."""

    def jobs(results: Path) -> Iterator[Job]:
        base, epochs, _, norm = COMPARED[task]
        for name, lrs in RIVALS.items():
            for lr in lrs:
                config = made({"task": task, **base}, optimizer=name, lr=lr, batch_norm=norm, epochs=epochs)
                yield f"comparison/{task}/search", config

    return jobs


def compared(task: str, place: str, seeds: Iterable[int]) -> Callable[[Path], Iterator[Job]]:
    """The defaults and each rival at its best of the search."""

    def jobs(results: Path) -> Iterator[Job]:
        base, searched, epochs, _ = COMPARED[task]
        best = best_of(results / "comparison" / task / "search", searched)
        for config in [made({"task": task, **base}, optimizer="ekfac-default"), *best]:
            for seed in seeds:
                yield f"comparison/{task}/{place}", replace(config, epochs=epochs, seed=seed)

    return jobs


PARTS: dict[str, Callable[[Path], Iterator[Job]]] = {
    "mnist-search": mnist_search,
    "mnist-seeds": mnist_seeds,
    "mnist-finals": mnist_finals,
    "mnist-frequency": mnist_frequency,
    "mnist-frequency-finals": mnist_frequency_finals,
    "sensitivity": sensitivity,
    "autoencoder-cosine": autoencoder_cosine,
    "vgg11-decay": vgg11_decay,
    **{f"{task}-search": compared_search(task) for task in COMPARED},
    **{f"{task}-seeds": compared(task, "seeds", range(3)) for task in COMPARED},
    **{f"{task}-finals": compared(task, "finals", (0,)) for task in COMPARED},
}


def best_of(folder: Path, epochs: int, each_norm: bool = True) -> list[TrainConfig]:
    """Return each method's setting with the lowest training loss of a recorded search, for whatever device there is.

    Args:
        folder: The search.
        epochs: How long its runs are; others in the folder are left out.
        each_norm: Whether a method with batch-norm and the same without are two.
    """
    found: dict[tuple[str, bool], tuple[float, TrainConfig]] = {}
    if not folder.is_dir():
        raise SystemExit(f"{folder} holds no search yet: run it first")
    for run in find_runs([folder]):
        config = run.config
        if run.status != "finished" or config.epochs != epochs or config.optimizer == "ekfac-default":
            continue
        method = (config.optimizer, each_norm and config.batch_norm)
        loss = run.history[-1]["train_loss_mean"]
        if method not in found or loss < found[method][0]:
            found[method] = loss, config
    return [replace(config, device="auto") for _, config in found.values()]


class Deadline(Progress):
    """Ends a run when time is over."""

    def __init__(self, when: float) -> None:
        self.when = when

    def epoch(self, record: Mapping[str, Any]) -> None:
        if time.time() > self.when:
            raise TimeoutError


def run(job: Job, results: Path, data_dir: str | None, end: float, again: bool = False) -> str:
    """Run one job in a folder of its own; return a line on how it went.

    Args:
        job: The folder and the setting.
        results: What the folder is in.
        data_dir: Folder of the data files.
        end: Nothing goes on later than this.
        again: Replace a run that other sources of the library made.
    """
    place, config = job
    folder = results / place / key(config)
    line = f"{place}/{folder.name}"
    there = load_run(folder) if (folder / "config.json").exists() else None
    if there is not None and there.status == "unfinished":
        there = None  # cut by a kill
    if there is not None and not (again and there.about["versions"].get("source") != source_digest()):
        return f"{line}: there already"
    timed = folder.parent.with_name("finals") / folder.name
    if folder.parent.name == "seeds" and (timed / "config.json").exists() and load_run(timed).status == "finished":
        if again and load_run(timed).about["versions"].get("source") != source_digest():
            return f"{line}: timed by other sources, run the finals again first"
        return f"{line}: there already, timed"
    if time.time() > end:
        return f"{line}: no time left"
    try:
        done = train(config, folder, data_dir=data_dir, overwrite=True, checkpoints=False, progress=Deadline(end))
    except TimeoutError:
        shutil.rmtree(folder)
        return f"{line}: cut short, left out"
    except Exception as error:
        # One setting that fails, for lack of memory say, must not end the others.
        shutil.rmtree(folder, ignore_errors=True)
        return f"{line}: {type(error).__name__}: {error}".splitlines()[0]
    for file in folder.iterdir():
        if file.name not in ("config.json", "metrics.jsonl"):
            file.unlink()
    loss = load_run(folder).history[-1]["train_loss_mean"]
    return f"{line}: {done.status}" + (f", {loss:.4g}" if loss is not None else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data-dir", help="folder of the data files")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; one where runs are timed")
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing later, and cut what is not over")
    parser.add_argument("--again", nargs="*", default=[], metavar="OPTIMIZER", help="replace what older sources made")
    parser.add_argument("--only", nargs="*", metavar="OPTIMIZER", help="leave all others out")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="for tries: width=8 epochs=1")
    args = parser.parse_args()
    if args.workers > 1 and any(part.endswith("finals") for part in args.parts):
        parser.error("finals are timed: --workers 1")
    words = (word.partition("=") for word in args.set)
    changes = {name: int(value) if value.isdigit() else value for name, _, value in words}
    end = time.time() + 60 * args.minutes
    jobs: dict[str, Job] = {}
    for part in args.parts:
        for place, config in PARTS[part](args.results):
            config = replace(config, **changes).resolved()
            if args.only is None or config.optimizer in args.only:
                jobs[f"{place}/{key(config)}"] = (place, config)
    # Both end the workers first, in the pool.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with worker_pool(args.workers) as pool:
            tasks = [
                pool.submit(run, job, args.results, args.data_dir, end, job[1].optimizer in args.again)
                for job in jobs.values()
            ]
            for done, task in enumerate(concurrent.futures.as_completed(tasks), 1):
                print(f"{done:>4} of {len(tasks)}  {task.result()}", flush=True)
    except KeyboardInterrupt:
        remove_cut(args.results / name for name in jobs)
        print("interrupted; the same command goes on with what is not recorded yet", file=sys.stderr)
        return 130
    return 0


def remove_cut(folders: Iterable[Path]) -> None:
    """Remove runs that are not over."""
    for folder in folders:
        if (folder / "config.json").exists() and load_run(folder).status == "unfinished":
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
