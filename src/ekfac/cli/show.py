"""The commands ``ekfac figure``, ``ekfac report`` and ``ekfac watch``: parse, call the lab, print."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from ekfac.lab.boundary import interruptible
from ekfac.lab.labels import counted
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.show import display
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.runs import Run

FIGURE_NAMES = (
    "rescaling, convolution, correlation, error, autoencoder, frequency, vgg11, resnet34, batch-size, schedule, "
    "sensitivity, comparison"
)
_NAMES = typer.Argument(metavar="NAME...", help=f"One or more of: {FIGURE_NAMES}; or all.")
_RUNS = typer.Option([], "--runs", help="Folder of recorded runs, at any depth; may be repeated.")
_TIMED = typer.Option(
    [], "--timed", help="Use only the times of runs in this folder; may be repeated [default: folders named finals]."
)
_PLACES = typer.Argument(metavar="RUNS...", help="Folders of recorded runs, at any depth.")
_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")
_PLUGIN = typer.Option([], "--plugin", help="Your file or module that registers tasks, datasets or optimizers.")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")


def needs(error: ImportError) -> LabError:
    """Return an error that names the missing package."""
    return LabError(f"this command needs {error.name}: pip install 'ekfac[lab]'")


def measured_beside(places: Sequence[str]) -> list[Path]:
    """Return the files of stored measurements, in the folders of runs or next to them."""
    folders = dict.fromkeys(folder for place in map(Path, places) for folder in (place, place.resolve().parent))
    return [file for folder in folders if (file := folder / "measures.json").is_file()]


def figure(
    names: list[str] = _NAMES,
    runs: list[str] = _RUNS,
    timed: list[str] = _TIMED,
    batch_size: int | None = typer.Option(None, help="Take only runs of this batch size; their file is NAME-SIZE."),
    quick: bool = typer.Option(False, "--quick", help="From small fresh runs on the embedded digits: minutes."),
    out: str = typer.Option("figures", help="Folder for the SVG and PNG files."),
    dataset: str = typer.Option("mnist-5k", help="Dataset of the figures that need no runs."),
    workers: int = typer.Option(os.cpu_count() or 1, help="Small runs at the same time.", show_default="cores"),
    measures: str | None = typer.Option(
        None, help="JSON file that stores what is measured, and is used instead of measuring again."
    ),
    data_dir: str | None = _DATA_DIR,
    plugin: list[str] = _PLUGIN,
    json: bool = _JSON,
) -> None:
    """Draw the paper's figures, from recorded runs or from small new ones; some need no runs."""
    try:
        from ekfac.lab.show import figures
    except ImportError as error:
        raise needs(error) from None
    for where in plugin:
        load_plugin(where)
    if workers < 1:
        raise LabError(f"workers must be at least 1, not {workers}")
    if batch_size is not None and batch_size < 1:
        raise LabError(f"batch_size must be at least 1, not {batch_size}")
    found = find_runs(runs, timed=timed or None) if runs else []
    resume = f"; the small runs are kept in {out}/quick-runs: run the same command to resume" if quick else ""
    with interruptible(f"figures drawn so far are in {out}{resume}"):
        made = figures.make(
            names,
            out,
            runs=[run for run in found if batch_size in (None, run.config.batch_size)],
            suffix="" if batch_size is None else f"-{batch_size}",
            quick=quick,
            dataset=dataset,
            data_dir=data_dir,
            measures=measures,
            measured=measured_beside(runs),
            workers=workers,
            say=(lambda line: None) if json else (lambda line: print(line, flush=True)),
        )
    if json:
        display.show_json({one.name: [str(file) for file in one.files] or one.reason for one in made})
        return
    for one in made:
        print(f"{one.name}: {', '.join(map(str, one.files)) or 'left out, ' + one.reason}")
        for part in one.lacks:
            print(f"  missing: {part}")


def demo_report(runs: Sequence[Run], out: str | None) -> str:
    """Write the demo's report, into its folder or else the current one; return a line with its path."""
    from ekfac.lab.show.report import write_report

    try:
        file = write_report(runs, Path(out or ".") / ("report.html" if out else "ekfac-demo.html"), "ekfac demo")
    except OSError as error:
        return f"no report: {error}"
    return f"interactive report: {file}"


def report(
    places: list[str] = _PLACES,
    out: str = typer.Option("report.html", help="The file to write."),
    title: str = typer.Option("ekfac: report", help="The page's heading."),
    timed: list[str] = _TIMED,
    plugin: list[str] = _PLUGIN,
    json: bool = _JSON,
) -> None:
    """Write one self-contained page about runs: interactive curves, best settings, heat maps, commands."""
    from ekfac.lab.show.report import write_report

    for where in plugin:
        load_plugin(where)
    runs = find_runs(places, timed=timed or None)
    file = write_report(runs, out, title)
    if json:
        display.show_json({"file": str(file), "runs": len(runs), "timed": sum(run.timed for run in runs)})
    else:
        print(f"{counted(len(runs), 'run')} reported in {file}")


def watch(
    places: list[str] = _PLACES,
    page: bool = typer.Option(False, "--page", help="Serve a page at 127.0.0.1 instead of drawing in the terminal."),
    port: int = typer.Option(0, help="Port of the page; 0 takes a free one."),
    every: float = typer.Option(2.0, help="Seconds between looks."),
    plugin: list[str] = _PLUGIN,
) -> None:
    """Show the curves of runs in progress, until Ctrl-C."""
    from ekfac.lab.show.watch import make_server, watch_terminal

    for where in plugin:
        load_plugin(where)
    if not every > 0:
        raise LabError(f"every must be positive, not {every}")
    find_runs(places, skip_broken=True)
    with contextlib.suppress(KeyboardInterrupt):
        if not page:
            watch_terminal(places, Console(), every)
            return
        try:
            server = make_server(places, port, every)
        except (OSError, OverflowError) as error:
            raise LabError(f"port {port} cannot be used: {error}") from error
        with server:
            print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
            server.serve_forever()


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(
        epilog="Examples:\n\n"
        "`ekfac figure all --quick`\n\n"
        "`ekfac figure correlation error --dataset mnist --data-dir data`\n\n"
        "`ekfac figure autoencoder --runs results/mnist --out figures`",
    )(figure)
    app.command(
        epilog="Examples:\n\n`ekfac report runs/search`\n\n`ekfac report runs/a runs/b --out comparison.html`",
    )(report)
    app.command(epilog="Examples:\n\n`ekfac watch runs`\n\n`ekfac watch runs --page --port 8080`")(watch)
