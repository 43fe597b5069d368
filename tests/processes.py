"""Starting other processes, and looking at them through /proc."""

import signal
import time
from collections.abc import Callable
from pathlib import Path


def _stat(pid: int | str) -> list[str] | None:
    """Return a process's state, its parent's number and so on; None for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """Return the numbers of a process's children."""
    stats = {folder.name: _stat(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    return [int(name) for name, stat in stats.items() if stat is not None and int(stat[1]) == pid]


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that only waits for its parent to notice its end does not."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def hear_ctrl_c() -> None:
    """For ``preexec_fn``: tests that a shell runs in the background ignore SIGINT, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so after {seconds} seconds"
        time.sleep(0.02)
