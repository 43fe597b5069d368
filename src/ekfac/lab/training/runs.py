"""A run's folder: config.json, metrics.jsonl, checkpoint.pt and TensorBoard events.

An epoch's line goes to metrics.jsonl first, then checkpoint.pt is replaced atomically; the checkpoint holds
the whole history. A process killed between the two leaves one line too many; resuming takes it off again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError

FORMAT = 1
# The environment's word for how many runs share the machine; their seconds do not count then.
PROCESSES = "EKFAC_PROCESSES"


@dataclass
class Run:
    """What a run gave.

    Attributes:
        config: Its settings.
        history: One record an epoch, the first (epoch 0) before any training.
        status: ``"finished"``, ``"diverged"``, ``"interrupted"`` or, read from a folder, ``"unfinished"``.
        about: Versions, machine, data, number of parameters, the loss's floor, the command.
        path: Its folder, if it has one.
        timed: Whether its seconds count: not where runs shared a machine.
    """

    config: TrainConfig
    history: list[dict[str, Any]] = field(default_factory=list)
    status: str = "unfinished"
    about: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    timed: bool = True

    @property
    def exit_code(self) -> int:
        """Return 0 for a finished run, 1 for a diverged one, 130 for one that Ctrl-C ended."""
        return {"finished": 0, "diverged": 1, "interrupted": 130}.get(self.status, 1)

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
        "processes": int(os.environ.get(PROCESSES, "1")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of what a result can depend on."""
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
    """Return twelve hex digits of the library's own files: defaults change between versions of the same number."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("curvature", "optim"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


class RunFolder:
    """Writes one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"
        self._board: Any = None

    def holds_run(self) -> bool:
        """Tell whether a run was started here."""
        return self.config_file.exists() or self.metrics_file.exists() or self.checkpoint_file.exists()

    def clear(self) -> None:
        """Remove a run's files, and nothing else that may lie in the folder."""
        for pattern in ("config.json*", "metrics.jsonl*", "checkpoint.pt*", "events.out.tfevents.*"):
            for file in self.path.glob(pattern):
                file.unlink()

    def start(self, config: TrainConfig, about: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Write config.json and exactly this history, then open the TensorBoard events."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "config": config.to_dict(), "about": about}, indent=2, allow_nan=False)
        _replace(self.config_file, (text + "\n").encode())
        _replace(self.metrics_file, "".join(_line(record) for record in history).encode())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(self.path), purge_step=len(history))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append an epoch's record to metrics.jsonl and the TensorBoard events, on disk when this returns."""
        with self.metrics_file.open("a") as stream:
            stream.write(_line(record))
            stream.flush()
            os.fsync(stream.fileno())
        if self._board is not None:
            for name, value in record.items():
                scalars = {f"{name}/{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
                for tag, scalar in scalars.items():
                    if isinstance(scalar, int | float) and not isinstance(scalar, bool):
                        self._board.add_scalar(tag, scalar, record["epoch"])
            self._board.flush()

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; whoever is killed meanwhile still has the old one, whole."""
        part = self.checkpoint_file.with_name("checkpoint.pt.part")
        with part.open("wb") as stream:
            torch.save(dict(state), stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self.checkpoint_file)

    def load(self) -> dict[str, Any] | None:
        """Return the checkpoint, or ``None`` if the run was killed before its first.

        Raises:
            LabError: If the file is broken.
        """
        if not self.checkpoint_file.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.checkpoint_file, map_location="cpu", weights_only=True)
            broken = not (isinstance(state, dict) and {"trainer", "history"} <= state.keys())
        except OSError:
            raise
        except Exception:
            # What torch says is left out: it advises to load without the check that keeps a file from running code.
            broken = True
        if broken:
            raise LabError(f"{self.checkpoint_file} is corrupt, or not a checkpoint of this library")
        return state

    def close(self) -> None:
        """Close the TensorBoard events."""
        if self._board is not None:
            self._board.close()


def read_config(path: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Read config.json: the settings, and what is known about the run.

    Raises:
        LabError: If there is none or it is broken.
    """
    file = path / "config.json"
    try:
        data = json.loads(file.read_text())
        return TrainConfig.from_dict(data["config"]), data["about"]
    except FileNotFoundError:
        raise LabError(f"{path} holds no run: there is no config.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run's folder back, also one that is still being written or was killed.

    Raises:
        LabError: If it holds no run.
    """
    folder = Path(path)
    config, about = read_config(folder)
    history = []
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().split("\n") if metrics.exists() else []
    for number, line in enumerate(lines[:-1]):  # what follows the last newline was cut off in the middle
        try:
            history.append(json.loads(line))
        except ValueError as error:
            raise LabError(f"{metrics}, line {number + 1} cannot be read: {error}") from error
    return Run(config, history, _status(config, history), about, folder)


def _status(config: TrainConfig, history: list[dict[str, Any]]) -> str:
    if history and history[-1]["diverged"]:
        return "diverged"
    return "finished" if history and history[-1]["epoch"] >= (config.epochs or 0) else "unfinished"


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _replace(file: Path, content: bytes) -> None:
    part = file.with_name(file.name + ".part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
