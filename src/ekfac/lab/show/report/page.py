"""The report's page: the content of content.py in one self-contained HTML file."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ekfac.lab.registry import LabError
from ekfac.lab.show.report import content
from ekfac.lab.show.report.groups import Group, grouped
from ekfac.lab.training.runs import Run

# The page may run its own scripts and draw, but load nothing, and connect only to the server it came from.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src {}"
)


def write_report(runs: Sequence[Run], out: str | Path, title: str = "ekfac: report") -> Path:
    """Write a self-contained page about some runs.

    Args:
        runs: The runs, of one task or of several.
        out: The file.
        title: The page's heading.

    Raises:
        LabError: If there is nothing to report.
    """
    if not any(run.history for run in runs):
        raise LabError("there is nothing to report: no run has a record yet")
    file = Path(out)
    if file.is_dir():
        raise LabError(f"{file} is a folder; --out takes the name of a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(page(runs, title), encoding="utf-8")
    part.replace(file)
    return file


def page(runs: Sequence[Run], title: str, refresh: float | None = None) -> str:
    """Return the page.

    Args:
        runs: The runs.
        title: Its heading.
        refresh: Seconds between requests to its server for new data; ``None`` for a static page.
    """
    payload = {**data(runs), "refresh": refresh}
    names = ("page.css", "chart.js", "page.js")
    css, *scripts = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in names)
    policy = POLICY.format("'self'" if refresh is not None else "'none'")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{css}</style></head><body>",
            f"<header><h1>{html.escape(title)}</h1><button id=theme></button></header>",
            '<nav id="contents"></nav><main id="content"></main><footer></footer>',
            f'<script type="application/json" id="data">{embedded(payload)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
        ]
    )


def embedded(payload: Any) -> str:
    """Return JSON escaped so that no string in it can close the script element."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the page's content as plain data; the page inserts every string as text."""
    recorded = [run for run in runs if run.history]
    return {
        "sections": [_section(group) for group in grouped(recorded)],
        "machines": content.machines(recorded),
        "commands": content.commands(recorded),
    }


def _section(group: Group) -> dict[str, Any]:
    return {
        "id": "-".join(str(part) for part in group.key if part),
        "name": group.name,
        "headline": content.headline(group),
        "chart": content.chart(group),
        "planes": content.planes(group),
        "about_planes": content.about_planes(group),
        "best": content.best_table(group),
        "times": content.times(group),
        "about_times": content.about_times(group),
    }
