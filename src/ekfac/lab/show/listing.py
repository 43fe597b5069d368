"""Lists of runs, and differences between two runs, as plain data for tables and JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekfac.lab.labels import describe, shown_method
from ekfac.lab.training.runs import Run
from ekfac.lab.training.tags import read_tags

# Settings that do not change what is trained.
_NO_CHANGE = ("device", "epochs", "plugins")


def row(run: Run) -> dict[str, Any]:
    """Return a run as one row of a list; losses are minus their floor."""
    last = run.history[-1] if run.history else {}
    written = read_tags(run.path) if run.path is not None else None
    return {
        "run": None if run.path is None else _short(run.path),
        "task": run.config.task,
        "method": shown_method(run.config),
        "setting": describe(run.config),
        "seed": run.config.seed,
        "epoch": last.get("epoch", 0),
        "epochs": run.config.epochs,
        "train_loss": _above(run, last, "train"),
        "validation_loss": _above(run, last, "validation"),
        "validation_accuracy": last.get("validation_accuracy"),
        "seconds": last.get("seconds"),
        "status": run.status,
        "tags": [] if written is None else list(written.tags),
        "note": "" if written is None else written.note,
    }


def _short(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def _above(run: Run, record: dict[str, Any], split: str) -> float | None:
    value = record.get(f"{split}_loss")
    return None if value is None else float(value) - float((run.about.get("floor") or {}).get(split, 0.0))


def sorted_rows(rows: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Sort rows by one of their columns; rows without a value there come last."""
    return sorted(rows, key=lambda one: (one[by] is None, one[by] if one[by] is not None else 0))


def differences(first: Run, second: Run) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return what differs between two runs: settings, versions, machine and results."""
    settings = [{**run.config.to_dict(), **run.config.options, "options": None} for run in (first, second)]
    sides = {"settings": settings}
    for name in ("versions", "machine"):
        sides[name] = [dict(run.about.get(name, {})) for run in (first, second)]
    sides["data"] = [
        {**run.about.get("examples", {}), "sha256": run.about.get("data_sha256")} for run in (first, second)
    ]
    results = [row(run) for run in (first, second)]
    kept = ("epoch", "train_loss", "validation_loss", "validation_accuracy", "seconds", "status")
    sides["result"] = [{name: one[name] for name in kept} for one in results]
    found = {name: _different(*pair) for name, pair in sides.items()}
    return {name: pairs for name, pairs in found.items() if pairs}


def _different(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def repeated(before: Run, after: Run) -> str:
    """Describe how a repeated run compares with the original, at the last epoch that both have.

    Losses are minus their floor. Changed settings are named, as results then need not agree.
    """
    epoch = min(len(before.history), len(after.history)) - 1
    if epoch < 0:
        return "there is nothing to compare: a run has no record"
    old, new = (_above(run, run.history[epoch], "train") for run in (before, after))
    words = ["diverged" if loss is None else f"training loss {loss:.6g}" for loss in (new, old)]
    if old == new:
        return f"the same as recorded after epoch {epoch}: {words[0]}"
    words[1] += "" if before.about.get("data_sha256") == after.about.get("data_sha256") else ", on other data"
    apart = f" ({abs(new - old) / abs(old):.2g} apart)" if old and new is not None else ""
    changed = differences(before, after).get("settings", {})
    with_ = ", ".join(f"{name} {new}" for name, (_, new) in changed.items() if name not in _NO_CHANGE)
    return f"after epoch {epoch}{f' with {with_}' if with_ else ''}: {words[0]}; recorded: {words[1]}{apart}"
