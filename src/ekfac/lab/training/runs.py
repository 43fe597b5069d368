"""A run's folder: config.json, metrics.jsonl, checkpoint.pt and TensorBoard events.

An epoch's line is first appended to metrics.jsonl, then checkpoint.pt is replaced atomically; the checkpoint contains
the whole history. A process killed between the two leaves an extra line, which resuming removes. Each file, and each
line of metrics.jsonl, has a checksum (:mod:`ekfac.sealed`), and one process owns the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ekfac import sealed
from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError
from ekfac.lab.training.board import Board
from ekfac.lab.training.lock import Lock
from ekfac.lab.training.records import check_about, check_record

# Format 1 had no checksums.
FORMAT = 2
# The environment variable with the number of runs that share the machine; if set, their seconds do not count.
PROCESSES = "EKFAC_PROCESSES"
# The record that ends a zip archive, before its comment; the last two bytes are the comment's length.
_END, _END_SIZE = b"PK\x05\x06", 22


@dataclass
class Run:
    """A run and its results.

    Attributes:
        config: Its settings.
        history: One record per epoch, the first (epoch 0) before any training.
        status: ``"finished"``, ``"diverged"``, ``"interrupted"`` or, read from a folder, ``"unfinished"``.
        about: Versions, machine, data, number of parameters, the loss's floor, the command.
        path: Its folder, if it has one.
        timed: Whether its seconds count; not if runs shared a machine.
        notes: Remarks from reading it, such as a file without a checksum.
        stopped_by: The signal that interrupted it, if not Ctrl-C.
        resumable: Whether an interrupted run left a checkpoint.
    """

    config: TrainConfig
    history: list[dict[str, Any]] = field(default_factory=list)
    status: str = "unfinished"
    about: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    timed: bool = True
    notes: list[str] = field(default_factory=list)
    stopped_by: int | None = None
    resumable: bool = False

    @property
    def exit_code(self) -> int:
        """Return 0 for a finished run, 1 for a diverged one; 130, 143 or 129 if Ctrl-C, TERM or HUP ended it."""
        return {"finished": 0, "diverged": 1, "interrupted": 128 + (self.stopped_by or 2)}.get(self.status, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {
            "status": self.status,
            "out": str(self.path) if self.path else None,
            "config": self.config.to_dict(),
            "about": self.about,
            "history": self.history,
        }


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores and threads, GPU, system."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": _processes(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processes() -> int:
    text = os.environ.get(PROCESSES) or "1"
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LabError(f"{PROCESSES} must be a whole number of runs that share the machine, not {text!r}")
    return int(text)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages that results can depend on."""
    from importlib import metadata

    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("ekfac", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    found["source"] = source_digest()
    return found


def source_digest() -> str:
    """Return a hash of the library's files, twelve hex digits: defaults can change without the version number."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in ("curvature", "optim"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


class RunFolder:
    """Writes one run's folder, of which it is the only owner from :meth:`acquire` to :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"
        self.lock = Lock(path)
        self._board: Board | None = None

    def holds_run(self) -> bool:
        """Return whether a run was started here."""
        return self.config_file.exists() or self.metrics_file.exists() or self.checkpoint_file.exists()

    def clear(self) -> None:
        """Remove a run's files, and nothing else in the folder."""
        self.lock.acquire()
        names = ("config.json", "metrics.jsonl", "checkpoint.pt", "best.pt", "tags.json", "events.out.tfevents.")
        for pattern in (f"{name}*" for name in names):
            for file in self.path.glob(pattern):
                file.unlink()

    def start(self, config: TrainConfig, about: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Write config.json and exactly this history, then open the TensorBoard events."""
        self.lock.acquire()
        for file in self.path.glob("*.part"):  # of a process that was killed
            file.unlink()
        self.write_config(config, about)
        sealed.write(self.metrics_file, b"".join(sealed.dumps(record) for record in history))
        with contextlib.suppress(ImportError), _named(self.path):
            self._board = Board(self.path, purge_step=history[-1]["step"] + 1 if history else 0)
            self._board.add_settings(config)

    def write_config(self, config: TrainConfig, about: Mapping[str, Any]) -> None:
        """Write config.json."""
        content = {"format": FORMAT, "config": config.to_dict(), "about": dict(about)}
        sealed.write(self.config_file, sealed.dumps(content, indent=2))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append an epoch's record to metrics.jsonl and the TensorBoard events, on disk when this returns."""
        line = sealed.dumps(dict(record))
        with _named(self.metrics_file), self.metrics_file.open("ab", buffering=0) as stream:
            whole = stream.tell()
            try:
                left = memoryview(line)
                while left:
                    left = left[stream.write(left) :]
                os.fsync(stream.fileno())
            except BaseException:
                stream.truncate(whole)  # remove a partial line before appending the next
                raise
        if self._board is not None:
            with _named(self.path):
                self._board.add(record)

    def add_steps(self, losses: Sequence[float], before: int) -> None:
        """Add the loss of every batch to the TensorBoard events; ``before`` steps came before them."""
        if self._board is not None:
            with _named(self.path):
                self._board.add_steps(losses, before)

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint atomically: a kill leaves the old one intact."""
        _save(self.checkpoint_file, state)

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint of the epoch with the best validation."""
        _save(self.path / "best.pt", state)

    def load(self, notes: list[str] | None = None) -> dict[str, Any] | None:
        """Return the checkpoint, or ``None`` if the run was killed before its first.

        Args:
            notes: Receives a line if the file has no checksum, as in older versions.

        Raises:
            LabError: If the file is broken.
        """
        if not self.checkpoint_file.exists():
            return None
        try:
            with self.checkpoint_file.open("rb") as stream:
                if not _is_sealed(stream) and notes is not None:
                    notes.append(
                        f"{self.checkpoint_file} has no checksum, as an older version wrote it; its CRC is right"
                    )
                stream.seek(0)
                state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
            broken = not (isinstance(state, dict) and {"trainer", "history"} <= state.keys())
        except OSError:
            raise
        except Exception:
            # torch's message is omitted: it suggests disabling the check that keeps a file from running code.
            broken = True
        if broken:
            raise LabError(f"{self.checkpoint_file} is corrupt, or not a checkpoint of this library")
        return state

    def close(self) -> None:
        """Close the TensorBoard events and release the folder."""
        try:
            if self._board is not None:
                self._board.close()
        finally:
            self._board = None
            self.lock.release()


def _save(file: Path, state: Mapping[str, Any]) -> None:
    with sealed.replacing(file) as stream:
        torch.save(dict(state), stream)
        stream.seek(-2, os.SEEK_END)
        stream.write(len(sealed.BLANK).to_bytes(2, "little") + sealed.BLANK.encode())
        sealed.seal(stream, stream.tell() - sealed.DIGITS)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Make errors of the file system name the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def _is_sealed(stream: BinaryIO) -> bool:
    """Return whether a checkpoint has a seal, after verifying it; an older one must have the right CRC.

    Raises:
        ValueError: If it is damaged.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _END_SIZE - len(sealed.BLANK)))
    tail = stream.read()
    if tail[_END_SIZE : -sealed.DIGITS] == sealed.BLANK[: -sealed.DIGITS].encode():
        if not sealed.intact(stream, size - sealed.DIGITS):
            raise sealed.Altered("the checksum does not match")
        return True
    end = tail[-_END_SIZE:]
    if end[:4] != _END or end[-2:] != b"\0\0":
        raise sealed.Altered("the checksum is broken")
    stream.seek(0)
    with zipfile.ZipFile(stream) as archive:
        if archive.testzip() is not None:
            raise sealed.Altered("the archive is broken")
    return False


def read_config(path: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Read config.json: the settings, and the information about the run.

    Raises:
        LabError: If there is none, or it is broken or altered.
    """
    return _read_config(path)[:2]


def _read_config(path: Path) -> tuple[TrainConfig, dict[str, Any], bool]:
    """Return the settings, the information about the run, and whether the file has a checksum."""
    file = path / "config.json"
    try:
        data, has_seal = sealed.loads(file.read_bytes())
        if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
            raise ValueError("it must be an object with the settings under 'config'")
        if data.get("format", 1) != (FORMAT if has_seal else 1):
            raise ValueError(f"its format is {data.get('format')!r}{'' if has_seal else ', and it has no checksum'}")
        return TrainConfig.from_dict(data["config"]), check_about(data.get("about")), has_seal
    except FileNotFoundError:
        raise LabError(f"{path} holds no run: there is no config.json") from None
    except (OSError, ValueError, LabError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run's folder, even if it is still being written or the run was killed.

    Raises:
        LabError: If it contains no run, or its files are broken or altered.
    """
    folder = Path(path)
    config, about, has_seal = _read_config(folder)
    metrics = folder / "metrics.jsonl"
    history: list[dict[str, Any]] = []
    try:
        lines = metrics.read_bytes().split(b"\n") if metrics.exists() else [b""]
        *whole, rest = lines  # text after the last newline is a partial line
        for line in whole:
            history.append(_read_record(line + b"\n", len(history), has_seal))
        if _ends_otherwise(rest, len(history), has_seal):
            raise ValueError("its last character was changed")
    except (OSError, ValueError) as error:
        raise LabError(f"{metrics}, line {len(history) + 1} cannot be read: {error}") from error
    return Run(config, history, _status(config, history), about, folder)


def _read_record(line: bytes, epoch: int, must_be_sealed: bool) -> dict[str, Any]:
    record, has_seal = sealed.loads(line)
    if must_be_sealed and not has_seal:
        raise sealed.Altered("its checksum is missing")
    return check_record(record, epoch)


def _ends_otherwise(rest: bytes, epoch: int, must_be_sealed: bool) -> bool:
    """Return whether the rest is a complete line with a damaged newline, rather than a partial line."""
    with contextlib.suppress(ValueError):
        _read_record(rest[:-1] + b"\n", epoch, must_be_sealed)
        return True
    return False


def _status(config: TrainConfig, history: list[dict[str, Any]]) -> str:
    if history and history[-1]["diverged"]:
        return "diverged"
    over = bool(history) and (history[-1]["epoch"] >= (config.epochs or 0) or bool(history[-1].get("stopped")))
    return "finished" if over else "unfinished"
