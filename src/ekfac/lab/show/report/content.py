"""The report's content as plain data: curves for the charts, cells for the tables. All of it is shown as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from ekfac.lab.labels import counted, describe, option
from ekfac.lab.search.ladder import SEARCHED
from ekfac.lab.search.selection import (
    Curve,
    Envelope,
    best_validation,
    by_method,
    last,
    per_epoch,
    per_time,
    time_to_reach,
)
from ekfac.lab.show.looks import lines, ordered
from ekfac.lab.show.report.groups import Group, leader, name_of, searched, shown, timed
from ekfac.lab.training.paces import PACED
from ekfac.lab.training.runs import Run

METRICS = {
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
AXES = {"epoch": "epoch", "step": "iteration", "seconds": "training time (s)"}
# The number of curves drawn at first: the best ones, including the baseline.
AT_FIRST = 6
# Candidates for the baseline; the first one present is used.
BASELINES = ("Adam + BN", "AdamW + BN", "AdamW", "Adam", "SGD + BN", "SGD")

Row = list[dict[str, Any]]
Goal = Callable[[Curve], float]


def methods_of(group: Group) -> dict[str, list[Curve]]:
    """Return a group's methods in the paper's order, each with its settings."""
    found = by_method(group.curves, name_of)
    return {name: found[name] for name in ordered(found)}


def baseline(names: Sequence[str]) -> str | None:
    """Return the baseline method."""
    return next((name for name in BASELINES if name in names), names[0] if names else None)


def chart(group: Group) -> dict[str, Any]:
    """Return one chart's curves: each method's best setting, and its best at each point of the axis."""
    methods = methods_of(group)
    looks = lines(methods)
    first = at_first(methods)
    any_timed = any(timed(found) is not None for found in methods.values())
    axes = {x: label for x, label in AXES.items() if any_timed or x != "seconds"}
    return {
        "metrics": {name: label for name, label in METRICS.items() if _has(group.curves, name)},
        "axes": axes,
        "floor": any(curve.floor > 0 for curve in group.curves),
        "methods": [
            {
                "name": name,
                "color": looks[name].color,
                "variant": looks[name].variant,
                "marker": looks[name].marker,
                "shown": name in first,
                "curves": _selections(found),
            }
            for name, found in methods.items()
        ],
    }


def at_first(methods: dict[str, list[Curve]]) -> set[str]:
    """Return the methods drawn at first: those with the lowest final loss, and the baseline."""
    ends = {name: last(shown(found)) for name, found in methods.items()}
    rival = baseline(list(methods))
    ranked = sorted(methods, key=lambda name: (name != rival, "(changed)" in name, ends[name], name))
    return set(ranked[:AT_FIRST])


def _selections(candidates: Sequence[Curve]) -> dict[str, Any]:
    names = [name for name in METRICS if _has(candidates, name)]
    whole = {"final": shown(candidates), "validation": best_validation(candidates) or shown(candidates)}
    found: dict[str, Any] = {rule: {} for rule in whole}
    for rule, curve in whole.items():
        for name in names:
            found[rule][name] = {x: _points(_whole(curve, name, x)) for x in ("epoch", "step")}
            alone = curve.timed or timed(candidates)
            if alone is not None:
                found[rule][name]["seconds"] = _points(_whole(alone, name, "seconds"))
    if len(candidates) > 1:
        losses = [name for name in names if name.endswith("loss")]
        found["envelope"] = {name: _envelopes(candidates, name) for name in losses}
    return found


def _whole(curve: Curve, name: str, x: str) -> Envelope:
    low, high = curve.spread(name)
    return Envelope(curve.mean(x), curve.mean(name), low, high, [curve] * curve.length)


def _envelopes(candidates: Sequence[Curve], name: str) -> dict[str, Any]:
    """Return the best of all settings at each epoch, after as many steps, and within as much time."""
    alone = [curve.timed for curve in candidates if curve.timed is not None]
    found = {"epoch": per_epoch(candidates, name), "step": _changes(per_time(candidates, name, x="step"))}
    if alone:
        found["seconds"] = _changes(per_time(alone, name))
    return {x: _points(envelope) for x, envelope in found.items()}


def _changes(found: Envelope) -> Envelope:
    """Keep only the points where the value changes, and the last."""
    keep = numpy.concatenate([[True], found.value[1:] != found.value[:-1]])[: len(found.x)]
    keep[-1:] = True
    chosen = [curve for curve, kept in zip(found.chosen, keep, strict=True) if kept]
    return Envelope(found.x[keep], found.value[keep], found.low[keep], found.high[keep], chosen)


def _points(envelope: Envelope) -> dict[str, Any]:
    settings = list(dict.fromkeys(describe(curve.config) for curve in envelope.chosen))
    found: dict[str, Any] = {"x": _numbers(envelope.x), "y": _numbers(envelope.value), "settings": settings}
    if envelope.chosen:
        found["floor"] = {name: envelope.chosen[0].floor_of(f"{name}_loss") for name in ("train", "validation")}
    if len(settings) > 1:
        found["which"] = [settings.index(describe(curve.config)) for curve in envelope.chosen]
    if any(len(curve.runs) > 1 for curve in envelope.chosen):
        found |= {"low": _numbers(envelope.low), "high": _numbers(envelope.high)}
    return found


def _numbers(values: Any) -> list[float | None]:
    """Convert numbers for JSON, rounded to six digits."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _has(candidates: Sequence[Curve], name: str) -> bool:
    return any(record.get(name) is not None for c in candidates for run in c.runs for record in run.history)


