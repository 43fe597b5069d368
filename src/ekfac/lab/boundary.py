"""How commands end: messages for files that cannot be written, and for Ctrl-C, TERM and HUP. Needs only Python."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ekfac.lab.registry import LabError, is_out_of_memory

# The options that name a file or folder to write.
OUTPUTS = ("out", "measures", "write_plan", "data_dir")
_PART = re.compile(r"\.\d+\.part$")
# A shell's exit status for a command whose reader has closed the pipe: 128 plus the number of SIGPIPE.
UNREAD = 141


def outermost(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; silently 141 if the reader closed the pipe, as in ``| head``.

    Characters that the terminal's encoding lacks are escaped, as on standard error.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread():
            raise
        return UNREAD
    return status


class CommandParser(argparse.ArgumentParser):
    """A parser of a command line whose errors are :class:`LabError`."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise LabError(message)


def resumable(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command that can be resumed: it ends with one line and 2 on an error, and with 130 or so on Ctrl-C."""

    @functools.wraps(command)
    def ended(*arguments: Any) -> int:
        try:
            return command(*arguments)
        except LabError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as stop:
            stop.args = ("run the same command to resume",)
            print(interrupted(stop), file=sys.stderr)
            return exit_code(stop)

    return ended


def is_unread() -> bool:
    """Return whether the reader of standard output has closed the pipe; if so, discard the remaining output."""
    number = sys.stdout.fileno()
    if hasattr(select, "poll"):
        look = select.poll()
        look.register(number, 0)
        if not look.poll(0):
            return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
    return True


@contextmanager
def writing(values: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of the file system into one line that names the option.

    Args:
        values: The command's options by name.

    Raises:
        LabError: In place of an OSError about a file or an out-of-memory error, and for a name that is not text.
    """
    for name in OUTPUTS:
        if not _is_text(values.get(name)):
            raise LabError(f"--{name.replace('_', '-')} {str(values[name])!r} is not valid UTF-8; choose another name")
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise LabError(_refusal(error, values)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise LabError(f"out of memory: {(str(error).splitlines() or ['no details'])[0]}") from error


def _is_text(name: object) -> bool:
    # Undecodable bytes of a command line become lone surrogates, which TensorBoard and pages cannot write.
    return not isinstance(name, str) or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _refusal(error: OSError, values: Mapping[str, Any]) -> str:
    file = Path(_PART.sub("", os.fsdecode(error.filename))).absolute()  # a file is written beside its place first
    # Creating a folder in place of a file fails with FileExistsError.
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
    """Make Ctrl-C report what a command leaves behind.

    Args:
        left: What was written, or that nothing was.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = (left,)
        raise


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C's asked the process to end; code that handles Ctrl-C handles this too.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Make TERM and HUP end a command like Ctrl-C: with a message, cleanly, and resumable.

    A second signal ends it immediately. An ignored signal, such as HUP under ``nohup``, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        raise Stopped(number)

    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return 130 for Ctrl-C, and a shell's exit status for other signals."""
    return 128 + int(getattr(stop, "signal", signal.SIGINT))


def interrupted(stop: KeyboardInterrupt) -> str:
    """Return a command's last line on Ctrl-C, TERM or HUP."""
    by = signal_name(getattr(stop, "signal", None))
    return f"interrupted{by}; {stop}" if str(stop) else f"interrupted{by}"


def signal_name(number: int | None) -> str:
    """Return `` by SIGTERM``, or nothing for Ctrl-C."""
    with contextlib.suppress(ValueError):
        return "" if number is None else f" by {signal.Signals(number).name}"
    return f" by signal {number}"


def plainly(message: Warning | str, *where: Any, **more: Any) -> str:
    """Format a warning as one line, without its location in the library."""
    return f"warning: {message}\n"
