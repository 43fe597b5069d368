"""The commands' terminal displays, with rich."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from ekfac.lab.show import demo
from ekfac.lab.show.chart import chart
from ekfac.lab.train import COLUMNS, PlainProgress, cells, closing, floors, headline
from ekfac.lab.training.run import Progress
from ekfac.lab.training.runs import Run


class LiveProgress(Progress):
    """One line per epoch, and below them a progress bar of the current one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("epoch 1", total=None)
        self._epochs = 0
        self._floors: Mapping[str, float] = {}

    def start(self, run: Run) -> None:
        """Print what is trained, and show the bar."""
        self._epochs, self._floors = run.config.epochs or 0, floors(run)
        self.console.print(headline(run), highlight=False)
        self.console.print("".join(f"{name:>12}" for name in COLUMNS), style="bold", soft_wrap=True)
        self._bar.start()
        for record in run.history:
            self.epoch(record)

    def step(self, step: int, steps: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, total=steps)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Print the epoch's line."""
        line = "".join(f"{cell:>12}" for cell in cells(record, self._floors))
        self._bar.console.print(line, highlight=False, soft_wrap=True)
        following = min(record["epoch"] + 1, self._epochs)
        self._bar.reset(self._task, description=f"epoch {following} of {self._epochs}")

    def end(self, run: Run) -> None:
        """Remove the bar and print how the run ended."""
        self._bar.stop()
        self.console.print(closing(run), style="bold red" if run.status == "diverged" else "bold", soft_wrap=True)


def progress(console: Console) -> Progress:
    """Return a live display in a terminal, else plain lines."""
    return LiveProgress(console) if console.is_terminal else PlainProgress()


def run_demo(
    console: Console, title: str, race: Callable[[Callable[[str, Run], None]], dict[str, Run]]
) -> dict[str, Run]:
    """Show a race as a chart and a table that are updated after every epoch."""
    runs: dict[str, Run] = {}
    with Live(_standing(runs, title, console), console=console, refresh_per_second=8, transient=True) as live:

        def on_epoch(name: str, run: Run) -> None:
            runs[name] = run
            live.update(_standing(runs, title, console))
            if not console.is_terminal:
                _say(console, name, run)

        return race(on_epoch)


def _say(console: Console, name: str, run: Run) -> None:
    """Print a line at every tenth epoch, where the display cannot be redrawn."""
    last = run.history[-1]
    if last["epoch"] % 10 == 0 or run.status != "unfinished":
        loss = demo.points(run, "step")
        where = f"epoch {last['epoch']:>3}, step {last['step']:>5}, {last['seconds']:6.1f} s"
        above = " above the floor" if floors(run) else ""
        console.print(f"{name:<16} {where}: {loss[-1][1] if loss else float('nan'):8.4g}{above}")


def _loss_name(runs: Mapping[str, Run]) -> str:
    return "training loss" + (" above its floor" if any(floors(run) for run in runs.values()) else "")


def _standing(runs: Mapping[str, Run], title: str, console: Console) -> RenderableType:
    """Return the chart over time so far, and below it the current standing."""
    table = Table(title=title, title_justify="left")
    for name in ("optimizer", "epoch", "step", "seconds", "loss"):
        table.add_column(name, justify="left" if name == "optimizer" else "right")
    for name, run in runs.items():
        last, curve = run.history[-1], demo.points(run, "step")
        loss = f"{curve[-1][1]:.4g}" if curve and not last["diverged"] else "diverged"
        table.add_row(name, str(last["epoch"]), str(last["step"]), f"{last['seconds']:.1f}", loss)
    curves = {name: demo.points(run, "seconds") for name, run in runs.items()}
    if console.height < len(runs) + 20 or not any(len(points) > 1 for points in curves.values()):
        return table
    rows = min(16, console.height - len(runs) - 12)
    drawn = chart(curves, "seconds of training", _loss_name(runs), max(30, min(100, console.width - 12)), rows)
    return Group(Text(drawn), table)


def show_verdict(console: Console, runs: Mapping[str, Run]) -> None:
    """Print two charts, the table and the summary of the ranking."""
    result = demo.verdict(runs)
    for x, label in (("step", "steps"), ("seconds", "seconds of training")):
        curves = {name: demo.points(run, x) for name, run in runs.items()}
        console.print()
        text = chart(curves, label, _loss_name(runs), max(30, min(72, console.width - 12)))
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    table = Table(title="which optimizer is ahead (1 is best)", title_justify="left")
    table.add_column("optimizer", no_wrap=True)
    for name in (
        f"loss after {result.steps} steps",
        "place",
        f"loss after {result.seconds:.3g} s",
        "place",
        "ms a step",
    ):
        table.add_column(name, justify="right")
    for s in sorted(result.standings, key=lambda s: s.place_by_step or 99):
        by_step = ["diverged", "-"] if s.loss_by_step is None else [f"{s.loss_by_step:.4g}", str(s.place_by_step)]
        by_time = ["diverged", "-"] if s.loss_by_time is None else [f"{s.loss_by_time:.4g}", str(s.place_by_time)]
        table.add_row(s.name, *by_step, *by_time, f"{s.milliseconds:.3g}")
    console.print()
    console.print(table)
    console.print(demo.sentence(result), highlight=False, soft_wrap=True)


def show_json(data: Any) -> None:
    """Print data as one JSON object."""
    print(json.dumps(data, allow_nan=False))
