"""TensorBoard events of a run, if the package is installed."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ekfac.lab.config import TrainConfig


class Board:
    """Writes the numbers of records as events.

    Args:
        folder: The folder of the events.
        purge_step: The first step still to come; later events, of an interrupted run, are discarded.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_its_thread()
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def add_settings(self, config: TrainConfig) -> None:
        """Write the settings for TensorBoard's HPARAMS page, with the losses to compare them by."""
        from torch.utils.tensorboard.summary import hparams

        flat = {**config.to_dict(), **config.options}
        plain = {name: value for name, value in flat.items() if isinstance(value, bool | int | float | str)}
        for summary in hparams(plain, {"train_loss": 0.0, "validation_loss": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def add_steps(self, losses: Sequence[float], before: int) -> None:
        """Write the loss of every batch; ``before`` steps came before them."""
        for number, loss in enumerate(losses, 1):
            if math.isfinite(loss):
                self._writer.add_scalar("batch_loss", loss, before + number)
        self._writer.flush()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of an epoch; they are on disk when this returns."""
        for name, value in record.items():
            scalars = {f"{name}/{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
            for tag, scalar in scalars.items():
                if isinstance(scalar, int | float) and not isinstance(scalar, bool):
                    self._writer.add_scalar(tag, scalar, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file; anything it lacks is in metrics.jsonl."""
        with contextlib.suppress(OSError):
            self._writer.close()


def _silence_its_thread() -> None:
    """Keep the writer's thread from printing a traceback if it cannot write; the next flush raises the error."""
    before = threading.excepthook
    if getattr(before, "_of_board", False):
        return

    def hook(what: threading.ExceptHookArgs) -> None:
        if not (isinstance(what.exc_value, OSError) and type(what.thread).__name__ == "_AsyncWriterThread"):
            before(what)

    hook._of_board = True  # type: ignore[attr-defined]
    threading.excepthook = hook