def planes(group: Group) -> list[dict[str, Any]]:
    """Return the (learning rate, damping) plane of every method that was run at several points of it.

    For a search by halving, in which most settings end early, it is after the last epoch that all settings have.
    """
    found, epoch = [], _shortest(group)
    for name, candidates in methods_of(group).items():
        points = [(option(c.config, "lr"), option(c.config, "damping"), _loss(c, epoch), c) for c in candidates]
        points = [point for point in points if None not in point[:2]]
        if min((len({p[0] for p in points}), len({p[1] for p in points}))) < 2:
            continue
        found.append(
            {
                "name": name,
                "lr": [p[0] for p in points],
                "damping": [p[1] for p in points],
                "loss": _numbers(p[2] - p[3].floor for p in points),
                "text": [describe(p[3].config) for p in points],
            }
        )
    return found


def about_planes(group: Group) -> str:
    """Describe what the planes show."""
    epoch = _shortest(group)
    when = "Final training loss" if epoch is None else f"Training loss after {counted(epoch, 'epoch')}"
    return (
        f"{when}{' above its floor' if any(c.floor > 0 for c in group.curves) else ''} over learning rate and damping"
    )


def _shortest(group: Group) -> int | None:
    """Return the last epoch that all settings of a search have; ``None`` if the runs are not a search."""
    if not any(map(searched, group.curves)):
        return None
    return max(1, min((curve.length - 1 for curve in group.curves if curve.finished), default=1))


def _loss(curve: Curve, epoch: int | None) -> float:
    return last(curve) if epoch is None else float(curve.mean("train_loss")[min(epoch, curve.length - 1)])


