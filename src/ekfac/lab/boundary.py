"""Where a command ends: what it says if it cannot write, and on Ctrl-C. Needs nothing but Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ekfac.lab.registry import LabError

# The options that name a file or folder to write.
OUTPUTS = ("out", "measures", "write_plan", "data_dir")


@contextmanager
def writing(values: Mapping[str, Any]) -> Iterator[None]:
    """Turn what the file system refuses into one line that names the option.

    Args:
        values: The command's options by name.

    Raises:
        LabError: Instead of an OSError that is about a file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise LabError(_refusal(error, values)) from error


def _refusal(error: OSError, values: Mapping[str, Any]) -> str:
    file = Path(os.fsdecode(error.filename)).absolute()
    # Asked for a folder where there is a file, the system says that it exists.
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    distances = {}
    for name in OUTPUTS:
        if values.get(name) is not None:
            given = Path(values[name]).absolute()
            if file == given or given in file.parents or file in given.parents:
                distances[name] = abs(len(file.parts) - len(given.parts))
    if not distances:
        return f"{os.fsdecode(error.filename)!r} cannot be used: {reason}"
    name = min(distances, key=lambda found: distances[found])
    where = f": {str(file)!r}" if distances[name] else ""
    return f"--{name.replace('_', '-')} {str(values[name])!r} cannot be written: {reason}{where}"


@contextmanager
def interruptible(left: str) -> Iterator[None]:
    """Let Ctrl-C say what a command leaves behind.

    Args:
        left: What was written, or that nothing was.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left) from None


def interrupted(stop: KeyboardInterrupt) -> str:
    """Return the line that a command ends with on Ctrl-C."""
    return f"interrupted; {stop}" if str(stop) else "interrupted"
