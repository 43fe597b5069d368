"""The report's page: what content.py says, put into one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from ekfac.lab.labels import counted
from ekfac.lab.registry import LabError
from ekfac.lab.search.selection import by_method
from ekfac.lab.show.report import content
from ekfac.lab.training.runs import Run

# The page may run its own scripts and draw; it may load nothing, and talk to nobody but the server it came from.
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
    file.write_text(page(runs, title), encoding="utf-8")
    return file


def page(runs: Sequence[Run], title: str, refresh: float | None = None) -> str:
    """Return the page.

    Args:
        runs: The runs.
        title: Its heading.
        refresh: Seconds after which it asks the server it came from for new data; ``None`` for a page that stands.
    """
    payload = {**data(runs), "refresh": refresh}
    css, script = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = POLICY.format("'self'" if refresh is not None else "'none'")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{css}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            '<main id="content"></main>',
            f'<script type="application/json" id="data">{embedded(payload)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{script}</script>",
            "</body></html>",
        ]
    )


def embedded(payload: Any) -> str:
    """Return JSON that nothing in a string can break out of a script element with."""
    text = json.dumps(payload, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return all that the page shows: charts as data, everything else as HTML with its strings escaped."""
    recorded = [run for run in runs if run.history]
    sections = []
    for name, candidates in content.groups(recorded).items():
        ratios = content.ratio_table(candidates)
        sections.append(
            {
                "name": name,
                "headline": _headline(candidates),
                "chart": content.chart(candidates),
                "planes": content.planes(candidates),
                "best": _table(*content.best_table(candidates)),
                "ratios": _table(*ratios) if ratios is not None else "",
            }
        )
    return {"sections": sections, "footer": _footer(recorded), "runs": len(recorded)}


def _headline(candidates: Sequence[Any]) -> str:
    best = {n: curve for n, group in by_method(candidates).items() if (curve := content.leader(group)) is not None}
    if not best:
        return "Every run diverged."
    final = {name: float(curve.mean("train_loss")[-1]) for name, curve in best.items()}
    first = min(final, key=lambda name: final[name])
    return html.escape(f"Lowest training loss at the end: {first}, {final[first]:.4g}.")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _footer(runs: Sequence[Run]) -> str:
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in content.machines(runs))
    made = content.commands(runs)
    listing = "".join(f"<li>{html.escape(status)} <code>{html.escape(words)}</code></li>" for status, words in made)
    count = counted(len(made), "run")
    return (
        f"<h2>Machine and versions</h2><ul>{lines}</ul>"
        f"<h2>Commands</h2><details{' open' if len(made) <= 12 else ''}><summary>{count}, each with the command that "
        f"repeats it</summary><ul class=commands>{listing}</ul></details>"
    )
