"""``python -m ekfac.lab.train``: trains with only torch and numpy installed, as on a bare GPU machine.

It makes the same run as ``ekfac train``, with the same options and folder, but prints progress as plain lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

from ekfac.lab.boundary import CommandParser, exit_code, interrupted, outermost, signal_name, stoppable, writing
from ekfac.lab.config import TrainConfig, parse_options
from ekfac.lab.labels import counted, describe
from ekfac.lab.registry import LabError, plugin_fault
from ekfac.lab.tasks import TASKS
from ekfac.lab.training.loggers import with_loggers
from ekfac.lab.training.ranks import is_first, leave
from ekfac.lab.training.run import Progress, launch
from ekfac.lab.training.runs import Run

OPTIONAL = {"rich": "live display", "tensorboard": "TensorBoard events"}


class PlainProgress(Progress):
    """Prints one line per epoch."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self._floors: Mapping[str, float] = {}

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def start(self, run: Run) -> None:
        """Print what is trained, and earlier epochs."""
        self._floors = floors(run)
        self._print(headline(run))
        self._print("".join(f"{name:>12}" for name in COLUMNS))
        for record in run.history:
            self.epoch(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Print the epoch's line."""
        self._print("".join(f"{cell:>12}" for cell in cells(record, self._floors)))

    def end(self, run: Run) -> None:
        """Print how the run ended."""
        self._print(closing(run))


COLUMNS = ("epoch", "step", "train", "batch mean", "validation", "accuracy", "seconds", "images/s", "memory")


def cells(record: Mapping[str, Any], floors: Mapping[str, float] | None = None) -> list[str]:
    """Return an epoch's record as text, one cell per column of :data:`COLUMNS`; losses are minus their floor."""
    below = floors or {}

    def number(name: str, pattern: str) -> str:
        value = record.get(name)
        if value is not None and "loss" in name:
            value -= below.get(name.split("_")[0], 0.0)
        return "-" if value is None else format(value, pattern)

    memory = record["peak_memory"]
    return [
        str(record["epoch"]),
        str(record["step"]),
        number("train_loss", ".4g"),
        number("train_loss_mean", ".4g"),
        number("validation_loss", ".4g"),
        number("validation_accuracy", ".2%"),
        number("seconds", ".1f"),
        number("images_per_second", ",.0f"),
        "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
    ]


def floors(run: Run) -> dict[str, float]:
    """Return the smallest possible loss by split, if it is not zero."""
    return {name: value for name, value in (run.about.get("floor") or {}).items() if value > 0}


def headline(run: Run) -> str:
    """Describe what is trained, the settings, and the losses' floor."""
    config, examples = run.config, run.about["examples"]["train"]
    below = ", ".join(f"{value:.2f} {name}" for name, value in floors(run).items())
    return (
        f"{config.task}{' with batch-norm' if config.batch_norm else ''} by {config.optimizer}: "
        f"{run.about['parameters']:,} parameters, {counted(examples, 'example')} of {config.dataset}, "
        f"batch {config.batch_size}, {counted(config.epochs or 0, 'epoch')} on {config.device}\n"
        f"{describe(config, ('lr', 'damping', 'refresh_every', 'seed'))}"
        + (f"\nlosses are above their floor: {below}" if below else "")
    )


def closing(run: Run) -> str:
    """Describe in one line how a run ended, and where it is recorded."""
    where = f"; recorded in {run.path}" if run.path else ""
    epoch = run.history[-1]["epoch"] if run.history else 0
    if run.status == "diverged":
        return f"diverged in epoch {epoch}{where}"
    if run.status == "interrupted":
        interrupted = f"interrupted{signal_name(run.stopped_by)} after epoch {epoch}"
        if not run.path:
            return interrupted
        if run.resumable or epoch > 0:
            return f"{interrupted}; continue with --out {run.path} --resume"
        return f"{interrupted}; start again with --out {run.path} --overwrite"
    early = ", no better for a while" if run.history and run.history[-1].get("stopped") else ""
    return f"finished after epoch {epoch}{early}{where}"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; its options are the fields of :class:`TrainConfig`."""
    parse = CommandParser(
        prog="python -m ekfac.lab.train",
        description="Train one of the lab's networks, with torch and numpy alone.",
        epilog=f"tasks: {', '.join(TASKS)}",
        allow_abbrev=False,
    )
    parse.add_argument("task", nargs="?", help="what to train (not needed with --resume)")
    for item in fields(TrainConfig):
        if "kind" not in item.metadata:
            continue
        flag, kind = f"--{item.name.replace('_', '-')}", item.metadata["kind"]
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parse.add_argument(flag, default=None, help=item.metadata["help"].replace("%", "%%"), **how)
    parse.add_argument("--set", action="append", metavar="NAME=VALUE", default=[], help="any option of the optimizer")
    parse.add_argument("--plugin", action="append", default=[], help="your file or module that registers more")
    parse.add_argument("--out", help="folder to record the run in")
    parse.add_argument("--data-dir", help="folder of the data files")
    parse.add_argument("--log", action="append", default=[], help="also log to wandb or mlflow; may be repeated")
    parse.add_argument("--checkpoint-every", type=int, help="also save a checkpoint every this many steps")
    parse.add_argument("--keep-best", action="store_true", help="keep the best epoch's checkpoint, in best.pt")
    parse.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parse.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    parse.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    return parse


def gather(values: dict[str, Any]) -> dict[str, Any]:
    """Turn a command line's values into settings, omitting those not given."""
    names = {item.name for item in fields(TrainConfig)}
    settings = {name: value for name, value in values.items() if name in names and value is not None}
    if values["set"]:
        settings["options"] = parse_options(values["set"])
    if values["plugin"]:
        settings["plugins"] = list(values["plugin"])
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from a command line and return the exit status.

    0 is success, 1 divergence, 2 bad usage or a failure to read or write, 130 Ctrl-C, 143 TERM, 129 HUP.
    """
    try:
        values = vars(parser().parse_args(arguments))
        missing = [what for name, what in OPTIONAL.items() if importlib.util.find_spec(name) is None]
        if missing and not values["json"] and is_first():
            print(f"left out, since their packages are not installed: {', '.join(missing)}", flush=True)
        with writing(values), stoppable():
            run = launch(
                gather(values),
                values["out"],
                data_dir=values["data_dir"],
                resume=values["resume"],
                overwrite=values["overwrite"],
                checkpoint_every=values["checkpoint_every"],
                keep_best=values["keep_best"],
                progress=with_loggers(values["log"], Progress() if values["json"] else PlainProgress()),
            )
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not plugin_fault(error):
            raise
        print(f"error: {plugin_fault(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:  # before the first epoch
        print(interrupted(stop), file=sys.stderr)
        return exit_code(stop)
    if values["json"] and is_first():
        print(json.dumps(run.to_dict(), allow_nan=False))
    return run.exit_code


if __name__ == "__main__":
    leave(outermost(main))
