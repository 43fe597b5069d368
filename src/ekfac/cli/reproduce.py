"""The command ``ekfac reproduce``: a plan with its cost, the runs, the figure, the verdict; resumable."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ekfac.lab.boundary import interruptible
from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError
from ekfac.lab.reproduce import reproduce as reproduce_for
from ekfac.lab.search.plan import Outcome, run_all, tell
from ekfac.lab.show import display
from ekfac.lab.show.duration import duration, parse_duration
from ekfac.lab.training import paces
from ekfac.lab.training.gather import find_runs, had_the_machine
from ekfac.lab.training.runs import Run

if TYPE_CHECKING:
    from ekfac.lab.show.reproduce import Result

_NAME = typer.Argument(None, help="A figure or table: ekfac reproduce --list names them.")


def reproduce(
    name: str | None = _NAME,
    budget: str | None = typer.Option(None, help="Time for all of it: 10min, 2h, 3d."),
    level: str | None = typer.Option(None, help="full, grid, known or quick [default: known, or what fits --budget]."),
    plan_only: bool = typer.Option(False, "--plan", help="Say what it would do and cost, and stop."),
    every: bool = typer.Option(False, "--list", help="List what can be reproduced."),
    workers: int = typer.Option(1, help="Runs at a time; what a step costs alone is timed before."),
    out: str | None = typer.Option(None, help="Folder of runs, figure and verdict [default: runs/reproduce-NAME]."),
    judge: bool = typer.Option(False, "--judge", help="Run nothing: draw and judge the runs that are in --out."),
    again: bool = typer.Option(False, "--again", help="Make a new plan instead of going on; finished runs are kept."),
    data_dir: str | None = typer.Option(None, help="Folder of the data files."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON and nothing else."),
) -> None:
    """Reproduce a figure of the paper or one of our tables, from the runs to a verdict; run it again to resume."""
    try:
        from ekfac.lab.show.reproduce import EXPERIMENTS, finish, make_plan, steps
    except ImportError as error:
        raise LabError(f"this command needs {error.name}: pip install 'ekfac[lab]'") from None
    if every or name is None:
        entries = {known: EXPERIMENTS.get(known) for known in EXPERIMENTS}
        if json:
            display.show_json({n: {"where": e.where, "levels": list(e.levels)} for n, e in entries.items()})
            return
        for known, entry in entries.items():
            print(f"{known:24}{entry.where:24}{', '.join(entry.levels) or 'computed'}")
        return
    EXPERIMENTS.get(name)
    seconds = None if budget is None else parse_duration(budget)
    if workers < 1:
        raise LabError(f"workers must be at least 1, not {workers}")
    folder = Path(out or f"runs/reproduce-{name}")

    def say(line: str) -> None:
        if not json:
            print(line, flush=True)

    if judge:
        runs = find_runs([folder])
        spent = sum(run.history[-1]["seconds"] for run in runs if run.history)
        there = steps.Plan(name, "recorded", tuple(run.config for run in runs), spent, "")
        _tell(finish(there, runs, folder, data_dir, say), json)
        return
    plan = None if again or plan_only else steps.kept(name, folder)
    if plan is not None and plan.level == "search" and seconds is not None:
        plan = None  # a search continues with the time given now
    if plan is None:
        plan = make_plan(name, level=level, budget=seconds, data_dir=data_dir, say=say)
    else:
        say(f"resuming the plan in {folder} (--again makes a new one)")
    say(plan.text())
    if plan_only:
        if json:
            planned = {"name": plan.name, "level": plan.level, "runs": len(plan.configs), "seconds": plan.seconds}
            display.show_json(planned)
        return
    with interruptible(f"completed work is kept in {folder}; run the same command to resume"):
        steps.keep(plan, folder)
        if plan.level == "search":
            runs, _ = reproduce_for([name], folder, plan.seconds, workers=workers, data_dir=data_dir, say=say)
        else:
            runs = _run(plan.configs, folder, workers, data_dir, say)
        result = finish(plan, runs, folder, data_dir, say)
    _tell(result, json)


def _tell(result: Result, json: bool) -> None:
    """Print the result."""
    if json:
        display.show_json(result.to_dict())
        return
    print(f"figure: {', '.join(map(str, result.files))}")
    for part in result.lacks:
        print(f"  missing: {part}")
    for claim, verdict, numbers in result.verdicts:
        print(f"{claim}: {verdict}\n  {numbers}" if numbers else f"{claim}: {verdict}")
    if result.plan.level in ("short", "quick"):
        print("With fewer epochs or smaller networks than the paper's, this verdict is a first look, not the paper's.")


def _run(
    configs: Sequence[TrainConfig], folder: Path, workers: int, data_dir: str | None, say: Callable[[str], None]
) -> list[Run]:
    """Make the missing runs, printing one line each; existing runs are only read.

    Parallel runs share the machine, so a few steps of each kind are timed alone beforehand.
    """
    done: list[Run] = []
    if workers > 1:
        paces.measure_all(configs, folder, data_dir, say=say)
    started = time.monotonic()
    free = shutil.disk_usage(folder).free
    if configs and free < 2**28:
        raise LabError(f"{folder} has {free >> 20} MiB of disk left, too little for runs and their checkpoints")

    def on_outcome(outcome: Outcome) -> None:
        if outcome.run is None:
            raise LabError(f"a run failed: {(outcome.error or '').splitlines()[0]}")
        outcome.run.timed = had_the_machine(outcome.run)
        done.append(outcome.run)
        spent = time.monotonic() - started
        left = spent / len(done) * (len(configs) - len(done))
        say(f"{tell(outcome, len(done), len(configs))}; {duration(spent)} so far, about {duration(left)} left")

    run_all(configs, folder / "runs", workers=workers, data_dir=data_dir, on_outcome=on_outcome)
    paces.apply_all(done)
    return done


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        epilog="Examples:\n\n`ekfac reproduce --list`\n\n"
        "`ekfac reproduce autoencoder --budget 10min --data-dir data`\n\n"
        "`ekfac reproduce frequency --level quick`\n\n`ekfac reproduce vgg11 --plan`"
    )(reproduce)
