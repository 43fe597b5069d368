"""Fills pages: text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is generated from the record."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ekfac.lab.registry import LabError
from ekfac.lab.show.evidence import claims, network_tables, suites, tables
from ekfac.lab.show.evidence.record import MISSING, Record, table
from ekfac.lab.show.figures import FIGURES

PAGES = ("mnist.md", "cifar.md", "claims.md", "comparison.md", "coverage.md", "suite.md")
SIZES = (200, 500)
CIFAR = ("vgg11", "resnet34", "schedule", "batch-size")
TASKS = ("classifier", "vgg11", "resnet34", "charlm")

Source = Callable[[Record], str]


def _coverage(record: Record) -> str:
    """Return the table of what is reproduced; imported late, because it depends on this package's claims."""
    from ekfac.lab.show.reproduce.coverage import coverage

    return coverage(record)


def _claims(record: Record) -> str:
    """Return every claim of the paper with its verdict; imported late for the same reason."""
    from ekfac.lab.show.reproduce.claims import every_claim

    rows = [[where, text, *answer] for where, text, answer in every_claim(record)]
    return table(["in the paper", "claim", "verdict", "numbers"], rows, words=4)


def _picture(record: Record, name: str) -> str:
    """Return the markup of a figure on CIFAR-10, light and dark, if there are runs for it."""
    if not network_tables.runs_for(record, name):
        return MISSING
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="images/{name}-dark.png">\n'
        f'  <img alt="{FIGURES.get(name).about}" src="images/{name}.png">\n</picture>'
    )


SOURCES: dict[str, Source] = {
    "machine": partial(tables.machine, places=("mnist", "sensitivity")),
    "machine-comparison": partial(tables.machine, places=("comparison",)),
    "frequency": tables.frequency,
    "sensitivity": tables.sensitivity,
    "measured": tables.measured,
    "spectra": tables.spectra,
    "claim-epoch": claims.by_epoch,
    "claim-time": claims.by_time,
    "claim-validation": claims.validation,
    "claim-error": claims.error,
    "claim-spectrum": claims.spectrum,
    "claim-correlation": claims.correlation,
    "claim-frequency": claims.frequency,
    "claim-sensitivity": claims.sensitivity,
    "defaults": claims.defaults,
    "coverage": _coverage,
    "claims": _claims,
    "suite": suites.measured,
    "suite-standing": suites.compared,
    "suite-profile": suites.profile,
    "suite-time": suites.by_time,
    "suite-divergences": suites.divergences,
    "suite-ablation": suites.ablation,
}
SOURCES |= {
    "machine-cifar": partial(tables.machine, places=("cifar",)),
}
for _task in network_tables.TASKS:
    SOURCES |= {
        f"training-{_task}": partial(network_tables.training, task=_task),
        f"accuracy-{_task}": partial(network_tables.accuracy, task=_task),
        f"scheduled-{_task}": partial(network_tables.training, task=_task, scheduled=True),
        f"sizes-{_task}": partial(network_tables.sizes, task=_task),
    }
SOURCES |= {f"epochs-{size}": partial(tables.epochs, batch_size=size) for size in SIZES}
SOURCES |= {f"times-{size}": partial(tables.times, batch_size=size) for size in SIZES}
SOURCES |= {f"comparison-{task}": partial(tables.comparison, task=task) for task in TASKS}
SOURCES |= {f"times-{task}": partial(tables.comparison_times, task=task) for task in TASKS}
SOURCES |= {f"picture-{name}": partial(_picture, name=name) for name in CIFAR}

#: What pages call methods whose label alone does not tell which version of the default it is.
_OLD = {"EKFAC (defaults)": "version 0.1"}
LABELS = {
    "mnist.md": _OLD,
    "claims.md": _OLD,
    "comparison.md": _OLD,
    "cifar.md": {"EKFAC (defaults)": "EKFAC(model)", "nothing set": "its defaults"},
    "suite.md": {"EKFAC (nothing set)": "EKFAC(model)", "EKFAC (your schedule)": "EKFAC, cosine"},
}

_BEGIN = re.compile(r"<!-- begin ([\w-]+) -->")


def fill(text: str, record: Record, page: str = "") -> str:
    """Return a page with everything between markers regenerated, in its own labels if the page's name is given.

    Raises:
        LabError: If a marker is unknown or not closed.
    """
    parts, place = [], 0
    while match := _BEGIN.search(text, place):
        name = match.group(1)
        end = text.find(f"<!-- end {name} -->", match.end())
        if end < 0:
            raise LabError(f"marker {name} has no end")
        if name not in SOURCES:
            raise LabError(f"marker {name} is not known; known: {', '.join(sorted(SOURCES))}")
        content = SOURCES[name](record)
        for label, here in LABELS.get(page, {}).items():
            content = content.replace(label, here)
        # A marker at the end of a line encloses a block, any other a part of a sentence or a row.
        around = "\n" if text[match.end()] == "\n" else ""
        parts += [text[place : match.end()], around, content, around]
        place = end
    return "".join([*parts, text[place:]])


def fill_pages(record: Record, docs: str | Path) -> list[Path]:
    """Fill the pages of a folder, and return those that changed."""
    changed = []
    files = [Path(docs) / name for name in PAGES]
    for file in files:
        if not file.is_file():
            raise LabError(f"{file} does not exist: its tables are inserted into it")
    for file in files:
        before = file.read_text()
        after = fill(before, record, file.name)
        if after != before:
            file.write_text(after)
            changed.append(file)
    return changed
