"""Stored measurements of figures: pages quote them, and pictures can be redrawn from them in seconds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ekfac import sealed
from ekfac.lab.registry import LabError
from ekfac.lab.training.runs import machine, versions


class Measures:
    """Numbers by the name of their figure, each with its command, machine and versions.

    Args:
        file: The JSON file to store them in; ``None`` stores nothing.
        more: Other such files, which are only read.
        say: Called before a measurement, which may take minutes.
        quick: Whether to use, by default, measurements on less data.
    """

    def __init__(
        self,
        file: str | Path | None = None,
        more: Sequence[str | Path] = (),
        say: Callable[[str], None] = lambda line: None,
        quick: bool = False,
    ) -> None:
        self.say, self.quick = say, quick
        self.file = None if file is None else Path(file)
        self._entries: dict[str, Any] = {}
        #: The figures whose numbers came from a file, and that file.
        self.read: dict[str, Path] = {}
        if self.file is not None and self.file.exists():
            self._entries = _read(self.file)
        self._more = {Path(other): _read(Path(other)) for other in more}

    def get(self, name: str, dataset: str | None = None, quick: bool | None = None) -> dict[str, Any] | None:
        """Return a figure's numbers, if stored for this dataset and size.

        Raises:
            LabError: If a file has something else under that name.
        """
        wanted = self.quick if quick is None else quick
        for file, entries in ((self.file, self._entries), *self._more.items()):
            entry = entries.get(name)
            if entry is None:
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("values"), dict):
                raise LabError(f"{file} cannot be read: {name} has no values")
            if dataset in (None, entry.get("dataset")) and wanted == entry.get("quick"):
                if file is not None:
                    self.read[name] = file
                return dict(entry["values"])
        return None

    def put(self, name: str, values: Mapping[str, Any], dataset: str, quick: bool = False) -> dict[str, Any]:
        """Store a figure's numbers, with what is needed to reproduce them; return them as stored."""
        rounded: dict[str, Any] = _rounded(values)
        if self.file is not None:
            words = ["ekfac", "figure", name, *(["--quick"] if quick else []), "--dataset", dataset]
            self._entries[name] = {
                "command": shlex.join([*words, "--measures", self.file.as_posix()]),
                "dataset": dataset,
                "quick": quick,
                "versions": versions(),
                "machine": machine(),
                "values": rounded,
            }
            self.file.parent.mkdir(parents=True, exist_ok=True)
            sealed.write(self.file, sealed.dumps(dict(sorted(self._entries.items())), indent=1))
        return rounded


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(sealed.loads(file.read_bytes())[0])
    except (OSError, ValueError, TypeError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error


def _rounded(value: Any) -> Any:
    """Round numbers to six digits, so that the file and the measurement give the same picture."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
