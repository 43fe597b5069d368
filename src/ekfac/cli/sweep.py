"""The command ``ekfac sweep``: parses, calls the search, prints."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ekfac.cli.progress import SweepProgress
from ekfac.lab.boundary import interruptible
from ekfac.lab.config import TrainConfig, parse_options
from ekfac.lab.labels import counted, describe, has_option, method, varied
from ekfac.lab.optimizers import check_options
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.search import space
from ekfac.lab.search.plan import read_plan, write_plan
from ekfac.lab.search.selection import best_final, best_validation, by_method, curves, last, per_epoch, per_time
from ekfac.lab.settings import with_file
from ekfac.lab.show import display
from ekfac.lab.tasks import TASKS
from ekfac.lab.train import gather
from ekfac.lab.training.runs import Run

# Settings that take a list of values here, separated by commas; all others are as in ekfac train.
LISTS: dict[str, type] = {"lr": float, "damping": float, "batch_size": int, "seed": int}


def parse_values(name: str, text: str | None, kind: type) -> list[Any]:
    """Turn ``"0.1,1e-2"`` into numbers.

    Raises:
        LabError: If one is not a number of that kind, or there is none.
    """
    if text is None:
        return []
    try:
        found = [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found:
        what = "whole numbers" if kind is int else "numbers"
        raise LabError(f"--{name.replace('_', '-')} takes {what} separated by commas, not {text!r}")
    return found


def _signature() -> inspect.Signature:
    decades = ",".join(f"{value:g}" for value in space.DECADES)
    usual = {"lr": decades, "damping": decades, "batch_size": "the paper's, else the task's", "seed": "0"}
    task_help = f"One of: {', '.join(TASKS)}, or a plugin's. Not needed with --plan or --take-in."
    found: list[tuple[str, Any, Any]] = [("task", str | None, typer.Argument(None, help=task_help))]
    for item in fields(TrainConfig):
        if item.name in LISTS:
            help = f"values to search over, separated by commas [default: {usual[item.name]}]"
            found.append((item.name, str | None, typer.Option(None, help=help, show_default=False)))
        elif "kind" in item.metadata and item.name != "device":
            option = typer.Option(None, help=item.metadata["help"], show_default=False)
            found.append((item.name, item.metadata["kind"] | None, option))
    found += [
        ("set", list[str], typer.Option([], "--set", metavar="NAME=VALUE", help="Any option of the optimizer.")),
        ("plugin", list[str], typer.Option([], "--plugin", help="Your file or module that registers more.")),
        (
            "axis",
            list[str],
            typer.Option([], metavar="NAME=V1,V2", help="Try every value of a setting or option; may be repeated."),
        ),
        ("config", str | None, typer.Option(None, help="YAML file of settings; lists there are values to try.")),
        (
            "sampler",
            str,
            typer.Option("grid", help="grid: the paper's search; tpe: proposals between the smallest and largest lr."),
        ),
        ("trials", int, typer.Option(32, help="How many trials tpe makes.")),
        ("random", int, typer.Option(space.RANDOM_POINTS, help="Random points around each point of the grid.")),
        ("draw", int, typer.Option(0, help="Seed of the random points.")),
        ("workers", int, typer.Option(1, help="Processes that run trials at the same time.")),
        ("devices", str | None, typer.Option(None, help="Devices the workers take in turn: cuda:0,cuda:1")),
        ("prune", bool, typer.Option(False, "--prune", help="End trials early that are behind the others.")),
        ("pruner", str, typer.Option("median", help="What --prune goes by: median, or asha (successive halving).")),
        ("out", str | None, typer.Option(None, help="Folder of the runs and the study [default: runs/sweep-TASK].")),
        (
            "storage",
            str | None,
            typer.Option(
                None, help="sqlite:///FILE, postgresql://USER@HOST/NAME or journal:FILE [default: OUT/study.db]."
            ),
        ),
        ("study", str | None, typer.Option(None, help="Name of the study [default: TASK-OPTIMIZER].")),
        ("write_plan", str | None, typer.Option(None, help="Write the settings to this file and run nothing.")),
        ("plan", str | None, typer.Option(None, help="Run the settings in this file instead of a grid.")),
        ("take_in", str | None, typer.Option(None, help="Take the runs in this folder into the study; run nothing.")),
        ("data_dir", str | None, typer.Option(None, help="Folder of the data files.")),
        ("json", bool, typer.Option(False, "--json", help="Print the result as JSON and nothing else.")),
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(n, keyword, default=d, annotation=k) for n, k, d in found])


def _settings(values: Mapping[str, Any]) -> list[TrainConfig]:
    for plugin in values["plugin"]:
        load_plugin(plugin)
    if values["plan"] is not None:
        if values["task"] is not None:
            raise LabError("a task and --plan cannot both be given: the plan names its tasks")
        return read_plan(values["plan"])
    return space.settings(*_wanted(values))


def _wanted(values: Mapping[str, Any]) -> tuple[TrainConfig, space.Space]:
    """Return the common settings and the search space, from the command line and, beneath it, the file."""
    for pair in values["set"]:
        text = pair.partition("=")[2].lstrip()
        if "," in text and text[0] not in "([{\"'":
            raise LabError(f"--set {pair} sets one value: --axis {pair} tries each, and brackets make a tuple of them")
    given = gather(dict(values))
    listed: dict[str, list[Any]] = {name: parse_values(name, values[name], kind) for name, kind in LISTS.items()}
    axes = parse_axes(values["axis"])
    merged = with_file(values["config"], {n: v for n, v in given.items() if n not in LISTS and v is not None})
    for name in [n for n, value in merged.items() if isinstance(value, list) and n != "plugins"]:
        found = merged.pop(name)
        if name not in LISTS:
            axes.setdefault(name, found)
        elif not listed[name]:
            listed[name] = [LISTS[name](value) for value in found]
    options = dict(merged.get("options", {}))
    for name in [n for n, value in options.items() if isinstance(value, list)]:
        axes.setdefault(name, options.pop(name))
    for name in LISTS:
        if name in merged:
            single = merged.pop(name)
            listed[name] = listed[name] or [LISTS[name](single)]
    if options or "options" in merged:
        merged["options"] = options
    base = TrainConfig.from_dict(merged)
    TASKS.get(base.task)
    own = {item.name for item in fields(TrainConfig)}
    wrong = [name for name in axes if name in LISTS or name in ("task", "options", "plugins")]
    if wrong:
        raise LabError(f"--axis cannot vary {wrong[0]}: --{wrong[0].replace('_', '-')} takes a list itself")
    further = [*(["damping"] if listed["damping"] else []), *(name for name in axes if name not in own)]
    check_options(base.optimizer, [*base.optimizer_options(), *further])
    wanted = space.Space(
        lrs=listed["lr"] or space.DECADES,
        dampings=listed["damping"] or None,
        batch_sizes=listed["batch_size"],
        seeds=listed["seed"] or (0,),
        random_points=values["random"],
        draw=values["draw"],
        axes=axes,
    )
    return base, wanted


def parse_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """Turn ``["momentum=0,0.9", "scaling=running,per_example"]`` into values by name.

    Raises:
        LabError: If one is not of that form, or is named twice.
    """
    found: dict[str, list[Any]] = {}
    for word in words:
        name, sign, text = word.partition("=")
        name = name.strip().replace("-", "_")
        values = [part.strip() for part in text.split(",") if part.strip()]
        if not sign or not name.isidentifier() or not values:
            raise LabError(f"--axis takes name=value,value, not {word!r}")
        if name in found:
            raise LabError(f"--axis names {name} twice")
        found[name] = [parse_options([f"{name}={value}"])[name] for value in values]
    return found


def _search(values: Mapping[str, Any]) -> tuple[list[TrainConfig], Any]:
    """Return the settings of the grid, or none and the search that proposes them."""
    from ekfac.lab.search import ask

    for option, known in (("sampler", ask.SAMPLERS), ("pruner", ask.PRUNERS)):
        if values[option] not in known:
            raise LabError(f"{option} must be one of {', '.join(known)}, not {values[option]!r}")
    if values["sampler"] == "grid":
        configs = _settings(values)
        if values["write_plan"] is None:  # a plan may be for another machine
            space.check_options(configs)
        return configs, ask.Search(pruner=values["pruner"])
    if values["plan"] is not None or values["write_plan"] is not None:
        raise LabError("tpe chooses settings as it goes and has no plan; --sampler grid has one")
    for plugin in values["plugin"]:
        load_plugin(plugin)
    base, wanted = _wanted(values)
    dampings = wanted.dampings if wanted.dampings is not None else space.DECADES
    dampings = dampings if has_option(base.optimizer, "damping") else ()
    axes = dict(wanted.axes)
    for name, several in (("batch_size", wanted.batch_sizes), ("seed", wanted.seeds)):
        if len(several) > 1:
            axes[name] = list(several)
        elif several:
            base = space.on_axes(base, {name: several[0]})
    search = ask.proposals(
        base, values["trials"], wanted.lrs, dampings, axes, values["study"], values["pruner"], values["draw"]
    )
    # Refuse wrong values before anything runs.
    space.check_options([space.on_axes(base, axis).resolved() for axis in space.combinations(axes)])
    return [], search


def _sweep(**values: Any) -> None:
    """Search over learning rate, damping and batch size as the paper does; run it again to resume."""
    try:
        from ekfac.lab.search import sweep as search
        from ekfac.lab.search.ask import importance
        from ekfac.lab.search.study import legible
    except ImportError as error:
        raise LabError(
            f"a search needs {error.name}: pip install 'ekfac[lab]'; "
            "python -m ekfac.lab.search.plan runs a plan without"
        ) from None
    console = Console()
    quiet = values["json"]
    if values["take_in"] is not None:
        _take_in(search, values, console)
        return
    configs, proposing = _search(values)
    if values["write_plan"] is not None:
        write_plan(configs, values["write_plan"])
        if not quiet:
            print(f"{counted(len(configs), 'setting')} written to {values['write_plan']}")
        return
    where = search.Where.of(_out(values), values["storage"], values["data_dir"])
    total = len(configs) or values["trials"]
    show = SweepProgress(console, total, values["workers"], where.out)
    with interruptible("run the same command to resume"), show:
        studies = search.sweep(
            configs,
            where,
            name=values["study"],
            workers=values["workers"],
            devices=[name for name in (values["devices"] or "").split(",") if name],
            prune=values["prune"],
            search=proposing,
            on_start=(lambda: None) if quiet else show.start,
            on_state=(lambda found: None) if quiet else show.state,
        )
    with legible(where.storage):
        failed = {name: reason for study in studies.values() for name, reason in study.failures().items()}
        mattered = {name: importance(study) for name, study in studies.items()}
        _show({name: study.runs() for name, study in studies.items()}, console, quiet, failed, mattered)
    _tell_notes(studies)
    if not quiet:
        for name, reason in failed.items():
            print(f"failed: {name}: {reason}")
    raise typer.Exit(int(bool(failed)))


def _out(values: Mapping[str, Any]) -> str:
    file = values["plan"] or values["take_in"] or values["config"] or "all"
    return values["out"] or f"runs/sweep-{values['task'] or Path(file).stem}"


def _take_in(search: Any, values: Mapping[str, Any], console: Console) -> None:
    from ekfac.lab.search.study import legible, study_name
    from ekfac.lab.training.gather import find_runs

    for plugin in values["plugin"]:
        load_plugin(plugin)
    runs = [run for run in find_runs([values["take_in"]]) if run.status in ("finished", "diverged")]
    where = search.Where.of(_out(values), values["storage"])
    if values["storage"] is None:
        Path(where.out).mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(values["study"] or study_name(run.config), []).append(run)
    with legible(where.storage):
        studies = search.open_studies(where, list(groups))
        count = sum(study.take_in(groups[name]) for name, study in studies.items())
        if not values["json"]:
            print(f"{count} of {counted(len(runs), 'run')} taken in{_others(len(runs) - count)}")
        _show({name: study.runs() for name, study in studies.items()}, console, values["json"])
    _tell_notes(studies)


def _tell_notes(studies: Mapping[str, Any]) -> None:
    for note in sorted({note for study in studies.values() for note in study.notes}):
        print(f"note: {note}", file=sys.stderr)


def _others(number: int) -> str:
    return "" if number == 0 else f"; {number} {'was' if number == 1 else 'were'} there already"


def best_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the best settings of one method by each rule: at the end, by validation, at epochs, at time budgets.

    The loss of a diverged one is ``None``.
    """
    rows: list[dict[str, Any]] = []
    candidates = curves(runs)
    names = varied([run.config.to_dict() for run in runs])

    def add(rule: str, curve: Any, value: float) -> None:
        loss = value if math.isfinite(value) else None
        setting = describe(curve.config, names)
        rows.append({"by": rule, "setting": setting, "loss": loss, "command": curve.config.command()})

    final, validation = best_final(candidates), best_validation(candidates)
    if final is not None:
        add("final training loss", final, last(final))
    if validation is not None:
        add("validation", validation, last(validation))
    epochs = per_epoch(candidates)
    for epoch in (1, 2, 5, 10, 20, 50, 100, 200):
        for where in (epochs.x == epoch).nonzero()[0]:
            add(f"epoch {epoch}", epochs.chosen[where], float(epochs.value[where]))
    clocks = [curve.mean("seconds") for curve in candidates]
    longest = max((float(clock[-1]) for clock in clocks), default=0.0)
    # A budget within which no setting completes an epoch would choose between untrained networks.
    soonest = min((float(clock[1]) for clock in clocks if len(clock) > 1), default=math.inf)
    budgets = [budget for budget in (longest / 8, longest / 4, longest / 2, longest) if budget >= soonest]
    times = per_time(candidates, budgets=budgets)
    for budget, value, curve in zip(times.x, times.value, times.chosen, strict=True):
        add(f"{budget:.3g} s", curve, float(value))
    return rows


