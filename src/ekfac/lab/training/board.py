"""TensorBoard events of a run, where the package is installed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes the numbers of records as events.

    Args:
        folder: Where the events go.
        purge_step: The first epoch that is still to come; later events of a run that was cut short do not count.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_its_thread()
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of an epoch; they are on disk when this returns."""
        for name, value in record.items():
            scalars = {f"{name}/{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
            for tag, scalar in scalars.items():
                if isinstance(scalar, int | float) and not isinstance(scalar, bool):
                    self._writer.add_scalar(tag, scalar, record["epoch"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file; what it lacks then is in metrics.jsonl."""
        with contextlib.suppress(OSError):
            self._writer.close()


def _silence_its_thread() -> None:
    """Keep the writer's thread from printing a traceback where it cannot write: the next flush raises the error."""
    before = threading.excepthook
    if getattr(before, "_of_board", False):
        return

    def hook(what: threading.ExceptHookArgs) -> None:
        if not (isinstance(what.exc_value, OSError) and type(what.thread).__name__ == "_AsyncWriterThread"):
            before(what)

    hook._of_board = True  # type: ignore[attr-defined]
    threading.excepthook = hook
