"""The suite's results on the pages: the parts of what ``ekfac suite report`` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ekfac.lab.show.evidence.record import MISSING, Record, table
from ekfac.lab.suite import config, page
from ekfac.lab.suite.records import CONFIG, Records, read_config
from ekfac.lab.suite.results import Results
from ekfac.lab.suite.selection import worth

#: Folders of the records: all tasks and methods, the ablation of the default, and trainings on a CPU.
PLACE, ABLATION, CPU = "suite/h200", "suite/ablation", "suite/cpu"
#: Methods that were run on most tasks, as a profile needs all of its methods on a task.
MOST = ("ekfac", "adamw", "muon", "soap")


def results(record: Record, methods: Sequence[str] = (), place: str = PLACE) -> Results | None:
    """Return the results with warm-up and cosine, of all or some methods, or ``None`` if there is no record."""
    folder = record.folder / place
    if not (folder / CONFIG).is_file():
        return None
    suite = config.parse(*read_config(folder)).selected(methods=methods)
    return Results(suite, Records(folder), "cosine")


def measured(record: Record) -> str:
    """Return the table of all tasks and methods, with its legend."""
    found = results(record)
    return MISSING if found is None else "\n".join([*page.table(found), "", page.key(found)])


def compared(record: Record) -> str:
    """Return how often ours are ahead of the best rival."""
    found = results(record)
    return MISSING if found is None else "\n".join(page.standings(found)).strip() or MISSING


def profile(record: Record) -> str:
    """Return the performance profile: the fraction of tasks by relative speed, for each method."""
    found = results(record, MOST)
    return MISSING if found is None else "\n".join(page.profiles(found)).strip() or MISSING


def by_time(record: Record) -> str:
    """Return each method's seconds to the target on a CPU, from runs made alone."""
    found = results(record, place=CPU)
    if found is None or not (timed := found.seconds())[0]:
        return MISSING
    tasks, reached = timed
    rows = []
    for task, *seconds in zip(tasks, *reached.values(), strict=True):
        best = min(seconds)
        cells = [f"**{s:.0f}**" if s == best < math.inf else f"{s:.0f}" if s < math.inf else "never" for s in seconds]
        rows.append([found.suite.tasks[task].label, *cells])
    return table(["seconds of training", *(method.label for method in found.methods)], rows, words=1)


def divergences(record: Record) -> str:
    """Return how many runs diverged, by method."""
    found = results(record)
    return MISSING if found is None else "\n".join(page.divergences([found]))


def ablation(record: Record) -> str:
    """Return the results of the default with one part left out.

    The configuration names optimizers of a plugin, which is not loaded here, so only its labels are read.
    """
    folder = record.folder / ABLATION
    if not (folder / CONFIG).is_file():
        return MISSING
    data, _ = read_config(folder)
    runs = {(run["method"], run["task"]): worth(run, "last") for run in Records(folder).runs.values()}
    tasks = [name for name in data["tasks"] if any(task == name for _, task in runs)]
    rows = [
        [method["label"], *(f"{runs[name, task]:.4g}" if (name, task) in runs else "–" for task in tasks)]
        for name, method in data["methods"].items()
    ]
    return table(["variant", *(data["tasks"][task]["label"] for task in tasks)], rows, words=1)