def _show(
    found: Mapping[str, Sequence[Run]],
    console: Console,
    json: bool,
    failed: Mapping[str, str] | None = None,
    mattered: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    best = {
        f"{study}: {name}": best_rows([run for curve in group for run in curve.runs])
        for study, runs in found.items()
        for name, group in by_method(curves(runs), lambda curve: method(curve.config)).items()
    }
    if json:
        counts = {name: len(runs) for name, runs in found.items()}
        known = {name: dict(found) for name, found in (mattered or {}).items()}
        display.show_json({"trials": counts, "best": best, "failed": dict(failed or {}), "importance": known})
        return
    for title, rows in best.items():
        if not rows or rows[0]["by"] != "final training loss":
            print(f"{title}: no setting converged")
            continue
        table = Table(title=title, title_justify="left")
        for name in ("best by", "setting", "training loss"):
            table.add_column(name, justify="right" if name == "training loss" else "left")
        for row in rows:
            table.add_row(row["by"], row["setting"], "diverged" if row["loss"] is None else f"{row['loss']:.5g}")
        console.print(table)
        console.print(f"best: {rows[0]['command']}", markup=False, highlight=False, soft_wrap=True)
    for name, parts in (mattered or {}).items():
        if parts:
            words = ", ".join(f"{part} {value:.0%}" for part, value in parts.items())
            print(f"{name}: what the loss depends on: {words}")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    _sweep.__signature__ = _signature()  # type: ignore[attr-defined]
    _sweep.__annotations__ = {n: p.annotation for n, p in _sweep.__signature__.parameters.items()}  # type: ignore[attr-defined]
    app.command(
        "sweep",
        epilog="Examples:\n\n"
        "`ekfac sweep autoencoder --optimizer ekfac-ra --workers 2 --out runs/search`\n\n"
        "`ekfac sweep autoencoder --optimizer kfac --lr 0.1,0.01 --damping 0.1 --random 0 --epochs 5`\n\n"
        "`ekfac sweep vgg11 --storage postgresql://me@host/studies --devices cuda:0,cuda:1 --workers 4`\n\n"
        "`ekfac sweep autoencoder --write-plan plan.json`, there "
        "`python -m ekfac.lab.search.plan plan.json --out done`, then `ekfac sweep --take-in done`",
    )(_sweep)
