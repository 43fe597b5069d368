"""The command ``ekfac train``: parses, trains, prints; with several seeds, one run after another."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ekfac.cli.sweep import parse_values
from ekfac.lab.config import TrainConfig, check_seed
from ekfac.lab.data.datasets import DATASETS
from ekfac.lab.labels import counted
from ekfac.lab.optimizers import OPTIMIZERS
from ekfac.lab.registry import LabError
from ekfac.lab.settings import with_file
from ekfac.lab.show import display
from ekfac.lab.tasks import TASKS
from ekfac.lab.train import floors, gather
from ekfac.lab.training.loggers import Several, with_loggers
from ekfac.lab.training.ranks import is_first
from ekfac.lab.training.run import Progress, launch
from ekfac.lab.training.runs import Run, RunFolder, read_config
from ekfac.lab.training.tags import Tags, read_tags, write_tags


def complete(names: Any) -> Callable[[str], list[str]]:
    """Return a shell completion of names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


_COMPLETE: dict[str, Callable[[str], list[str]]] = {"optimizer": complete(OPTIMIZERS), "dataset": complete(DATASETS)}


def signature() -> inspect.Signature:
    """Return the options of ``ekfac train``, one per field of TrainConfig, so that they are defined only once."""
    known = f"One of: {', '.join(TASKS)}, or a plugin's. Not needed with --resume or --config."
    task = typer.Argument(None, help=known, autocompletion=complete(TASKS))
    found: list[tuple[str, Any, Any]] = [("task", str | None, task)]
    for item in fields(TrainConfig):
        if "kind" in item.metadata:
            words = _COMPLETE.get(item.name)
            option = typer.Option(None, help=item.metadata["help"], autocompletion=words, show_default=False)
            found.append((item.name, item.metadata["kind"] | None, option))
    found += [
        ("set", list[str], typer.Option([], "--set", metavar="NAME=VALUE", help="Any option of the optimizer.")),
        (
            "config",
            str | None,
            typer.Option(None, help="YAML file of settings; options on the command line take precedence."),
        ),
        ("seeds", str | None, typer.Option(None, help="Several seeds, one run each in OUT/seed-N: 0,1,2")),
        ("plugin", list[str], typer.Option([], "--plugin", help="Your file or module that registers more.")),
        ("out", str | None, typer.Option(None, "--out", help="Folder to record into.")),
        ("data_dir", str | None, typer.Option(None, help="Folder of the data files [default: EKFAC_DATA].")),
        ("log", list[str], typer.Option([], "--log", help="Also log to wandb or mlflow; may be repeated.")),
        ("checkpoint_every", int | None, typer.Option(None, help="Also save a checkpoint every this many steps.")),
        ("keep_best", bool, typer.Option(False, "--keep-best", help="Keep the best epoch's checkpoint, in best.pt.")),
        ("tag", list[str], typer.Option([], "--tag", help="A word to find the run by; may be repeated.")),
        ("note", str, typer.Option("", help="A note on the run.")),
        ("resume", bool, typer.Option(False, "--resume", help="Resume the run in --out.")),
        ("overwrite", bool, typer.Option(False, "--overwrite", help="Replace the run in --out.")),
        ("json", bool, typer.Option(False, "--json", help="Print the result as JSON and nothing else.")),
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(n, keyword, default=d, annotation=k) for n, k, d in found])


def _train(**values: Any) -> None:
    """Train a network and record the run."""
    seeds = parse_values("seeds", values["seeds"], int)
    if seeds and values["seed"] is not None:
        raise LabError("--seed and --seeds cannot both be given")
    if len(set(seeds)) < len(seeds):
        raise LabError(f"--seeds holds a seed twice: {values['seeds']}")
    for seed in seeds:
        check_seed(seed)
    tags = Tags(tuple(values["tag"]), values["note"])
    if tags != Tags() and values["out"] is None:
        raise LabError("--tag and --note are written into the run's folder: pass --out")
    runs = []
    for each in of_seeds(values, seeds) if seeds else [values]:
        run = _one(each, tags)
        runs.append(run)
        if run.status == "interrupted":
            break
    if not is_first():  # of the processes started by torchrun
        pass
    elif values["json"]:
        display.show_json([run.to_dict() for run in runs] if seeds else runs[0].to_dict())
    elif len(runs) > 1:
        print(over_seeds(runs))
    raise typer.Exit(max(run.exit_code for run in runs))


