"""What figures measured, kept in a file: pages quote it, and pictures are drawn from it again in seconds."""

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
        file: The JSON file that keeps them; ``None`` keeps nothing.
        more: Other such files, which are only read.
        say: Is told that something is measured, which may take minutes.
        quick: Whether those are asked for, unless said otherwise, that were measured on less data.
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
        """Return a figure's numbers, if they are there, and of this dataset and size.

        Raises:
            LabError: If a file holds something else under that name.
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
        """Keep a figure's numbers, with what it takes to repeat them, and return them as they are kept."""
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
    """Write numbers to six digits: the same picture from the file as from the measurement."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
