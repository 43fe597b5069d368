"""The entry point of the command: handles ``--version`` before anything large is imported."""

from __future__ import annotations

import sys

import ekfac


def main() -> None:
    """Run the command."""
    if sys.argv[1:] == ["--version"]:
        print(f"ekfac {ekfac.__version__}")
        return
    from ekfac.cli.main import main as run
    from ekfac.lab.training.ranks import leave

    try:
        run()
    except SystemExit as stop:
        leave(stop.code)
    leave(None)
