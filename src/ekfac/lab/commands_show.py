"""The commands ``ekfac figure``, ``ekfac report`` and ``ekfac watch``: parse, call the lab, print."""

from __future__ import annotations

import os

import typer

from ekfac.lab import display
from ekfac.lab.gather import find_runs
from ekfac.lab.registry import LabError, load_plugin

FIGURE_NAMES = (
    "rescaling, convolution, correlation, error, autoencoder, frequency, vgg11, resnet34, batch-size, schedule"
)
_NAMES = typer.Argument(metavar="NAME...", help=f"One or more of: {FIGURE_NAMES}; or all.")
_RUNS = typer.Option([], "--runs", help="Folder of recorded runs, at any depth; may be given again.")
_PLACES = typer.Argument(metavar="RUNS...", help="Folders of recorded runs, at any depth.")
_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")
_PLUGIN = typer.Option([], "--plugin", help="Your file or module that registers tasks, datasets or optimizers.")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")


def needs(error: ImportError) -> LabError:
    """Say which package is missing."""
    return LabError(f"this command needs {error.name}: pip install 'ekfac[lab]'")


def figure(
    names: list[str] = _NAMES,
    runs: list[str] = _RUNS,
    quick: bool = typer.Option(False, "--quick", help="From small fresh runs on the embedded digits: minutes."),
    out: str = typer.Option("figures", help="Folder for the SVG and PNG files."),
    dataset: str = typer.Option("mnist-5k", help="Dataset of the figures that are computed on the spot."),
    workers: int = typer.Option(os.cpu_count() or 1, help="Small runs at the same time.", show_default="cores"),
    data_dir: str | None = _DATA_DIR,
    plugin: list[str] = _PLUGIN,
    json: bool = _JSON,
) -> None:
    """Make the paper's figures, from recorded runs, from small fresh ones, or computed on the spot."""
    try:
        from ekfac.lab import figures
    except ImportError as error:
        raise needs(error) from None
    for where in plugin:
        load_plugin(where)
    if workers < 1:
        raise LabError(f"workers must be at least 1, not {workers}")
    made = figures.make(
        names,
        out,
        runs=find_runs(runs) if runs else (),
        quick=quick,
        dataset=dataset,
        data_dir=data_dir,
        workers=workers,
        say=(lambda line: None) if json else (lambda line: print(line, flush=True)),
    )
    if json:
        display.show_json({one.name: [str(file) for file in one.files] or one.reason for one in made})
        return
    for one in made:
        print(f"{one.name}: {', '.join(map(str, one.files)) or 'left out, ' + one.reason}")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(
        epilog="Examples:\n\n"
        "`ekfac figure all --quick`\n\n"
        "`ekfac figure correlation error --dataset mnist --data-dir data`\n\n"
        "`ekfac figure autoencoder --runs results/autoencoder --out figures`",
    )(figure)
