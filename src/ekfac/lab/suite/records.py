"""The suite's records: one JSON line a run in DIR/results.jsonl, written when it is over, never rewritten."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ekfac.lab.registry import LabError

RESULTS, CONFIG, LOCK = "results.jsonl", "config.json", "lock"
OVER = ("finished", "diverged")
Record = Mapping[str, Any]


class Records:
    """All runs in a folder: of every ``*.jsonl`` in it, so that the files of several machines can lie side by side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, Record] = {}
        self.timed: dict[str, Record] = {}
        self.failed: dict[str, Record] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for record in _read(file):
                self._take(record)

    def _take(self, record: Record) -> None:
        key = record["key"]
        if record["status"] not in OVER:
            self.failed[key] = record
            return
        self.runs.setdefault(key, record)
        if record.get("timed"):
            self.timed.setdefault(key, record)

    def add(self, record: Record) -> None:
        """Write one line, on disk when this returns."""
        file = self.folder / RESULTS
        line = json.dumps(record, allow_nan=False) + "\n"
        with file.open("ab") as stream:
            # A line that a killed process left half-written is closed, so that this one stands alone.
            if stream.tell() and not _ends_whole(file):
                stream.write(b"\n")
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._take(record)


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _read(file: Path) -> Iterator[Record]:
    """Give the records of a file; a line that was cut short is passed over.

    Raises:
        LabError: If a whole line is no record.
    """
    for number, line in enumerate(file.read_text().splitlines()):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off by a kill: the run is made again
        if not isinstance(record, dict) or not {"key", "status"} <= record.keys():
            raise LabError(f"{file}, line {number + 1} is no record of the suite")
        yield record


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold a folder, so that no second command writes into it.

    Raises:
        LabError: If another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as stream:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LabError(f"{folder} is in use by another command; wait for it, or choose another folder") from None
        yield


def write_config(folder: Path, data: Mapping[str, Any], quick: bool) -> None:
    """Keep the configuration beside the records, for the report."""
    part = folder / f"{CONFIG}.part"
    part.write_text(json.dumps({"quick": quick, "configuration": data}, indent=1) + "\n")
    part.replace(folder / CONFIG)


def read_config(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the configuration that was kept, and whether its small form was run.

    Raises:
        LabError: If there is none.
    """
    file = folder / CONFIG
    try:
        found = json.loads(file.read_text())
        return found["configuration"], found["quick"]
    except FileNotFoundError:
        raise LabError(f"{folder} holds no runs of the suite: there is no {CONFIG}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{file} cannot be read: {error!r}") from error
