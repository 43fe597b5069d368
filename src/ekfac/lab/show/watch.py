"""Shows runs in progress, in the terminal or as a local page that refreshes itself."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ekfac.lab.labels import counted, describe
from ekfac.lab.search.selection import Curve, by_method, curves
from ekfac.lab.show.chart import chart
from ekfac.lab.show.looks import ordered
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.runs import Run

CHART_ROWS = 11
NUMBERS = (
    ("training", "train_loss", ".4g"),
    ("validation", "validation_loss", ".4g"),
    ("seconds", "seconds", ".1f"),
)


def leaders(runs: Sequence[Run]) -> dict[str, Curve]:
    """Return each method's setting with the lowest current training loss."""
    found: dict[str, Curve] = {}
    for name, group in by_method(curves(runs)).items():
        usable = [curve for curve in group if math.isfinite(_now(curve))]
        if usable:
            found[name] = min(usable, key=_now)
    return {name: found[name] for name in ordered(found)}


def _now(curve: Curve) -> float:
    value = float(curve.mean("train_loss")[-1])
    return value if math.isfinite(value) else math.inf


def view(runs: Sequence[Run], width: int = 100, height: int = 50) -> RenderableType:
    """Return the terminal's content: each method's leading curve, task by task, and the latest runs."""
    if not runs:
        return Text("no run yet")
    parts: list[RenderableType] = []
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(f"{run.config.task} on {run.config.dataset}", []).append(run)
    # As many charts as fit on the screen, the latest changes first; the others are named.
    order = sorted(tasks, key=lambda task: -max(map(_changed, tasks[task])))
    rows = min(CHART_ROWS, max(5, height - 17))
    room = max(1, (height - 9) // (rows + 6))
    for task in order[:room]:
        group = tasks[task]
        best = leaders(group)
        points = {
            name: list(zip(curve.mean("epoch"), curve.mean("train_loss") - curve.floor, strict=True))
            for name, curve in best.items()
        }
        what = "training loss" + (" above its floor" if any(curve.floor > 0 for curve in best.values()) else "")
        parts.append(Text(f"{task}\n{chart(points, 'epoch', what, max(40, width - 14), rows)}\n"))
    if order[room:]:
        parts.append(Text(f"not drawn for lack of room: {', '.join(order[room:])}", overflow="ellipsis", no_wrap=True))
    # The table gets the rows that the charts leave, as the screen cuts off the rest.
    left = height - sum(str(part).count("\n") + 1 for part in parts) - 6
    return Group(*parts, _table(runs, max(3, left), width))


def _table(runs: Sequence[Run], rows: int, width: int) -> Table:
    counts = {status: sum(run.status == status for run in runs) for status in ("unfinished", "finished", "diverged")}
    title = f"{counted(len(runs), 'run')}: " + ", ".join(
        f"{number} {status}" for status, number in counts.items() if number
    )
    table = Table(title=title, title_justify="left")
    widths = {"method": 16, "setting": 10, "epoch": 7, "training": 8, "validation": 10, "seconds": 7, "status": 10}
    if width < 100:
        widths = {name: least for name, least in widths.items() if name not in ("validation", "seconds")}
    for name, least in widths.items():
        side = "left" if name in ("method", "setting", "status") else "right"
        # On a narrow screen, only the settings may be cut.
        most = max(least, width - sum(widths.values()) - 12) if name == "setting" else None
        table.add_column(name, justify=side, no_wrap=True, min_width=least, max_width=most)  # type: ignore[arg-type]
    running = sorted(runs, key=lambda run: (run.status != "unfinished", -_changed(run)))
    for run in running[:rows]:
        last = run.history[-1] if run.history else {}
        cells = [f"{last.get('epoch', 0)} of {run.config.epochs}"]
        for column, key, pattern in NUMBERS:
            if column in widths:
                cells.append("-" if last.get(key) is None else format(last[key] - _floor(run, key), pattern))
        # As Text, so that settings are not interpreted as markup.
        words = [Curve((run,)).label, describe(run.config), *cells, run.status]
        table.add_row(*(Text(word) for word in words))
    if len(runs) > rows:
        table.caption = f"and {len(runs) - rows} more"
    return table


def _floor(run: Run, key: str) -> float:
    """Return the floor that is subtracted from a loss, as in ``ekfac train`` and ``ekfac ls``."""
    return float((run.about.get("floor") or {}).get(key.removesuffix("_loss"), 0.0))


def _changed(run: Run) -> float:
    file = run.path / "metrics.jsonl" if run.path is not None else None
    return file.stat().st_mtime if file is not None and file.exists() else 0.0


def watch_terminal(places: Sequence[str | Path], console: Console, every: float = 2.0) -> None:
    """Show the runs until Ctrl-C; only once if the display cannot be redrawn."""

    def now() -> RenderableType:
        return view(find_runs(places, skip_broken=True), console.width, console.height)

    if not console.is_terminal:
        console.print(now())
        return
    with Live(now(), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            live.update(now(), refresh=True)


def make_server(places: Sequence[str | Path], port: int = 0, every: float = 2.0) -> ThreadingHTTPServer:
    """Return a local server of the page: it listens on 127.0.0.1 and answers to no other host name."""
    from ekfac.lab.show.report.page import data, page

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):
                # Refuse other host names that resolve to this machine (DNS rebinding).
                self.send_error(403)
            elif self.path == "/":
                runs = find_runs(places, skip_broken=True)
                self._answer("text/html", page(runs, f"ekfac: {', '.join(map(str, places))}", refresh=every))
            elif self.path == "/data.json":
                self._answer("application/json", json.dumps(data(find_runs(places, skip_broken=True))))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal shows the runs."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
