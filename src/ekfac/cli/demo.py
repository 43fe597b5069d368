"""The command ``ekfac demo``: optimizers side by side on real data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

import typer
from rich.console import Console

from ekfac.cli.show import demo_report
from ekfac.lab.boundary import interruptible
from ekfac.lab.registry import LabError
from ekfac.lab.show import demo as lab_demo
from ekfac.lab.show import display, replay
from ekfac.lab.training.runs import Run

_OUT = typer.Option(None, "--out", help="Folder to record into.")
_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")


def demo(
    race: str = typer.Option(lab_demo.FIRST, help=f"One of: {', '.join(lab_demo.RACES)}."),
    recorded: bool = typer.Option(False, "--recorded", help="Replay the race that an H200 ran on full MNIST."),
    seconds: float | None = typer.Option(None, help="Training time for each optimizer; of a replay, for all of it."),
    batch_size: int | None = typer.Option(None, help="Examples a step [default: the race's]."),
    width: int | None = typer.Option(None, help="Width of the network [default: the race's]."),
    batch_norm: bool = typer.Option(False, "--batch-norm", help="Let Adam with batch-norm take part too."),
    seed: int = typer.Option(0, help="Seed of all of them."),
    out: str | None = _OUT,
    data_dir: str | None = _DATA_DIR,
    json: bool = _JSON,
) -> None:
    """Train one network with several optimizers, and compare them after equal steps and equal time."""
    if race not in lab_demo.RACES:
        raise LabError(f"unknown race {race!r}; known: {', '.join(lab_demo.RACES)}")
    if seconds is not None and not seconds > 0:
        raise LabError(f"seconds must be positive, not {seconds}")
    console = Console()
    if recorded:
        title, run = _recorded(10.0 if seconds is None else seconds)
        settings = ""
    else:
        title, settings, run = _fresh(race, seconds, batch_size, width, batch_norm, seed, out, data_dir)
    wall, cpu = time.perf_counter(), time.process_time()
    with interruptible("nothing was written" if out is None else f"what each had done by then is recorded in {out}"):
        runs = run(lambda name, found: None) if json else display.run_demo(console, title, run)
    alone = not recorded and all(found.config.device == "cpu" for found in runs.values())
    busy = lab_demo.busy(time.perf_counter() - wall, time.process_time() - cpu) if alone else ""
    if json:
        result = {
            "verdict": asdict(lab_demo.verdict(runs)),
            "settings": settings,
            "busy": busy,
            "runs": {n: r.to_dict() for n, r in runs.items()},
        }
        display.show_json(result)
        return
    display.show_verdict(console, runs)
    if recorded:
        note = replay.older(runs)
        if note:
            console.print(note, highlight=False, markup=False)
        return
    console.print(settings, highlight=False, markup=False)
    if busy:
        console.print(busy, highlight=False, markup=False)
    if out is not None:
        console.print(f"recorded in {out}", soft_wrap=True)
    console.print(demo_report(list(runs.values()), out), soft_wrap=True, markup=False)
    console.print("next: ekfac demo --recorded replays the paper's auto-encoder on an H200", soft_wrap=True)


Runs = dict[str, Run]
Racing = Callable[[Callable[[str, Run], None]], Runs]


def _recorded(seconds: float) -> tuple[str, Racing]:
    title, runs = replay.load()
    return title, lambda on_epoch: replay.replay(runs, on_epoch, seconds)


def _fresh(
    race: str,
    seconds: float | None,
    batch_size: int | None,
    width: int | None,
    batch_norm: bool,
    seed: int,
    out: str | None,
    data_dir: str | None,
) -> tuple[str, str, Racing]:
    chosen = lab_demo.RACES[race]
    entrants = dict(chosen.entrants)
    if batch_norm and "Adam + BN" not in entrants:
        entrants["Adam + BN"] = replace(entrants["Adam"], batch_norm=True, lr=1e-2)
    changes = {name: value for name, value in (("batch_size", batch_size), ("width", width)) if value is not None}
    entrants = {name: replace(config, **changes) for name, config in entrants.items()}  # type: ignore[arg-type]
    title = chosen.title + "".join(f", {name.replace('_', ' ')} {value}" for name, value in changes.items())
    each = chosen.seconds if seconds is None else seconds

    def run(on_epoch: Callable[[str, Run], None]) -> Runs:
        return lab_demo.race(
            entrants, each, out=out, data_dir=data_dir, seed=seed, threads=chosen.threads, on_epoch=on_epoch
        )

    settings = lab_demo.what_was_set(entrants) + (f" {chosen.rates}" if chosen.rates and not changes else "")
    return title, settings, run


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        epilog="Examples:\n\n`ekfac demo`\n\n`ekfac demo --recorded`\n\n`ekfac demo --race autoencoder --out runs/demo`"
    )(demo)
