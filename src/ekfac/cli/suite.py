"""The command ``ekfac suite``: parses, calls the suite."""

from __future__ import annotations

import typer

from ekfac.lab.suite import __main__ as commands
from ekfac.lab.suite import config

suite_app = typer.Typer(no_args_is_help=True, help="Compare methods on many small tasks: table, profile, page.")

_OUT = typer.Option(..., "--out", help="Folder of the records.")
_DIR = typer.Argument(help="Folder of the records.")
_ONLY = typer.Option(None, "--only", help="Tasks, separated by commas.")
_METHODS = typer.Option(None, "--methods", help="Methods, separated by commas.")
_SCHEDULES = typer.Option(None, "--schedules", help="Schedules, separated by commas: cosine, constant, own.")
_BUDGET = typer.Option(None, "--budget", help="Time, such as 9m; the same command resumes later.")
_DEVICE = typer.Option(None, "--device", help="Device [default: a GPU where there is one].")
_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")


@suite_app.command(
    epilog="Examples:\n\n`ekfac suite run suite --quick --out runs/quick --workers 2`\n\n"
    "`ekfac suite run my.json --out runs/mine --only gpt,vit --methods ekfac,adamw --budget 9m`"
)
def run(
    where: str = typer.Argument(
        "suite", metavar="CONFIG", help=f"JSON file, or one of: {', '.join(config.builtin())}."
    ),
    out: str = _OUT,
    quick: bool = typer.Option(False, "--quick", help="The small form: minutes on two cores."),
    only: str | None = _ONLY,
    methods: str | None = _METHODS,
    schedules: str | None = _SCHEDULES,
    budget: str | None = _BUDGET,
    workers: int = typer.Option(1, "--workers", help="Runs at a time; only runs made alone count as timed."),
    device: str | None = _DEVICE,
    data_dir: str | None = _DATA_DIR,
) -> None:
    """Make all runs that are missing. Exits with 3 if time ran out first."""
    status = commands.run_command(
        where,
        out,
        quick=quick,
        only=only,
        methods=methods,
        schedules=schedules,
        budget=budget,
        workers=workers,
        device=device,
        data_dir=data_dir,
    )
    raise typer.Exit(status)


@suite_app.command("time", epilog="Example:\n\n`ekfac suite time runs/suite --budget 9m`")
def time_(
    out: str = _DIR,
    only: str | None = _ONLY,
    methods: str | None = _METHODS,
    schedules: str | None = _SCHEDULES,
    budget: str | None = _BUDGET,
    device: str | None = _DEVICE,
    data_dir: str | None = _DATA_DIR,
) -> None:
    """Make each method's best run again, alone, so that its time counts."""
    status = commands.time_command(
        out, only=only, methods=methods, schedules=schedules, budget=budget, device=device, data_dir=data_dir
    )
    raise typer.Exit(status)


@suite_app.command(epilog="Example:\n\n`ekfac suite report runs/suite`")
def report(out: str = _DIR) -> None:
    """Write DIR/report/suite.md: the table, the performance profiles, the divergences, with pictures and JSON."""
    raise typer.Exit(commands.report_command(out))