def of_seeds(values: dict[str, Any], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the values of each seed's run, in its own folder; with resume, a seed without a checkpoint starts.

    Raises:
        LabError: If there is nothing to resume.
    """
    each = [{**values, "seed": seed} for seed in seeds]
    if values["out"] is None:
        return each
    for one in each:
        one["out"] = str(Path(values["out"]) / f"seed-{one['seed']}")
    if not values["resume"]:
        return each
    begun = [one for one in each if RunFolder(Path(one["out"])).checkpoint_file.exists()]
    if not begun:
        raise LabError(f"{values['out']} has no checkpoint of seed {', '.join(map(str, seeds))} to resume")
    stored = read_config(Path(begun[0]["out"]))[0].to_dict()
    for one in each:
        if one not in begun:
            # A file never causes code to be loaded; only --plugin does.
            one |= {"resume": False, "overwrite": True, "beneath": stored | {"device": "auto", "plugins": []}}
    return each


class _Marking(Progress):
    """Adds tags and a note to a run as it begins."""

    def __init__(self, tags: Tags) -> None:
        self.tags = tags

    def start(self, run: Run) -> None:
        """Write them."""
        if run.path is not None and self.tags != Tags():
            write_tags(run.path, self.tags.over(read_tags(run.path)))


def _one(values: dict[str, Any], tags: Tags) -> Run:
    shown = Progress() if values["json"] else display.progress(Console())
    progress = Several([_Marking(tags), with_loggers(values["log"], shown)])
    return launch(
        {**values.get("beneath", {}), **with_file(values["config"], gather(values))},
        values["out"],
        data_dir=values["data_dir"],
        resume=values["resume"],
        overwrite=values["overwrite"],
        checkpoint_every=values["checkpoint_every"],
        keep_best=values["keep_best"],
        progress=progress,
    )


def over_seeds(runs: Sequence[Run]) -> str:
    """Summarise several seeds in one line: mean and standard error, minus the floor."""
    words = [counted(len(runs), "seed")]
    for split, name in (("train", "training loss"), ("validation", "validation loss")):
        whole = [run for run in runs if run.status == "finished" and run.history[-1].get(f"{split}_loss") is not None]
        found = [run.history[-1][f"{split}_loss"] - floors(run).get(split, 0.0) for run in whole]
        if found:
            error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.2g}" if len(found) > 1 else ""
            words.append(f"{name} {statistics.mean(found):.4g}{error}")
    lost = sum(run.status != "finished" for run in runs)
    return ", ".join(words) + (f"; {lost} did not finish" if lost else "")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    _train.__signature__ = signature()  # type: ignore[attr-defined]
    _train.__annotations__ = {n: p.annotation for n, p in _train.__signature__.parameters.items()}  # type: ignore[attr-defined]
    app.command(
        "train",
        epilog="Examples:\n\n"
        "`ekfac train autoencoder --optimizer ekfac-ra --epochs 10 --out runs/ra`\n\n"
        "`ekfac train autoencoder --optimizer adam --batch-norm --lr 3e-3 --seeds 0,1,2 --out runs/adam`\n\n"
        "`ekfac train vgg11 --width 8 --limit 2000 --optimizer ekfac --set kl_clip=0.1`\n\n"
        "`ekfac train --config settings.yaml --lr 0.01`\n\n"
        "`torchrun --nproc-per-node 2 -m ekfac train autoencoder --out runs/two`\n\n"
        "`ekfac train --resume --out runs/ra`",
    )(_train)
