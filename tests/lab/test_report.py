"""The report in a real browser: Debian's Chromium, driven by playwright."""

import json
import math
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.show.report import content, write_report
from ekfac.lab.show.report.page import data, embedded
from ekfac.lab.show.watch import make_server
from ekfac.lab.training.runs import Run, RunFolder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'


def made_up(config: TrainConfig, rate: float, seconds: float = 1.0, epochs: int = 6, start: float = 200.0) -> Run:
    """A run whose loss falls towards its floor of 45 by a factor each epoch; a rate above one diverges."""
    history: list[dict[str, Any]] = []
    for epoch in range(epochs + 1):
        loss = 45 + start * rate**epoch
        diverged = rate > 1 and epoch == 3
        history.append(
            {
                "epoch": epoch,
                "step": 20 * epoch,
                "seconds": seconds * epoch,
                "train_loss": None if diverged else loss,
                "validation_loss": None if diverged else loss + 3,
                "validation_accuracy": None,
                "diverged": diverged,
            }
        )
        if diverged:
            break
    about = {
        "floor": {"train": 45.0, "validation": 44.0},
        "machine": {"processor": "A <b>fast</b> one", "cores": 2},
        "versions": {"torch": "2.13"},
        "command": config.command(),
    }
    return Run(replace(config, epochs=epochs), history, "diverged" if rate > 1 else "finished", about)


def several() -> list[Run]:
    base = TrainConfig("autoencoder", dataset="mnist", batch_size=200, refresh_every=50)
    runs = [made_up(replace(base, optimizer="sgd", batch_norm=True, lr=0.01, refresh_every=None), 0.7, 0.5)]
    for lr, damping, rate in ((0.1, 0.1, 0.6), (0.1, 0.01, 1.5), (0.01, 0.1, 0.8), (0.01, 0.01, 0.4)):
        runs.append(made_up(replace(base, optimizer="ekfac-ra", lr=lr, damping=damping), rate, 1.0))
    runs += [made_up(replace(base, optimizer="ekfac", lr=0.1, damping=0.1, seed=s), 0.5 + s / 20, 2.0) for s in (0, 1)]
    runs.append(made_up(replace(base, optimizer=EVIL, lr=0.1, options={"note": EVIL}), 0.9))
    return runs


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


class Opened:
    """The report in a browser's tab, and all that the tab said and asked for."""

    def __init__(self, browser: Any, address: str) -> None:
        self.tab = browser.new_page(viewport={"width": 1200, "height": 900})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(address)
        self.tab.wait_for_selector(".chart .main-svg .scatterlayer .trace")

    def names(self) -> list[str]:
        return [element.text_content() for element in self.tab.query_selector_all(".chart .legendtext")]


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    file = write_report(several(), tmp_path_factory.mktemp("report") / "report.html", f"report {EVIL}")
    found = Opened(browser, file.as_uri())
    yield found
    found.tab.close()


