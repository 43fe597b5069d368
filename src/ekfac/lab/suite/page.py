"""The suite's report: one Markdown page, its pictures and its numbers as JSON, in DIR/report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ekfac.lab.labels import counted
from ekfac.lab.registry import LabError
from ekfac.lab.suite import config
from ekfac.lab.suite.profile import MOST, fraction, ratios, score
from ekfac.lab.suite.records import Records, read_config
from ekfac.lab.suite.results import SETS, Result, Results, standing

NAMES = {"cosine": "Warm-up and cosine", "constant": "Constant learning rate"}


def write(folder: Path) -> Path:
    """Write the report of a folder of runs; return the page's path.

    Raises:
        LabError: If there are no runs to report.
    """
    suite = config.parse(*read_config(folder))
    records = Records(folder)
    found = [results for schedule in SETS if (results := Results(suite, records, schedule)).own()]
    if not found:
        raise LabError(f"{folder} holds no method with all of its learning rates yet: run more of the suite")
    place = folder / "report"
    place.mkdir(exist_ok=True)
    pictures = _pictures(found, place)
    _replace(place / "suite.json", json.dumps([as_data(results) for results in found], indent=1) + "\n")
    _replace(place / "suite.md", page(found, records, pictures))
    return place / "suite.md"


def _pictures(found: Sequence[Results], place: Path) -> dict[str, list[tuple[str, str]]] | None:
    """Draw the pictures; return their titles and files by set, or ``None`` without matplotlib."""
    try:
        from ekfac.lab.suite import pictures
    except ImportError:
        return None
    return {results.schedule: pictures.draw(results, place) for results in found}


def _replace(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(file)


def page(found: Sequence[Results], records: Records, pictures: Mapping[str, Sequence[tuple[str, str]]] | None) -> str:
    """Return the page as Markdown."""
    suite = found[0].suite
    small = " This is the small form: it shows that the suite runs, not which method is better." if suite.quick else ""
    lines = ["# The suite", "", _protocol(found[0]) + small, ""]
    for results in found:
        lines += [f"## {NAMES[results.schedule]}", "", *table(results), "", key(results), ""]
        lines += [*standings(results), *profiles(results)]
        for title, file in (pictures or {}).get(results.schedule, ()):
            lines += [f"![{title}]({file})", ""]
    if pictures is None:
        lines += ["Pictures are left out: they need matplotlib.", ""]
    lines += ["## Divergences", "", *divergences(found), ""]
    lines += ["## Where the runs were made", "", *_origins(records), ""]
    return "\n".join(lines).rstrip() + "\n"


def _protocol(results: Results) -> str:
    suite = results.suite
    rates = (
        "on the mean over seeds" if suite.every_rate else f"on seed {suite.seeds[0]}, and only it gets the other seeds"
    )
    return (
        f"{counted(len(suite.tasks), 'task')}, {counted(len(suite.methods), 'method')}, "
        f"{counted(len(suite.seeds), 'seed')}. On each task every method has the same network, batches, length and "
        f"warm-up, and is measured {suite.evaluations} times. A method's learning rate is the one with the best final "
        f"validation measure at full length, {rates}. {_decay(suite)}"
    )


def _decay(suite: config.Suite) -> str:
    """Describe the methods' weight decay."""
    text = "Weight decay is the task's, as AdamW has it"
    scaled = [f"{m.label} {m.decay:g} times that" for m in suite.methods.values() if m.decay not in (None, 1.0)]
    own = [m.label for m in suite.methods.values() if m.decay is None]
    if scaled:
        text += f" ({', '.join(scaled)})"
    if own:
        text += f"; {', '.join(own)}: the optimizer's own"
    return text + "."


def key(results: Results) -> str:
    """Return the legend of the table."""
    suite = results.suite
    taken = [task.label for task in suite.tasks.values() if task.take == "best"]
    text = (
        "Final validation measure, mean ± standard error over seeds: accuracy in %, or loss (of auto-encoders, above "
        "the pixels' entropy). Below it the learning rate (× for a multiple of the default). **Bold**: the best of "
        "the row. † The best learning rate is at the edge of its grid."
    )
    if taken:
        text += f" The best evaluation instead of the last: {', '.join(taken)}."
    return text


def table(results: Results) -> list[str]:
    """Return the table of tasks and methods."""
    lines = [
        "| task | " + " | ".join(method.label for method in results.methods) + " |",
        "| --- |" + " ---: |" * len(results.methods),
    ]
    for name, row in results.table.items():
        if not row:
            continue
        best = min(result.mean for result in row.values())
        cells = [
            _cell(row[m.name], math.isfinite(best) and row[m.name].mean == best) if m.name in row else "–"
            for m in results.methods
        ]
        lines.append(f"| {results.suite.tasks[name].label} | " + " | ".join(cells) + " |")
    return lines


def _cell(result: Result, best: bool) -> str:
    rate = f"{result.rate:.3g}{'×' if result.method.relative else ''}{'†' if result.edge else ''}"
    if not math.isfinite(result.mean):
        bad = sum(run["status"] == "diverged" for run in result.runs.values())
        return f"diverged ({bad} of {len(result.runs)}) <br> {rate}"
    text = shown(result)
    return f"{f'**{text}**' if best else text} <br> {rate}"


