"""Tabulates which of the paper's figures and our tables are recorded, with command, cost and agreement."""

from __future__ import annotations

from collections.abc import Sequence

from ekfac.lab.labels import counted
from ekfac.lab.show.duration import duration
from ekfac.lab.show.evidence.network_tables import runs_for
from ekfac.lab.show.evidence.record import MISSING, Record, table
from ekfac.lab.show.figures import FIGURES, paper
from ekfac.lab.show.reproduce.catalogue import EXPERIMENTS
from ekfac.lab.show.reproduce.claims import Fresh
from ekfac.lab.training.runs import Run


def coverage(record: Record) -> str:
    """Write one row per experiment: where it appears, what is recorded, how to repeat it, and its claims' verdicts."""
    rows = []
    for name in EXPERIMENTS:
        entry = EXPERIMENTS.get(name)
        runs = _recorded(record, name)
        status, cost = _status(record, name, runs)
        fresh = Fresh(record.cifar if entry.halving else runs, record.measures, record.folder)
        known = status != MISSING
        answers = [claim.judge(fresh).partition(" | ")[0].strip("* ") for claim in entry.claims] if known else []
        agrees = ", ".join(dict.fromkeys(answers)) or "–"
        rows.append([name, entry.where, status, f"`ekfac reproduce {name}`", cost, agrees])
    return table(["figure or table", "where", "status", "command", "recorded cost", "verdicts"], rows, words=6)


def _recorded(record: Record, name: str) -> list[Run]:
    """Return the recorded runs of an experiment, without the searches for their settings."""
    if name == "autoencoder":
        return record.mnist
    if name == "frequency":
        return record.frequency
    if name == "sensitivity":
        return record.grid
    if name.startswith("comparison-"):
        task = name.removeprefix("comparison-")
        return record.runs(f"comparison/{task}/finals", f"comparison/{task}/seeds")
    return runs_for(record, name) if name in FIGURES else []


def _status(record: Record, name: str, runs: Sequence[Run]) -> tuple[str, str]:
    entry = EXPERIMENTS.get(name)
    if not entry.levels:
        measured = record.measures.get(entry.figure) is not None
        return ("measured on full MNIST" if measured else "computed on the spot"), "–"
    if not runs:
        return MISSING, "–"
    seconds = sum(run.history[-1]["seconds"] for run in runs if run.history)
    lacks = paper.lacks(entry.figure, runs) if entry.halving else []
    status = f"recorded; missing: {'; '.join(lacks)}" if lacks else "recorded"
    return status, f"{counted(len(runs), 'run')}, {duration(seconds)} of training"
