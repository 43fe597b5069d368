"""The command ``ekfac demo``: optimizers side by side on real data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from ekfac.cli.show import demo_report
from ekfac.lab.boundary import interruptible
from ekfac.lab.registry import LabError
from ekfac.lab.show import demo as lab_demo
from ekfac.lab.show import display

_OUT = typer.Option(None, "--out", help="Folder to record into.")
_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")


def demo(
    seconds: float = typer.Option(lab_demo.SECONDS, help="Training time for each of the six optimizers."),
    seed: int = typer.Option(0, help="Seed of all of them."),
    out: str | None = _OUT,
    data_dir: str | None = _DATA_DIR,
    json: bool = _JSON,
) -> None:
    """Train the auto-encoder with six optimizers side by side, and say who comes out ahead."""
    if not seconds > 0:
        raise LabError(f"seconds must be positive, not {seconds}")

    def race(on_epoch: Callable[[str, Any], None] = lambda name, run: None) -> dict[str, Any]:
        return lab_demo.race(lab_demo.ENTRANTS, seconds, out=out, data_dir=data_dir, seed=seed, on_epoch=on_epoch)

    console = Console()
    with interruptible("nothing was written" if out is None else f"what each had done by then is recorded in {out}"):
        runs = race() if json else display.run_demo(console, race)
    if json:
        result = {
            "verdict": asdict(lab_demo.verdict(runs)),
            "runs": {n: r.to_dict() for n, r in runs.items()},
        }
        display.show_json(result)
        return
    display.show_verdict(console, runs)
    if out is not None:
        console.print(f"recorded in {out}", soft_wrap=True)
    console.print(demo_report(list(runs.values()), out), soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Examples:\n\n`ekfac demo`\n\n`ekfac demo --seconds 60 --out runs/demo`")(demo)