def shown(result: Result) -> str:
    """Format a mean and its standard error in the measure's terms."""
    if result.accurate:
        error = "" if result.error is None else f" ± {100 * result.error:.2f}"
        return f"{100 * (1 - result.mean):.2f}{error}"
    digits = 0 if result.mean == 0 else max(0, 3 - math.floor(math.log10(abs(result.mean))))
    error = "" if result.error is None else f" ± {result.error:.{digits}f}"
    return f"{result.mean:.{digits}f}{error}"


def standings(results: Results) -> list[str]:
    """Return on how many tasks each of our methods is ahead of the best rival."""
    ours = [method for method in results.methods if method.ours]
    rivals = [method for method in results.methods if not method.ours]
    if not (ours and rivals):
        return []
    lines = [
        "Against the best rival of each task, where both have been run:",
        "",
        "| method | ahead | within one standard error¹ | behind | worst of all |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for method in ours:
        found = standing(results, method.name)
        counts = (len(found.ahead), len(found.level), len(found.behind), len(found.worst))
        lines.append(f"| {method.label} | " + " | ".join(map(str, counts)) + " |")
    return [*lines, "", "¹ Behind the best rival's mean by no more than that mean's standard error.", ""]


def profiles(results: Results) -> list[str]:
    """Return the performance profiles as tables, with an explanation of their target."""
    target = results.suite.target
    label = results.suite.methods[target.method].label
    lines: list[str] = []
    for what, (tasks, reached) in (("steps", results.steps()), ("time", results.seconds())):
        if not tasks:
            if what == "time":
                lines += ["No profile by time: not every method has been run alone (`ekfac suite time`).", ""]
            continue
        found = ratios(reached)
        if not lines:
            lines += [
                f"The target of a task is the final validation measure of {label} with the schedule "
                f"{target.schedule!r} at its best learning rate, to within {100 * target.within:g} % (of the loss, or "
                "of the fraction of errors). Shown is the fraction of tasks on which a method reaches the target "
                f"within r times the best method's {what}, the median over seeds; the score is the mean fraction "
                f"from r = 1 to {MOST:g}.",
                "",
            ]
        lines += [
            f"By {what}, {counted(len(tasks), 'task')}:",
            "",
            "| method | r = 1 | r = 1.5 | r = 2 | r = 4 | score |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for method in results.methods:
            mine = found[method.name]
            heights = [f"{fraction(mine, r):.2f}" for r in (1, 1.5, 2, 4)]
            lines.append(f"| {method.label} | " + " | ".join(heights) + f" | {score(mine):.3f} |")
        lines.append("")
    return lines


def divergences(found: Sequence[Results]) -> list[str]:
    """Return how many runs of each method diverged or ended high."""
    cells: dict[tuple[str, str, str], Result] = {}
    for results in found:
        for row in results.table.values():
            for result in row.values():
                cells[result.task.name, result.method.name, result.schedule] = result
    counts: dict[str, list[int]] = {}
    for result in cells.values():
        entry = counts.setdefault(result.method.label, [0, 0, 0])
        for place, number in enumerate((result.made, result.diverged, result.risen)):
            entry[place] += number
    lines = [
        "All learning rates and seeds. Risen: diverged, or ended above the training loss after a tenth of the run.",
        "",
        "| method | runs | not finite | risen |",
        "| --- | ---: | ---: | ---: |",
    ]
    return lines + [f"| {label} | {made} | {bad} | {risen} |" for label, (made, bad, risen) in counts.items()]


def _origins(records: Records) -> list[str]:
    places: dict[str, int] = {}
    sources: dict[str, int] = {}
    for run in records.runs.values():
        machine, versions = run["machine"], run["versions"]
        name = f"{machine['gpu'] or machine['processor']}, torch {versions['torch']}"
        places[name] = places.get(name, 0) + 1
        if run["method"].startswith("ekfac"):
            sources[versions["source"]] = sources.get(versions["source"], 0) + 1
    lines = [f"- {name}: {counted(number, 'run')}" for name, number in places.items()]
    if len(sources) > 1:
        listed = ", ".join(f"{digest} ({number})" for digest, number in sources.items())
        lines.append(f"- **EKFAC's runs come from {len(sources)} versions of the library's sources**: {listed}")
    if records.failed.keys() - records.runs.keys():
        lines.append(f"- {counted(len(records.failed.keys() - records.runs.keys()), 'run')} failed with an error")
    return lines


def as_data(results: Results) -> dict[str, Any]:
    """Return a set's numbers as plain data."""

    def plain(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    tasks, steps = results.steps()
    timed, seconds = results.seconds()
    return {
        "set": results.schedule,
        "quick": results.suite.quick,
        "targets": results.targets,
        "table": {
            task: {
                name: {
                    "measure": "error" if result.accurate else "loss",
                    "mean": plain(result.mean),
                    "standard_error": plain(result.error),
                    "seeds": len(result.runs),
                    "rate": result.rate,
                    "edge": result.edge,
                    "runs": result.made,
                    "diverged": result.diverged,
                    "risen": result.risen,
                    "steps_to_target": plain(result.reached(results.targets[task]))
                    if task in results.targets
                    else None,
                }
                for name, result in row.items()
            }
            for task, row in results.table.items()
        },
        "steps": {"tasks": tasks, "score": {n: score(r) for n, r in ratios(steps).items()} if tasks else {}},
        "seconds": {"tasks": timed, "score": {n: score(r) for n, r in ratios(seconds).items()} if timed else {}},
    }
