"""The H200's race, shipped with the package: the auto-encoder's timed runs at batch 200, replayed in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError
from ekfac.lab.training.runs import Run, source_digest

FILE = "race.json"
BATCH = 200
DEFAULTS = "EKFAC (defaults)"
SHOWN = ("SGD + BN", "Adam + BN", "KFAC freq=50", "EKFAC-ra freq=50", DEFAULTS)
_KEPT = ("epoch", "step", "seconds", "train_loss", "diverged")


def extract(results: str | Path) -> dict[str, Any]:
    """Return the race, as it is stored, from recorded runs.

    Raises:
        LabError: If one of its runs is missing.
    """
    from ekfac.lab.show.evidence.record import Record

    best = Record(results).autoencoder(BATCH)
    runs = {}
    for name in SHOWN:
        timed = best[name].timed if name in best else None
        if timed is None:
            raise LabError(f"{results} has no timed run of {name} at batch {BATCH}")
        run = timed.runs[0]
        history = [{key: record[key] for key in _KEPT} for record in run.history]
        about = {key: run.about[key] for key in ("floor", "command")}
        about["machine"], about["versions"] = run.about["machine"]["gpu"], run.about["versions"]["torch"]
        about["source"] = run.about["versions"].get("source")
        runs[name] = {"config": run.config.to_dict(), "about": about, "history": history}
    return {"title": f"the paper's auto-encoder on full MNIST, batch {BATCH}, one H200, as recorded", "runs": runs}


def load() -> tuple[str, dict[str, Run]]:
    """Return the stored race: its title, and its runs by name."""
    data = json.loads(resources.files(__package__).joinpath(FILE).read_text("utf-8"))
    runs = {}
    for name, kept in data["runs"].items():
        about = {**kept["about"], "machine": {"gpu": kept["about"]["machine"]}}
        about["versions"] = {"torch": kept["about"]["versions"]}
        runs[name] = Run(TrainConfig.from_dict(kept["config"]), kept["history"], "finished", about)
    return str(data["title"]), runs


def older(runs: dict[str, Run]) -> str:
    """Return a note that a race's defaults may not be today's, if other sources made it; else nothing."""
    run = runs.get(DEFAULTS)
    if run is None or run.about.get("source") == source_digest():
        return ""
    return f"{DEFAULTS} is EKFAC(model) as it was when this was recorded; today's default may be another rule."


def replay(
    runs: dict[str, Run],
    on_epoch: Callable[[str, Run], None] = lambda name, run: None,
    seconds: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Run]:
    """Replay all epochs in the order in which they ended, at a speed at which the whole takes ``seconds``."""
    records = [(name, number, record) for name, run in runs.items() for number, record in enumerate(run.history)]
    events = sorted((record["seconds"], name, number) for name, number, record in records)
    longest, before = events[-1][0], 0.0
    for when, name, number in events:
        sleep((when - before) / longest * seconds)
        before = when
        run = runs[name]
        on_epoch(name, Run(run.config, run.history[: number + 1], "unfinished", run.about))
    return runs
