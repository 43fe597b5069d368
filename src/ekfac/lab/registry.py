"""Registries of tasks, datasets and optimizers, and plugins that add to them."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class LabError(Exception):
    """Bad usage or bad input: one clear line for the user, exit status 2, never a traceback."""


class Registry(Generic[T]):
    """Items of one kind by name; an unknown name raises an error that lists the known ones.

    Args:
        kind: What the items are, for messages.
        plugins: Whether plugins can add to them, which the error then mentions.
    """

    def __init__(self, kind: str, *, plugins: bool = False) -> None:
        self.kind = kind
        self._hint = "; one of your own needs --plugin FILE.py, the file that registers it" if plugins else ""
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        """Register an item.

        Raises:
            LabError: If the name is taken, so that a plugin cannot silently replace what others use.
        """
        if name in self._items:
            raise LabError(f"{self.kind} {name!r} is already registered; choose another name")
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        """Return the item of that name.

        Raises:
            LabError: If there is none; the message lists the names that exist.
        """
        if name not in self._items:
            raise LabError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}{self._hint}")
        return self._items[name]

    def names(self) -> list[str]:
        """Return all names, in the order of registration."""
        return list(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)


# Files by their absolute path, as a program may change its folder before it starts workers.
_loaded: list[str] = []


def load_plugin(where: str) -> None:
    """Import a user's module, whose import registers tasks, datasets or optimizers.

    Args:
        where: A path ending in ``.py``, or the dotted name of a module; loading it again does nothing.

    Raises:
        LabError: If the file or module does not exist or fails on import.
    """
    is_file = _is_file(where)
    key = str(Path(where).resolve()) if is_file else where
    if key in _loaded:
        return
    try:
        if is_file:
            _import_file(Path(where))
        else:
            importlib.import_module(where)
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        raise LabError(f"plugin {where!r} failed on import: {type(error).__name__}: {error}") from error
    _loaded.append(key)


def loaded_plugins() -> list[str]:
    """Return the plugins loaded in this process, for workers that it starts."""
    return list(_loaded)


def missing_plugins(names: Iterable[str]) -> list[str]:
    """Return which of the plugins named in a file are not loaded.

    Plugins are loaded only if a command line or a script names them, never because a file does. A plugin file is
    identified by its name, wherever it is now; a module counts as loaded once it is imported.
    """
    files = {Path(name).name for name in _loaded}
    return [name for name in names if (Path(name).name not in files if _is_file(name) else name not in sys.modules)]


def require_plugins(names: Iterable[str]) -> None:
    """Refuse settings that need plugins the user has not loaded.

    Raises:
        LabError: If one of the plugins is not loaded; the message says what to pass.
    """
    missing = missing_plugins(names)
    if missing:
        words = " ".join(f"--plugin {shlex.quote(name)}" for name in missing)
        raise LabError(f"the settings need plugins that are not loaded; if you trust them, pass {words}")


def plugin_fault(error: BaseException) -> str:
    """Return what went wrong in a plugin's code and on which line of it, or nothing if no plugin's code was running."""
    files = {getattr(sys.modules.get(name), "__file__", None) or name for name in _loaded}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    if not frames or isinstance(error, LabError):
        return ""
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {described(error)}"


def described(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn a failure of what a task or a plugin brings into one line that names it.

    Raises:
        LabError: In place of an error that bad data or a bad function causes; of files and memory, others tell.
    """
    try:
        yield
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise LabError(f"{what} failed: {plugin_fault(error) or described(error)}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory was short; torch has an exception class for GPUs, but only a message for CPUs."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "t allocate memory" in str(error)


def portable(where: str) -> str:
    """Return a plugin's name without folders of this machine: a file's absolute path becomes relative or its name."""
    path = Path(where)
    if not _is_file(where) or not path.is_absolute():
        return where
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _is_file(where: str) -> bool:
    return where.endswith(".py")


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise LabError(f"plugin {str(path)!r} does not exist")
    name = f"ekfac_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise LabError(f"plugin {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as by the import system: dataclasses and pickle look a module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
