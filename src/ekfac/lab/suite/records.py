"""The suite's records: one JSON line per run in DIR/results.jsonl, appended at its end and never rewritten."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ekfac import sealed
from ekfac.lab.registry import LabError
from ekfac.lab.training.lock import Lock

RESULTS, CONFIG = "results.jsonl", "config.json"
OVER = ("finished", "diverged")
Record = Mapping[str, Any]


class Records:
    """All runs in a folder, from every ``*.jsonl`` in it, so that files of several machines can be combined."""

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
        line = sealed.dumps(dict(record))
        with file.open("ab") as stream:
            # End a partial line left by a killed process, so that this record has its own line.
            if stream.tell() and not _ends_whole(file):
                stream.write(b"\n")
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self._take(record)


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _read(file: Path) -> Iterator[Record]:
    """Yield the records of a file, skipping partial lines.

    Raises:
        LabError: If a complete line is not a record, or was altered after it was written.
    """
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True)):
        if not line.strip():
            continue
        try:
            record, _ = sealed.loads(line)
        except sealed.Altered as error:
            raise LabError(f"{file}, line {number + 1} cannot be read: {error}") from error
        except ValueError:
            continue  # cut off by a kill; the run is made again
        wrong = _wrong(record)
        if wrong is not None:
            raise LabError(f"{file}, line {number + 1} is not a record of the suite: {wrong}")
        yield record


def _wrong(record: Any) -> str | None:
    """Return what is wrong with the entries that selection, report and pictures read; None if nothing."""
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in ("key", "status")):
        return "key and status must be text"
    if record["status"] not in OVER:
        return None
    for name, kind in (("measure", str), ("method", str), ("steps", int), ("machine", dict), ("versions", dict)):
        if not isinstance(record.get(name), kind):
            return f"{name} is missing, or of another kind"
    if not {"torch", "source"} <= record["versions"].keys() or "gpu" not in record["machine"]:
        return "machine or versions have lost an entry"
    history = record.get("history")
    if not isinstance(history, list) or not history or not all(isinstance(entry, dict) for entry in history):
        return "history must be a list of evaluations"
    for entry in history:
        for name in ("step", "seconds", "train_loss", "validation_loss", "validation_accuracy"):
            value = entry.get(name, 0.0 if name.startswith("validation") else None)
            absent = value is None and (name.startswith("validation") or record["status"] != "finished")
            if not absent and (isinstance(value, bool) or not isinstance(value, int | float)):
                return f"history: {name} must be a number, not {value!r}"
    if record["status"] == "finished" and not any(entry["step"] >= record["steps"] / 10 for entry in history):
        return "history ends before a tenth of the steps"
    return None


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no other command writes into it.

    Raises:
        LabError: If another process holds it; the message says which.
    """
    lock = Lock(folder)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_config(folder: Path, data: Mapping[str, Any], quick: bool) -> None:
    """Store the configuration with the records, for the report."""
    sealed.write(folder / CONFIG, sealed.dumps({"quick": quick, "configuration": data}, indent=1))


def read_config(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the stored configuration, and whether its small form was run.

    Raises:
        LabError: If there is none.
    """
    file = folder / CONFIG
    try:
        found, _ = sealed.loads(file.read_bytes())
        if not isinstance(found, dict) or not {"configuration", "quick"} <= found.keys():
            raise LabError(f"{folder} holds no runs of the suite: its {CONFIG} is of something else")
        return found["configuration"], bool(found["quick"])
    except FileNotFoundError:
        raise LabError(f"{folder} holds no runs of the suite: there is no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error
