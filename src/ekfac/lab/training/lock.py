"""One owner per run folder, by a lock of the operating system, which is released when its process dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from ekfac.lab.registry import LabError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of a file system without locks, where folders are used without locking.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# Seconds that an owner may take to write its name after acquiring the lock.
_TO_SIGN = 1.0


class Lock:
    """The right to write into a folder.

    The file ``.lock`` names the owner; what counts is the lock on it, not that it exists.

    Args:
        folder: The folder, which need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / ".lock"
        self._stream: IO[str] | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._stream is not None

    def acquire(self) -> None:
        """Acquire the folder, creating it if necessary; do nothing if this object already holds it.

        Raises:
            LabError: If another process, or another run of this one, holds it; the message names the owner.
        """
        while self._stream is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            stream = self.file.open("a+")
            try:
                if fcntl is not None:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    stream.close()
                    raise self._refused() from None
            # The previous owner may have removed the file between the two calls; this lock is then on a deleted file.
            if not _same_file(stream, self.file):
                stream.close()
                continue
            self._stream = stream
        self._stream.seek(0)
        self._stream.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}, self._stream)
        self._stream.flush()

    def release(self) -> None:
        """Release the folder."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)
            self._stream.close()
            self._stream = None

    def _refused(self) -> LabError:
        """Return the error that names the owner, who writes its name shortly after acquiring the lock."""
        owner, patience = "another process", time.monotonic() + _TO_SIGN
        while owner == "another process" and time.monotonic() < patience:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads(self.file.read_text())
                owner = f"process {int(found['pid'])} on {found['host']} since {found['since']}"
            time.sleep(0.01)
        return LabError(f"{self.folder} is in use by {owner}: wait until it is over, or name another folder")


def _same_file(stream: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
