"""What the report says, as plain data: curves for the charts, rows for the tables.

Names that come from a run's settings are text. Those that Plotly draws are escaped here, since it takes a few tags in
its texts; those in tables are escaped where the tables are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ekfac.lab.labels import describe, option
from ekfac.lab.search.selection import (
    Curve,
    Envelope,
    best_final,
    best_validation,
    by_method,
    curves,
    last,
    per_epoch,
    per_time,
    time_to_reach,
)
from ekfac.lab.show.looks import lines, ordered
from ekfac.lab.training.runs import Run

METRICS = {
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
AXES = {"epoch": "epoch", "step": "iteration", "seconds": "training time (s)"}
# Plotly's names for the line styles and markers of ekfac.lab.show.looks.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = {"v": "triangle-down", "^": "triangle-up", "<": "triangle-left", ">": "triangle-right", "D": "diamond"}
_SYMBOLS |= {"s": "square", "o": "circle", "P": "cross", "X": "x", "*": "star", "h": "hexagon", "p": "pentagon"}


def plain(text: str) -> str:
    """Return a text that Plotly shows as it is: it takes tags, and knows three of HTML's entities."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def groups(runs: Sequence[Run]) -> dict[str, list[Curve]]:
    """Put together what can be compared: the same task on the same data, with the same schedule."""
    found: dict[str, list[Curve]] = {}
    for curve in curves(runs):
        config = curve.config
        schedule = f", learning rate halved every {config.halve_every} epochs" if config.halve_every else ""
        schedule += ", learning rate along a cosine" if config.cosine else ""
        found.setdefault(f"{config.task} on {config.dataset}{schedule}", []).append(curve)
    return found


def leader(candidates: Sequence[Curve]) -> Curve | None:
    """Return the best setting of a method: at its end, or so far where none has ended; ``None`` if all diverged."""
    usable = [curve for curve in candidates if math.isfinite(last(curve))]
    return best_final(candidates) or min(usable, key=last, default=None)


def shown(candidates: Sequence[Curve]) -> Curve:
    """Return the setting that stands for a method: its best, or where all diverged the one that got furthest."""
    return leader(candidates) or max(candidates, key=lambda curve: curve.length)


def chart(candidates: Sequence[Curve]) -> dict[str, Any]:
    """Return one chart's curves: for each method its best setting whole, and the best at each epoch and budget."""
    methods = by_method(candidates)
    looks = lines(methods)
    floors = {name: _floor(candidates[0], name) for name in ("train", "validation")}
    return {
        "metrics": {name: label for name, label in METRICS.items() if _has(candidates, name)},
        "axes": AXES,
        "floor": {name: floor for name, floor in floors.items() if floor > 0},
        "methods": [
            {
                "name": plain(name),
                "color": looks[name].color,
                "dash": _DASHES[looks[name].variant % len(_DASHES)],
                "symbol": _SYMBOLS.get(looks[name].marker, "circle"),
                "curves": _selections(methods[name]),
            }
            for name in ordered(methods)
        ],
    }


def _selections(candidates: Sequence[Curve]) -> dict[str, Any]:
    final, validation = shown(candidates), best_validation(candidates) or shown(candidates)
    names = [name for name in METRICS if _has(candidates, name)]
    found: dict[str, Any] = {"final": {}, "validation": {}}
    for rule, curve in (("final", final), ("validation", validation)):
        for name in names:
            low, high = curve.spread(name)
            envelopes = {x: Envelope(curve.mean(x), curve.mean(name), low, high, [curve] * curve.length) for x in AXES}
            found[rule][name] = {x: _points(envelope) for x, envelope in envelopes.items()}
    if len(candidates) > 1:
        losses = [name for name in names if name.endswith("loss")]
        found["per_epoch"] = {name: {"epoch": _points(per_epoch(candidates, name))} for name in losses}
        found["per_time"] = {name: {"seconds": _points(per_time(candidates, name))} for name in losses}
    return found


def _points(envelope: Envelope) -> dict[str, Any]:
    several = any(len(curve.runs) > 1 for curve in envelope.chosen)
    found = {
        "x": _numbers(envelope.x),
        "y": _numbers(envelope.value),
        "text": [plain(describe(curve.config)) for curve in envelope.chosen],
    }
    return {**found, "low": _numbers(envelope.low), "high": _numbers(envelope.high)} if several else found


