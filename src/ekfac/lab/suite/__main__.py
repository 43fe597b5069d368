"""``python -m ekfac.lab.suite run CONFIG --out DIR``: the suite with only torch and numpy."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ekfac.lab.boundary import CommandParser, outermost, writing
from ekfac.lab.registry import LabError
from ekfac.lab.suite import config
from ekfac.lab.suite.records import Records, owned, read_config, write_config
from ekfac.lab.suite.runner import run, usable


def parse_seconds(text: str) -> float:
    """Turn ``"90"``, ``"90s"``, ``"9m"`` or ``"1.5h"`` into seconds.

    Raises:
        LabError: If it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not found or not float(found[1]):
        raise LabError(f"--budget takes a time such as 90s, 9m or 1.5h, not {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def names(text: str | None) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def run_command(
    where: str,
    out: str,
    *,
    quick: bool = False,
    only: str | None = None,
    methods: str | None = None,
    schedules: str | None = None,
    budget: str | None = None,
    workers: int = 1,
    device: str | None = None,
    data_dir: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Make the runs of a configuration; return 0, or 1 if one failed, or 3 if time ran out."""
    seconds = math.inf if budget is None else parse_seconds(budget)
    data = config.read(where)
    whole = config.parse(data, quick)
    suite = usable(whole.selected(names(only), names(methods), names(schedules)), say)
    folder = Path(out)
    with owned(folder):
        write_config(folder, data, quick)
        outcome = run(
            suite,
            Records(folder),
            data_dir=data_dir,
            device=device,
            workers=workers,
            budget=seconds,
            say=say,
        )
    return _end(outcome.made, outcome.failed, outcome.left, say)


def time_command(
    out: str,
    *,
    only: str | None = None,
    methods: str | None = None,
    schedules: str | None = None,
    budget: str | None = None,
    device: str | None = None,
    data_dir: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Repeat each method's best run alone, to time it."""
    folder = Path(out)
    suite = config.parse(*read_config(folder)).selected(names(only), names(methods), names(schedules))
    seconds = math.inf if budget is None else parse_seconds(budget)
    with owned(folder):
        outcome = run(
            usable(suite, say),
            Records(folder),
            data_dir=data_dir,
            device=device,
            budget=seconds,
            timing=True,
            say=say,
        )
    return _end(outcome.made, outcome.failed, outcome.left, say)


def report_command(out: str, say: Callable[[str], None] = print) -> int:
    """Write the report and print its path."""
    from ekfac.lab.suite import page

    say(str(page.write(Path(out))))
    return 0


def _end(made: int, failed: int, left: int, say: Callable[[str], None]) -> int:
    text = f"{made} runs made"
    text += f", {failed} failed" if failed else ""
    text += f"; {left} or more still due: run the same command to resume" if left else "; nothing is due"
    say(text)
    return 1 if failed else 3 if left else 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parse = CommandParser(prog="python -m ekfac.lab.suite", description=__doc__, allow_abbrev=False)
    commands = parse.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    make = commands.add_parser("run", help="make the runs that are due", allow_abbrev=False)
    make.add_argument("config", help=f"JSON file, or one of: {', '.join(config.builtin())}")
    make.add_argument("--out", required=True, help="folder of the records")
    make.add_argument("--quick", action="store_true", help="the small form, for two cores")
    make.add_argument("--workers", type=int, default=1, help="runs side by side")
    again = commands.add_parser("time", help="make each method's best run again, alone", allow_abbrev=False)
    again.add_argument("out", help="folder of the records")
    tell = commands.add_parser("report", help="write the table, the profiles and the page", allow_abbrev=False)
    tell.add_argument("out", help="folder of the records")
    for each in (make, again):
        each.add_argument("--only", help="tasks, separated by commas")
        each.add_argument("--methods", help="methods, separated by commas")
        each.add_argument("--schedules", help="schedules, separated by commas")
        each.add_argument("--budget", help="time, such as 9m; the same command resumes later")
        each.add_argument("--device", help="device; by default a GPU where there is one")
        each.add_argument("--data-dir", help="folder of the data files")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, 2 for bad usage."""

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        values = vars(parser().parse_args(arguments))
        command = values.pop("command")
        with writing(values):
            if command == "run":
                return run_command(values.pop("config"), values.pop("out"), say=say, **values)
            if command == "report":
                return report_command(values.pop("out"), say=say)
            return time_command(values.pop("out"), say=say, **values)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(outermost(main))