def test_the_page_renders_from_a_file_without_network_and_says_nothing(opened: Opened) -> None:
    assert opened.tab.locator(".chart .scatterlayer .trace").count() >= 4
    assert opened.tab.locator(".plane .main-svg").count() >= 1
    headings = opened.tab.locator("h2, h3").all_text_contents()
    for title in ("autoencoder on mnist", "Best settings", "Machine and versions", "Commands"):
        assert title in headings
    assert (
        "ekfac train autoencoder --dataset mnist --batch-size 200 --lr 0.1 --damping 0.01"
        in opened.tab.locator("footer").inner_text()
    )
    buttons = opened.tab.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert "Reset axes" in buttons and not any("Share" in title or "cloud" in title.lower() for title in buttons)
    assert [url for url in opened.asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert opened.said == []


def test_hovering_a_point_shows_its_values(opened: Opened) -> None:
    place = opened.tab.evaluate(
        """() => {
            const chart = document.querySelector('.chart');
            const trace = chart._fullData.find(t => t.name.startsWith('SGD + BN'));
            const { xaxis, yaxis } = chart._fullLayout;
            const box = chart.querySelector('.nsewdrag').getBoundingClientRect();
            return [box.x + xaxis.d2p(trace.x[3]), box.y + yaxis.d2p(trace.y[3]), trace.y[3]];
        }"""
    )
    opened.tab.mouse.move(place[0] - 30, place[1] + 5)
    opened.tab.mouse.move(place[0], place[1], steps=4)
    label = opened.tab.wait_for_selector(".chart .hoverlayer .hovertext")
    text = label.text_content()
    expected = 45 + 200 * 0.7**3
    assert math.isclose(place[2], expected, rel_tol=1e-6)
    assert "SGD + BN" in text and "epoch 3" in text and f"{expected:.5g}" in text and "lr 0.01, batch 200" in text


def test_a_click_in_the_legend_hides_a_curve_and_shows_it_again(opened: Opened) -> None:
    names = opened.names()
    place = names.index("EKFAC-ra freq=50")
    visible = "document.querySelector('.chart')._fullData.find(t => t.name === 'EKFAC-ra freq=50').visible"
    assert opened.tab.evaluate(visible) is True
    for wanted in ("legendonly", True):
        opened.tab.locator(".chart .legendtoggle").nth(place).click()
        # Plotly waits to see whether the click becomes a double click.
        for _ in range(200):
            if opened.tab.evaluate(visible) == wanted:
                break
            opened.tab.wait_for_timeout(50)
        # Redrawing, as a page that refreshes itself does, must not bring a hidden curve back.
        opened.tab.get_by_label("log x").click()
        opened.tab.get_by_label("log x").click()
        assert opened.tab.evaluate(visible) == wanted


def test_switches_change_axes_and_quantity(opened: Opened) -> None:
    kind = "document.querySelector('.chart')._fullLayout.{}.type"
    title = "document.querySelector('.chart')._fullLayout.{}.title.text"
    tab = opened.tab
    assert (tab.evaluate(kind.format("xaxis")), tab.evaluate(kind.format("yaxis"))) == ("linear", "log")
    tab.get_by_label("log y").click()
    assert tab.evaluate(kind.format("yaxis")) == "linear"
    tab.get_by_label("log y").click()
    tab.get_by_label("log x").click()
    assert (tab.evaluate(kind.format("xaxis")), tab.evaluate(kind.format("yaxis"))) == ("log", "log")
    tab.get_by_label("log x").click()
    tab.get_by_label("by", exact=True).select_option("seconds")
    assert tab.evaluate(title.format("xaxis")) == "training time (s)"
    tab.get_by_label("show").select_option("validation_loss")
    assert tab.evaluate(title.format("yaxis")) == "validation loss"
    tab.get_by_label("above the floor").click()
    assert tab.evaluate(title.format("yaxis")) == "validation loss above its floor of 44.00"
    assert math.isclose(tab.evaluate("document.querySelector('.chart')._fullData[0].y[0]"), 45 + 200 + 3 - 44)
    tab.get_by_label("above the floor").click()
    tab.get_by_label("of the").select_option("per_epoch")
    assert tab.evaluate(title.format("xaxis")) == "epoch"
    tab.get_by_label("of the").select_option("final")
    tab.get_by_label("show").select_option("train_loss")
    tab.get_by_label("by", exact=True).select_option("epoch")
    assert opened.said == []


def test_html_in_settings_stays_text(opened: Opened) -> None:
    assert opened.tab.evaluate("window.hacked") is None
    assert opened.tab.locator("img").count() == 0
    assert any(name.startswith('<img src=x onerror="window.hacked=1">') for name in opened.names())
    assert EVIL in opened.tab.locator("table").first.inner_text()
    assert EVIL in opened.tab.locator("h1").inner_text()
    assert "A <b>fast</b> one" in opened.tab.locator("footer").inner_text()


def test_what_stands_in_the_page_cannot_end_its_script() -> None:
    text = embedded({"name": "</script>\u2028"})
    assert "<" not in text and "\u2028" not in text and json.loads(text) == {"name": "</script>\u2028"}


def test_ratios_are_of_the_baselines_time_and_epochs() -> None:
    """EKFAC-ra at rate 0.4 comes to SGD's 45 + 200 * 0.7^6 between epochs 2 and 3."""
    table = content.ratio_table(content.groups(several())["autoencoder on mnist"])
    assert table is not None
    heads, rows = table
    column = next(number for number, head in enumerate(heads) if head.startswith("to SGD + BN's"))
    cells = {row[0]: row[column] for row in rows}
    target = 200 * 0.7**6
    epochs = 2 + (200 * 0.4**2 - target) / (200 * 0.4**2 - 200 * 0.4**3)
    assert cells["EKFAC-ra freq=50"] == f"{epochs / 3:.2f} of its time, {epochs / 6:.2f} of its epochs"
    assert cells["SGD + BN"] == "1.00 of its time, 1.00 of its epochs"
    assert next(cell for name, cell in cells.items() if name.startswith("<img")) == "not reached"


def test_the_table_tells_the_best_setting_and_how_many_were_tried() -> None:
    heads, rows = content.best_table(content.groups(several())["autoencoder on mnist"])
    row = dict(zip(heads, next(row for row in rows if row[0] == "EKFAC-ra freq=50"), strict=True))
    assert row["best setting"] == "lr 0.01, damping 0.01, batch 200"
    assert row["tried"] == "4 settings, 1 diverged"
    assert row["training loss"] == f"{45 + 200 * 0.4**6:.4g}" and row["above its floor"] == f"{200 * 0.4**6:.4g}"
    seeds = next(row for row in rows if row[0] == "EKFAC freq=50")
    assert "2 seeds" in seeds[2]


def test_planes_are_of_methods_run_at_several_points_with_diverged_ones_marked() -> None:
    (plane,) = content.planes(content.groups(several())["autoencoder on mnist"])
    assert plane["name"] == "EKFAC-ra freq=50"
    assert plane["loss"][1] is None and sorted(zip(plane["lr"], plane["damping"], strict=True)) == [
        (0.01, 0.01),
        (0.01, 0.1),
        (0.1, 0.01),
        (0.1, 0.1),
    ]


def test_tasks_data_and_schedules_get_sections_of_their_own() -> None:
    runs = several()
    runs.append(made_up(TrainConfig("classifier", "sgd", dataset="mnist-5k", halve_every=20), 0.5))
    names = [section["name"] for section in data(runs)["sections"]]
    assert names == ["autoencoder on mnist", "classifier on mnist-5k, learning rate halved every 20 epochs"]


def test_a_watched_page_follows_the_runs_and_keeps_what_is_hidden(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    base = made_up(TrainConfig("autoencoder", "sgd", dataset="mnist", lr=0.1), 0.7)
    writer = RunFolder(folder)
    writer.start(base.config, base.about, base.history[:3])
    server = make_server([tmp_path], every=0.2)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        opened = Opened(browser, f"http://127.0.0.1:{server.server_port}/")
        count = "document.querySelector('.chart')._fullData[0].x.length"
        assert opened.tab.evaluate(count) == 3
        opened.tab.get_by_label("log x").click()
        for record in base.history[3:]:
            writer.add(record)
        for _ in range(200):
            if opened.tab.evaluate(count) == len(base.history):
                break
            opened.tab.wait_for_timeout(50)
        assert opened.tab.evaluate(count) == len(base.history)
        assert opened.tab.evaluate("document.querySelector('.chart')._fullLayout.xaxis.type") == "log"
        assert [text for text in opened.said if "favicon" not in text and "404" not in text] == []
        opened.tab.close()
    finally:
        writer.close()
        server.shutdown()
        thread.join()
        server.server_close()


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="nothing to report"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(LabError, match="is a folder"):
        write_report(several(), tmp_path)