def _numbers(values: Any) -> list[float | None]:
    """Return numbers as JSON can write them, to seven digits."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def _has(candidates: Sequence[Curve], name: str) -> bool:
    return any(record.get(name) is not None for c in candidates for run in c.runs for record in run.history)


def _floor(curve: Curve, split: str) -> float:
    return float((curve.runs[0].about.get("floor") or {}).get(split, 0.0))


def planes(candidates: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return the (learning rate, damping) plane of every method that was run at several points of it."""
    found = []
    methods = by_method(candidates)
    for name in ordered(methods):
        points = [(option(c.config, "lr"), option(c.config, "damping"), last(c), c) for c in methods[name]]
        points = [point for point in points if None not in point[:2]]
        if min((len({p[0] for p in points}), len({p[1] for p in points}))) < 2:
            continue
        found.append(
            {
                "name": plain(name),
                "lr": [p[0] for p in points],
                "damping": [p[1] for p in points],
                "loss": _numbers(p[2] for p in points),
                "text": [plain(describe(p[3].config)) for p in points],
            }
        )
    return found


def best_table(candidates: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table of best settings."""
    floor = _floor(candidates[0], "train")
    accurate = _has(candidates, "validation_accuracy")
    heads = ["method", "best setting", "tried", "training loss"]
    heads += ["above its floor"] if floor > 0 else []
    heads += [
        "validation loss",
        *(["validation accuracy"] if accurate else []),
        "time (s)",
        "ms a step",
        "how it ended",
    ]
    rows = []
    methods = by_method(candidates)
    for name in ordered(methods):
        curve = shown(methods[name])
        loss, seconds, steps = last(curve), last(curve, "seconds"), last(curve, "step")
        diverged = sum(any(run.status == "diverged" for run in c.runs) for c in methods[name])
        row = [name, describe(curve.config), _tried(len(methods[name]), diverged, len(curve.runs)), _text(loss)]
        row += [_text(loss - floor)] if floor > 0 else []
        row += [_text(last(curve, "validation_loss"))]
        row += [f"{last(curve, 'validation_accuracy'):.2%}"] if accurate else []
        row += [f"{seconds:.1f}", f"{1000 * seconds / max(1.0, steps):.1f}", curve.runs[0].status]
        rows.append(row)
    return heads, rows


def _tried(settings: int, diverged: int, seeds: int) -> str:
    words = f"{settings} setting{'s' if settings > 1 else ''}"
    words += f", {diverged} diverged" if diverged else ""
    return words + (f", {seeds} seeds" if seeds > 1 else "")


def ratio_table(candidates: Sequence[Curve]) -> tuple[list[str], list[list[str]]] | None:
    """Return how long each method takes to a baseline's final loss, as a share of what the baseline itself takes.

    Baselines are the methods without factors; all methods where there is none.
    """
    best = {name: curve for name, group in by_method(candidates).items() if (curve := leader(group)) is not None}
    names = ordered(best)
    baselines = [name for name in names if option(best[name].config, "refresh_every") is None] or names
    if len(names) < 2:
        return None
    heads = ["method", *(f"to {name}'s {_text(last(best[name]))}" for name in baselines)]
    rows = []
    for name in names:
        cells = []
        for baseline in baselines:
            found = []
            for x, unit in (("seconds", "time"), ("epoch", "epochs")):
                own = time_to_reach(best[baseline], last(best[baseline]), x)
                mine = time_to_reach(best[name], last(best[baseline]), x)
                if mine is not None and own:
                    found.append(f"{mine / own:.2f} of its {unit}")
            cells.append(", ".join(found) or "not reached")
        rows.append([name, *cells])
    return heads, rows


def _text(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def machines(runs: Sequence[Run]) -> list[str]:
    """Return every machine and set of versions that the runs were made with, one line each."""
    found: dict[str, None] = {}
    for run in runs:
        parts = {**run.about.get("machine", {}), **run.about.get("versions", {})}
        found[", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)] = None
    return list(found)


def commands(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return how every run ended and the command that repeats it."""
    return [(run.status, str(run.about.get("command") or run.config.command())) for run in runs]
