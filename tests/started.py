"""Commands in processes of their own, forked from one that has imported torch: to start Python anew takes 2 s each."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["started_imports"])


def _ensure_server() -> None:
    """Have a process that has imported everything, with one thread, and passive where a test asks for two.

    Until Python 3.13 it finds modules by the environment alone.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", PYTHONPATH=path):
        multiprocessing.forkserver.ensure_running()


@dataclass
class Done:
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


class Started:
    """A command that runs, with what :class:`subprocess.Popen` has of it."""

    def __init__(self, words: Sequence[Any], env: Mapping[str, str] | None, cwd: Any, group: bool, forks: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="started-")
        place, path = Path(self._folder.name), [entry for entry in sys.path if entry]
        given = (list(map(str, words)), dict(os.environ if env is None else env), str(cwd or os.getcwd()), path)
        _ensure_server()
        self._process = _CONTEXT.Process(target=_become, args=(*given, group, forks, str(place)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = 300) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still runs after {timeout} seconds"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def said(self) -> tuple[str, str]:
        """Return what it has written so far to its output and to its errors."""
        files = [Path(self._folder.name) / name for name in ("out", "err")]
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return out, err

    def communicate(self, timeout: float | None = 300) -> tuple[str, str]:
        self.wait(timeout)
        return self.said()


def start(
    words: Sequence[Any],
    env: Mapping[str, str] | None = None,
    cwd: Any = None,
    group: bool = False,
    forks: bool = False,
) -> Started:
    """Start ``python`` with the words that follow: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``.

    Args:
        words: The words.
        env: Its environment; this process's by default.
        cwd: Its folder; this process's by default.
        group: Whether it leads a group of processes of its own.
        forks: Whether workers that it spawns are forked from it instead: they too have imported torch then.
    """
    return Started(words, env, cwd, group, forks)


def run(
    words: Sequence[Any],
    env: Mapping[str, str] | None = None,
    cwd: Any = None,
    timeout: float = 300,
    forks: bool = False,
) -> Done:
    """Run ``python`` with these words to its end."""
    process = start(words, env, cwd, forks=forks)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return Done(process.returncode, out, err)


def _hear_signals() -> None:
    """Take signals as Python does."""
    for known in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(known, signal.default_int_handler if known == signal.SIGINT else signal.SIG_DFL)


class _Forked(popen_fork.Popen):
    """A worker that is forked where one would be spawned: it takes signals as that one would."""

    def _launch(self, process: Any) -> None:
        begin = process._bootstrap
        process._bootstrap = lambda **given: (_hear_signals(), begin(**given))[1]
        super()._launch(process)  # type: ignore[misc]


def _become(
    words: list[str], env: dict[str, str], cwd: str, path: list[str], group: bool, forks: bool, place: str
) -> None:
    """Be ``python WORDS`` in this process, which has been forked; end as Python does."""
    if group:
        os.setpgid(0, 0)
    if forks:
        multiprocessing.context.SpawnProcess._Popen = staticmethod(_Forked)  # type: ignore[method-assign]
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    _hear_signals()  # a shell may have them ignored in the background
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # It is nobody's child, to those who ask Python.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.current_process()._identity = ()  # type: ignore[attr-defined]
    multiprocessing.current_process().name = "MainProcess"
    first = {"-m": cwd, "-c": cwd}.get(words[0], os.path.dirname(os.path.abspath(words[0])))
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            if not hasattr(sys.modules.get(words[1]), "__path__"):
                sys.modules.pop(words[1], None)  # it runs anew, as the main module
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
