"""The commands ``ekfac ls``, ``diff``, ``rerun``, ``tag`` and ``note``, for recorded runs."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import counted
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.show import display, listing
from ekfac.lab.train import gather
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.run import Progress, train
from ekfac.lab.training.runs import load_run
from ekfac.lab.training.tags import Tags, read_tags, write_tags

_PLACES = typer.Argument(None, metavar="RUNS...", help="Folders of recorded runs, at any depth [default: runs].")
_TAG = typer.Option([], "--tag", help="Only runs with this tag; may be repeated.")
_RUN = typer.Argument(metavar="RUN", help="The folder of a run.")
_TAGS = typer.Argument(None, metavar="TAG...", help="Words to find it by; none: print those it has.")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")
_COLUMNS = ("run", "method", "setting", "epoch", "train_loss", "validation_loss", "seconds", "status", "tags", "note")
_SORTS = ("run", "method", "epoch", "train_loss", "validation_loss", "seconds", "status")


def ls(
    places: list[str] | None = _PLACES,
    task: str | None = typer.Option(None, help="Only runs of this task."),
    status: str | None = typer.Option(None, help="Only runs that are finished, diverged or unfinished."),
    tag: list[str] = _TAG,
    sort: str = typer.Option("run", help=f"One of: {', '.join(_SORTS)}."),
    json: bool = _JSON,
) -> None:
    """List runs: settings, last losses above their floor, tags and notes."""
    if sort not in _SORTS:
        raise LabError(f"sort must be one of {', '.join(_SORTS)}, not {sort!r}")
    if status not in (None, "finished", "diverged", "unfinished"):
        raise LabError(f"status must be finished, diverged or unfinished, not {status!r}")
    rows, left_out = [], list[str]()
    for run in find_runs(places or ["runs"], skip_broken=True, left_out=left_out):
        try:
            rows.append(listing.row(run))
        except LabError as error:  # its tags cannot be read
            left_out.append(str(error))
    for reason in left_out:
        print(f"note: left out: {reason}", file=sys.stderr)
    rows = [row for row in rows if task in (None, row["task"]) and status in (None, row["status"])]
    rows = listing.sorted_rows([row for row in rows if set(tag) <= set(row["tags"])], sort)
    if json:
        display.show_json(rows)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=250)  # output is for other programs then: do not cut lines
    used = [name for name in _COLUMNS if name not in ("tags", "note") or any(row[name] for row in rows)]
    if console.width < 120:
        used = [name for name in used if name not in ("setting", "validation_loss", "seconds")]
    if console.width < 72:
        used = ["run", "train_loss", "status"]  # further columns would be cut off
    table = Table(title=counted(len(rows), "run"), title_justify="left", box=None, pad_edge=False)
    longest = max((len(str(row["run"])) for row in rows), default=0)
    room = min(console.width // 2, console.width - 24)  # leave room for a loss and a status
    for name in used:
        numeric = name in ("epoch", "train_loss", "validation_loss", "seconds")
        # Keep a folder's name in one piece if there is room, so that it can be copied.
        whole = numeric or name == "status" or (name == "run" and longest <= room)
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(Text(_cell(row, name)) for name in used))
    console.print(table)


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if name == "epoch":
        return f"{value} of {row['epochs']}"
    if isinstance(value, float):
        return f"{value:.1f}" if name == "seconds" else f"{value:.4g}"
    return ", ".join(value) if isinstance(value, list) else "-" if value is None else str(value)


def diff(first: str = _RUN, second: str = _RUN, json: bool = _JSON) -> None:
    """Show what differs between two runs: settings, versions, machine, data, and results."""
    found = listing.differences(*(load_run(place) for place in (first, second)))
    if json:
        display.show_json(found)
        return
    if not found:
        print("no difference")
        return
    table = Table()
    for head in ("", "", first, second):
        table.add_column(Text(head), overflow="fold")
    for part, pairs in found.items():
        for number, (name, (left, right)) in enumerate(pairs.items()):
            table.add_row(part if number == 0 else "", name, Text(_shown(left)), Text(_shown(right)))
    Console().print(table)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def tag(
    run: str = _RUN,
    tags: list[str] | None = _TAGS,
    remove: bool = typer.Option(False, "--remove", help="Take these tags off instead."),
    json: bool = _JSON,
) -> None:
    """Add tags to a run, or remove them; its record is not changed."""
    known = read_tags(Path(run))
    given = tuple(tags or ())
    kept = tuple(t for t in known.tags if t not in given) if remove else (*known.tags, *given)
    write_tags(Path(run), Tags(kept, known.note))
    _say(read_tags(Path(run)), ", ".join(read_tags(Path(run)).tags) or "no tags", json)


def note(
    run: str = _RUN,
    text: str | None = typer.Argument(None, metavar="TEXT", help="The note; an empty one removes it."),
    json: bool = _JSON,
) -> None:
    """Write a note on a run, or print the one that it has."""
    known = read_tags(Path(run))
    if text is not None:
        write_tags(Path(run), Tags(known.tags, text))
    _say(read_tags(Path(run)), read_tags(Path(run)).note or "no note", json)


def _say(tags: Tags, line: str, json: bool) -> None:
    if json:
        display.show_json({"tags": list(tags.tags), "note": tags.note})
    else:
        print(line)


def _rerun(**values: Any) -> None:
    """Run a recorded run again, with its settings or with some of them changed, and compare."""
    place = values.pop("run")
    for where in values["plugin"]:
        load_plugin(where)
    before = load_run(place)
    given = gather(values)
    stored = {**before.config.to_dict(), "device": "auto"}
    options = {**stored["options"], **given.pop("options", {})}
    config = TrainConfig.from_dict({**stored, **given, "options": options})
    if values["out"] is not None and Path(values["out"]).resolve() == Path(place).resolve():
        raise LabError(f"--out {values['out']!r} is the run itself; name another folder")
    progress = Progress() if values["json"] else display.progress(Console())
    data_dir = values["data_dir"] or before.about.get("data_dir")
    if values["data_dir"] is None and data_dir is not None and not Path(data_dir).is_dir():
        data_dir = None  # the run was made on another machine
    run = train(config, values["out"], data_dir=data_dir, overwrite=values["overwrite"], progress=progress)
    if values["json"]:
        display.show_json({**run.to_dict(), "differences": listing.differences(before, run)})
    else:
        print(listing.repeated(before, run))
    raise typer.Exit(run.exit_code)


def register(app: typer.Typer, train_signature: inspect.Signature) -> None:
    """Add the commands to the application; ``rerun`` takes the options of ``train``."""
    app.command(epilog="Examples:\n\n`ekfac ls`\n\n`ekfac ls runs/search --sort train_loss --status finished`")(ls)
    app.command(epilog="Example:\n\n`ekfac diff runs/a runs/b`")(diff)
    app.command(epilog="Examples:\n\n`ekfac tag runs/a baseline paper`\n\n`ekfac tag runs/a paper --remove`")(tag)
    app.command(epilog="Example:\n\n`ekfac note runs/a 'the one of figure 4'`")(note)
    keyword = inspect.Parameter.KEYWORD_ONLY
    left_out = ("task", "resume", "seeds", "tag", "note", "config", "log", "checkpoint_every", "keep_best")
    kept = [p for p in train_signature.parameters.values() if p.name not in left_out]
    _rerun.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("run", keyword, default=_RUN, annotation=str), *kept]
    )
    _rerun.__annotations__ = {n: p.annotation for n, p in _rerun.__signature__.parameters.items()}  # type: ignore[attr-defined]
    app.command(
        "rerun", epilog="Examples:\n\n`ekfac rerun runs/a`\n\n`ekfac rerun runs/a --seed 1 --out runs/a-seed1`"
    )(_rerun)