def table(heads: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """Return a table; columns of numbers are right-aligned."""
    numeric = [all(row[place]["number"] for row in rows) for place in range(len(heads))]
    return {"heads": list(heads), "numeric": numeric, "rows": rows}


def words(text: str) -> dict[str, Any]:
    """Return a text cell."""
    return {"text": text, "number": False}


def number(value: float | None, pattern: str = "#.4g", without: str = "–") -> dict[str, Any]:
    """Return a number cell, by which tables can be sorted, or a placeholder."""
    if value is None or not math.isfinite(value):
        return {"text": without, "number": True}
    return {"text": format(value, pattern).rstrip("."), "number": True, "value": value}


def best_table(group: Group) -> dict[str, Any]:
    """Return the table of best settings."""
    floor, accurate = any(c.floor > 0 for c in group.curves), _has(group.curves, "validation_accuracy")
    unequal = len(set(_lengths(group))) > 1
    heads = ["method", "best setting", "tried", "diverged", "seeds", *(["epochs"] if unequal else []), "training loss"]
    heads += ["above its floor"] if floor else []
    heads += ["validation loss", *(["validation accuracy"] if accurate else []), "how it ended"]
    rows = []
    for name, candidates in methods_of(group).items():
        curve = shown(candidates)
        diverged = sum(any(run.status == "diverged" for run in c.runs) for c in candidates)
        loss, validation = last(curve), last(curve, "validation_loss")
        row = [words(name), words(describe(curve.config)), number(len(candidates), "d"), number(diverged, "d")]
        row += [number(len(curve.runs), "d"), *([number(last(curve, "epoch"), ".0f")] if unequal else [])]
        row += [number(loss, without="diverged")]
        row += [number(loss - curve.floor, without="diverged")] if floor else []
        row += [number(validation, without="diverged")]
        row += [number(last(curve, "validation_accuracy"), ".2%")] if accurate else []
        rows.append([*row, words(_ended(curve))])
    return table(heads, rows)


def _ended(curve: Curve) -> str:
    """Describe how a setting's runs ended; for interrupted ones of a search, with their intended length."""
    wanted = curve.runs[0].about.get(SEARCHED)
    if wanted is not None and curve.finished and last(curve, "epoch") < wanted:
        return f"cut, of {wanted} epochs"
    return ", ".join(dict.fromkeys(run.status for run in curve.runs))


def _lengths(group: Group) -> list[int]:
    """Return the number of epochs of each method's representative setting, without diverged ones."""
    found = [leader(candidates) for candidates in methods_of(group).values()]
    return [int(last(curve, "epoch")) for curve in found if curve is not None]


def final(curve: Curve) -> float:
    """Return the training loss after the last epoch, from a full pass."""
    return last(curve)


def lowest(curve: Curve) -> float:
    """Return the lowest training loss after any epoch, from a full pass."""
    return float(numpy.nanmin(curve.mean("train_loss")))


GOALS: dict[str, Goal] = {"final": final, "lowest": lowest}


def times(group: Group) -> dict[str, Any] | None:
    """Return how soon each timed method reaches another's final loss, as fractions of the other's epochs and time.

    There are fractions for each method as the baseline and for each goal; ``None`` if fewer than two methods are timed.
    """
    best = {name: curve for name, found in methods_of(group).items() if (curve := timed(found)) is not None}
    if len(best) < 2:
        return None
    rows = []
    for name, curve in best.items():
        epochs, steps, seconds = (last(curve, x) for x in ("epoch", "step", "seconds"))
        each = [number(seconds / epochs if epochs else None, "#.3g"), number(1000 * seconds / max(1.0, steps), "#.3g")]
        rows.append([words(name), *each])
    return {
        "methods": list(best),
        "first": baseline(list(best)),
        "without": "not in its epochs" if any(map(searched, group.curves)) else "never",
        "table": table(["method", "seconds an epoch", "ms a step"], rows),
        "shares": {
            f"{name}|{goal}": [_shares(curve, rival, reach(rival)) for curve in best.values()]
            for name, rival in best.items()
            for goal, reach in GOALS.items()
        },
    }


def _shares(curve: Curve, rival: Curve, loss: float) -> list[float | None]:
    """Return the epochs and the time to a loss, as fractions of the rival's; ``None`` if it is never reached."""
    found: list[float | None] = []
    for x in ("epoch", "seconds"):
        mine, own = (time_to_reach(each, loss, x) for each in (curve, rival))
        found.append(None if mine is None or not own else float(f"{mine / own:.3g}"))
    return found


def about_times(group: Group) -> str:
    """Describe which runs' seconds count."""
    runs = [run for curve in group.curves for run in curve.runs]
    count = sum(run.timed for run in runs)
    if any(run.about.get(PACED) for run in runs):
        return (
            f"Seconds of {counted(count, 'run')} of {len(runs)} are steps times what a step costs with the machine to "
            "itself, which was timed before: the runs went side by side."
        )
    if count == 0:
        return "Times are left out: these runs shared their machine."
    if count == len(runs):
        return f"Seconds are from all {counted(count, 'run')}: none is known to have shared its machine."
    folders = sorted({str(run.path.parent) for run in runs if run.timed and run.path is not None})
    where = f", in {', '.join(folders)}" if folders else ""
    return (
        f"Seconds are from {counted(count, 'run')} of {len(runs)} that had the machine to themselves{where}. "
        "A method's time is that of its best setting among these."
    )


def headline(group: Group) -> str:
    """Describe which method ends lowest; if finals differ in length, after the last epoch that all have."""
    best = {name: curve for name, found in methods_of(group).items() if (curve := leader(found)) is not None}
    if not best:
        return "Every run diverged."
    when, ends = "at the end", {name: last(curve) for name, curve in best.items()}
    common = min(_lengths(group))
    if any(map(searched, group.curves)) and common < max(_lengths(group)):
        when = f"after {counted(common, 'epoch')}, the last that all methods have"
        ends = {name: float(curve.mean("train_loss")[common]) for name, curve in best.items()}
    first = min(best, key=lambda name: ends[name])
    value, floor = ends[first], best[first].floor
    above = f" ({value - floor:.4g} above its floor)" if floor > 0 else ""
    return f"Lowest training loss {when}: {first}, {value:.4g}{above}."


def machines(runs: Sequence[Run]) -> list[str]:
    """Return the machines and versions that the runs were made with, one line each."""
    found: dict[str, None] = {}
    for run in runs:
        parts = {**run.about.get("machine", {}), **run.about.get("versions", {})}
        found[", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)] = None
    return list(found)


def commands(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return how every run ended, and the command that repeats it."""
    return [(run.status, str(run.about.get("command") or run.config.command())) for run in runs]
