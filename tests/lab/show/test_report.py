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
from ekfac.lab.show.evidence import Record, tables
from ekfac.lab.show.report import content, write_report
from ekfac.lab.show.report.groups import Group, grouped
from ekfac.lab.show.report.page import data, embedded, page
from ekfac.lab.show.watch import make_server
from ekfac.lab.training.gather import find_runs
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
        self.tab.wait_for_selector(".chart .curve")

    def names(self) -> list[str]:
        return self.tab.locator(".legend").first.locator(".entry:not(.all)").all_text_contents()

    def drawn(self) -> list[str]:
        return self.tab.evaluate("document.querySelector('.chart').drawn.series.map(s => s.name)")

    def label(self, axis: str) -> str:
        return self.tab.locator(f".chart .{axis}label").first.text_content()


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    file = write_report(several(), tmp_path_factory.mktemp("report") / "report.html", f"report {EVIL}")
    found = Opened(browser, file.as_uri())
    yield found
    found.tab.close()


def test_the_page_renders_from_a_file_without_network_and_says_nothing(opened: Opened) -> None:
    assert opened.tab.locator(".chart .curve").count() >= 4
    assert opened.tab.locator(".plane svg").count() >= 1
    headings = opened.tab.locator("h2, h3").all_text_contents()
    for title in ("autoencoder on mnist", "Best settings", "Machine and versions", "Commands"):
        assert title in headings
    assert (
        "ekfac train autoencoder --optimizer ekfac-ra --dataset mnist --batch-size 200 --lr 0.1 --damping 0.01"
        in opened.tab.locator("footer").inner_text()
    )
    assert opened.tab.locator("#contents a").all_text_contents()[0] == "autoencoder on mnist"
    assert [url for url in opened.asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert opened.said == []


def test_hovering_a_point_shows_its_values(opened: Opened) -> None:
    opened.tab.locator(".chart").first.scroll_into_view_if_needed()
    place = opened.tab.evaluate(
        """() => {
            const chart = document.querySelector('.chart'), { x, y, series } = chart.drawn;
            const s = series.find(t => t.name === 'SGD + BN'), box = chart.getBoundingClientRect();
            return [box.x + x.at(s.x[3]), box.y + y.at(s.y[3]), s.y[3]];
        }"""
    )
    opened.tab.mouse.move(place[0], place[1], steps=4)
    text = opened.tab.wait_for_selector(".chart .tip:visible").inner_text()
    expected = 200 * 0.7**3
    assert math.isclose(place[2], expected, rel_tol=1e-5)
    assert "SGD + BN" in text and "epoch 3" in text and f"{expected:.5g}" in text and "lr 0.01, batch 200" in text


def test_a_click_in_the_legend_hides_a_curve_and_shows_it_again(opened: Opened) -> None:
    entry = opened.tab.locator(".legend .entry").get_by_text("EKFAC-ra freq=50", exact=True)
    assert "EKFAC-ra freq=50" in opened.drawn()
    for wanted in (False, True):
        entry.click()
        # Redrawing, as a page that refreshes itself does, must not bring a hidden curve back.
        opened.tab.get_by_label("log x").click()
        opened.tab.get_by_label("log x").click()
        assert ("EKFAC-ra freq=50" in opened.drawn()) == wanted
        opened.tab.wait_for_timeout(600)  # or the next click would count as the second of two


def test_switches_change_axes_and_quantity(opened: Opened) -> None:
    tab = opened.tab
    logs = "(({x, y}) => [x.log, y.log])(document.querySelector('.chart').drawn)"
    assert tab.evaluate(logs) == [False, True]
    tab.get_by_label("log y").click()
    assert tab.evaluate(logs) == [False, False]
    tab.get_by_label("log y").click()
    tab.get_by_label("log x").click()
    assert tab.evaluate(logs) == [True, True]
    tab.get_by_label("log x").click()
    tab.get_by_label("by", exact=True).select_option("seconds")
    assert opened.label("x") == "training time (s)"
    tab.get_by_label("show").select_option("validation_loss")
    assert opened.label("y") == "validation loss above its floor"
    first = "document.querySelector('.chart').drawn.series[0].y[0]"
    assert math.isclose(tab.evaluate(first), 45 + 200 + 3 - 44)
    tab.get_by_label("above the floor").click()
    assert opened.label("y") == "validation loss" and math.isclose(tab.evaluate(first), 45 + 200 + 3)
    tab.get_by_label("above the floor").click()
    tab.get_by_label("show").select_option("train_loss")
    for x, label in (("seconds", "training time (s)"), ("step", "iteration"), ("epoch", "epoch")):
        tab.get_by_label("by", exact=True).select_option(x)
        tab.get_by_label("of the").select_option("envelope")
        assert opened.label("x") == label, "the best at each point is on the axis that was chosen"
        tab.get_by_label("of the").select_option("final")
    assert opened.said == []


def test_epochs_are_marked_whole_and_choices_are_not_cut_on_a_phone(browser: Any, tmp_path: Path) -> None:
    settings = {"lr": 0.1, "damping": 0.1, "refresh_every": 50, "options": {"pi_correction": False, "kl_clip": 0.125}}
    config = TrainConfig("autoencoder", "kfac", dataset="mnist-5k", **settings).resolved()  # type: ignore[arg-type]
    file = write_report([made_up(replace(config, epochs=3), 0.5, epochs=3)], tmp_path / "short.html")
    found = Opened(browser, file.as_uri())
    try:
        assert found.tab.locator(".axes text[text-anchor=middle]:not(.label)").all_text_contents() == [
            "0",
            "1",
            "2",
            "3",
        ]
        first = found.tab.get_by_role("cell", name="KFAC freq=50").first
        lines = "c => { const r = document.createRange(); r.selectNodeContents(c); return r.getClientRects().length; }"
        assert first.evaluate(lines) == 1, "a method's name stays on one line"
        found.tab.set_viewport_size({"width": 400, "height": 900})
        # What a choice needs is known from one that nothing narrows.
        needed = "(s => { const one = s.cloneNode(true); one.style.cssText = 'max-width: none; width: auto';"
        needed += " document.body.append(one); const found = one.offsetWidth; one.remove(); return found; })"
        for select in found.tab.locator(".controls select").all():
            assert select.evaluate("s => s.offsetWidth") >= select.evaluate(needed)
    finally:
        found.tab.close()


def test_a_click_on_a_head_sorts_a_table_by_numbers(opened: Opened) -> None:
    body = opened.tab.locator("table").first
    heads = body.locator("th").all_text_contents()
    place = heads.index("training loss")
    body.locator("th button").nth(place).click()
    cells = [row.locator("td").nth(place).text_content() for row in body.locator("tbody tr").all()]
    assert [float(cell) for cell in cells] == sorted(float(cell) for cell in cells) and len(cells) == 4
    body.locator("th button").nth(place).click()
    assert [row.locator("td").nth(place).text_content() for row in body.locator("tbody tr").all()] == cells[::-1]
    side = "e => getComputedStyle(e).textAlign"
    assert body.locator("td").nth(place).evaluate(side) == "right" and body.locator("td").first.evaluate(side) == "left"


def test_dragging_zooms_and_a_double_click_goes_back(opened: Opened) -> None:
    chart, tab = opened.tab.locator(".chart").first, opened.tab
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    seen = "(({x}) => [x.low, x.high])(document.querySelector('.chart').drawn)"
    whole = tab.evaluate(seen)
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.6, steps=3)
    tab.mouse.up()
    part = tab.evaluate(seen)
    assert whole[0] < part[0] < part[1] < whole[1]
    tab.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    assert tab.evaluate(seen) == whole


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_nothing_is_cut_off_and_the_ground_follows_the_scheme(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    file = write_report(several(), tmp_path / "report.html")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.goto(file.as_uri())
    tab.wait_for_selector(".chart .curve")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for table in tab.locator("table").all():
        box = table.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    chart, legend = (tab.locator(place).first.bounding_box() for place in (".chart", ".legend"))
    assert legend["y"] >= chart["y"] + chart["height"] - 1, "the legend lies below the axis"
    white = "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'"
    assert tab.evaluate(white) == (scheme == "light")
    tab.locator("#theme").click()
    assert tab.evaluate(white) == (scheme == "dark")
    tab.close()


def test_a_copy_button_copies_its_command(browser: Any, tmp_path: Path) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(write_report(several()[:1], tmp_path / "report.html").as_uri())
    tab.locator(".copy").first.click()
    tab.get_by_text("copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == tab.locator(".commands code").first.text_content()
    context.close()


def test_html_in_settings_stays_text(opened: Opened) -> None:
    assert opened.tab.evaluate("window.hacked") is None
    assert opened.tab.locator("img").count() == 0
    assert any(name.startswith('<img src=x onerror="window.hacked=1">') for name in opened.names())
    assert EVIL in opened.tab.locator("table").first.text_content()
    assert EVIL in opened.tab.locator("h1").inner_text()
    assert "A <b>fast</b> one" in opened.tab.locator("footer").inner_text()


def test_what_stands_in_the_page_cannot_end_its_script() -> None:
    text = embedded({"name": "</script>\u2028"})
    assert "<" not in text and "\u2028" not in text and json.loads(text) == {"name": "</script>\u2028"}


def only(runs: list[Run]) -> Group:
    (found,) = grouped(runs)
    return found


def test_shares_are_of_the_baselines_time_and_epochs() -> None:
    """EKFAC-ra at rate 0.4 comes to SGD's 45 + 200 * 0.7^6 between epochs 2 and 3."""
    times = content.times(only(several()))
    assert times is not None and times["first"] == "SGD + BN"
    shares = dict(zip(times["methods"], times["shares"]["SGD + BN|final"], strict=True))
    target = 200 * 0.7**6
    epochs = 2 + (200 * 0.4**2 - target) / (200 * 0.4**2 - 200 * 0.4**3)
    assert shares["EKFAC-ra freq=50"] == pytest.approx([epochs / 6, epochs / 3], rel=5e-3)
    assert shares["SGD + BN"] == [1.0, 1.0]
    assert next(found for name, found in shares.items() if name.startswith("<img")) == [None, None]


def test_seconds_are_of_timed_runs_alone() -> None:
    """The best EKFAC-ra shared its machine: its seconds are nowhere, those of the best timed setting are."""
    runs = several()
    for run in runs:
        run.timed = run.config.lr == 0.1 or run.config.optimizer == "sgd"
    group = only(runs)
    times = content.times(group)
    assert times is not None
    shares = dict(zip(times["methods"], times["shares"]["SGD + BN|final"], strict=True))
    target = 200 * 0.7**6
    epochs = 4 + (200 * 0.6**4 - target) / (200 * 0.6**4 - 200 * 0.6**5)  # at rate 0.6, the best that was timed
    assert shares["EKFAC-ra freq=50"] == pytest.approx([epochs / 6, epochs / 3], rel=5e-3)
    chart = content.chart(group)
    curves = {method["name"]: method["curves"]["final"]["train_loss"] for method in chart["methods"]}
    assert curves["EKFAC-ra freq=50"]["seconds"]["y"][6] == pytest.approx(45 + 200 * 0.6**6, rel=1e-5)
    assert curves["EKFAC-ra freq=50"]["epoch"]["y"][6] == pytest.approx(45 + 200 * 0.4**6, rel=1e-5)
    assert "from 6 runs of 8 that had the machine to themselves" in content.about_times(group)
    for run in runs:
        run.timed = False
    assert content.times(only(runs)) is None and "seconds" not in content.chart(only(runs))["axes"]
    assert "shared their machine" in content.about_times(only(runs))


def test_runs_in_finals_and_those_alone_are_timed(tmp_path: Path) -> None:
    for name, processes in (("a", 1), ("b", 2)):
        run = made_up(TrainConfig("autoencoder", "sgd", lr=0.1), 0.5)
        RunFolder(tmp_path / name).start(run.config, {**run.about, "machine": {"processes": processes}}, run.history)
    assert [run.timed for run in find_runs([tmp_path])] == [True, False]
    run = made_up(TrainConfig("autoencoder", "sgd", lr=0.1), 0.5)
    RunFolder(tmp_path / "finals" / "c").start(run.config, run.about, run.history)
    assert [run.timed for run in find_runs([tmp_path])] == [False, False, True]
    assert [run.timed for run in find_runs([tmp_path], timed=[tmp_path / "a"])] == [True, False, False]


def test_the_table_tells_the_best_setting_and_how_many_were_tried() -> None:
    found = content.best_table(only(several()))
    rows = {row[0]["text"]: dict(zip(found["heads"], row, strict=True)) for row in found["rows"]}
    row = {head: cell["text"] for head, cell in rows["EKFAC-ra freq=50"].items()}
    assert row["best setting"] == "lr 0.01, damping 0.01, batch 200"
    assert (row["tried"], row["diverged"]) == ("4", "1")
    assert row["training loss"] == f"{45 + 200 * 0.4**6:#.4g}" and row["above its floor"] == f"{200 * 0.4**6:#.4g}"
    assert rows["EKFAC freq=50"]["seeds"]["text"] == "2"


def test_planes_are_of_methods_run_at_several_points_with_diverged_ones_marked() -> None:
    (plane,) = content.planes(only(several()))
    assert plane["name"] == "EKFAC-ra freq=50"
    assert plane["loss"][1] is None and sorted(zip(plane["lr"], plane["damping"], strict=True)) == [
        (0.01, 0.01),
        (0.01, 0.1),
        (0.1, 0.01),
        (0.1, 0.1),
    ]


def test_unlike_runs_share_no_chart_and_each_has_its_own_floor() -> None:
    base = TrainConfig("autoencoder", "sgd", dataset="mnist", lr=0.1, batch_size=200)
    runs = [made_up(base, 0.5), made_up(replace(base, optimizer="adam"), 0.5), made_up(replace(base, width=100), 0.5)]
    runs += [made_up(replace(base, limit=500), 0.5), made_up(base, 0.5, epochs=9)]
    runs[2].about = {**runs[2].about, "floor": {"train": 30.0}}
    names = [group.name for group in grouped(runs)]
    assert len(names) == 4 and names[0] == "autoencoder on mnist, width as the task has it, all examples, 9 epochs"
    assert "autoencoder on mnist, width 100, all examples, 6 epochs" in names
    methods = [method for group in grouped(runs) for method in content.chart(group)["methods"]]
    floors = [method["curves"]["final"]["train_loss"]["epoch"]["floor"]["train"] for method in methods]
    assert sorted(floors) == [30.0, 45.0, 45.0, 45.0, 45.0]


def test_a_races_runs_share_a_chart_however_many_epochs_they_had_time_for() -> None:
    base = TrainConfig("autoencoder", "sgd", dataset="mnist", lr=0.1, batch_size=200)
    runs = [made_up(base, 0.5, epochs=9), made_up(replace(base, optimizer="adam"), 0.5, epochs=3)]
    for run in runs:
        run.about = {**run.about, "race_seconds": 15.0}
    assert [(group.name, len(group.curves)) for group in grouped(runs)] == [
        ("autoencoder on mnist, 15 s of training each", 2)
    ]
    names = [group.name for group in grouped([*runs, made_up(base, 0.5, epochs=1)])]
    assert sorted(names) == ["autoencoder on mnist, 1 epoch", "autoencoder on mnist, 15 s of training each"]


def test_batch_sizes_that_several_methods_share_are_compared_apart() -> None:
    base = TrainConfig("vgg11", dataset="cifar10", lr=0.1, batch_size=500)
    runs = [made_up(replace(base, optimizer=name), 0.5) for name in ("kfac", "ekfac")]
    runs.append(made_up(replace(base, optimizer="sgd", batch_size=200), 0.5))
    assert [group.name for group in grouped(runs)] == ["vgg11 on cifar10"], "as in the paper, SGD has its own"
    runs += [made_up(replace(base, optimizer=name, batch_size=200), 0.5) for name in ("kfac", "ekfac")]
    assert [group.name for group in grouped(runs)] == ["vgg11 on cifar10, batch 200", "vgg11 on cifar10, batch 500"]


def test_six_curves_at_first_the_baseline_among_them() -> None:
    base = TrainConfig("autoencoder", dataset="mnist", lr=0.1, damping=0.1, batch_size=200)
    runs = [made_up(replace(base, optimizer="adam", damping=None), 0.95)]
    runs += [made_up(replace(base, optimizer="ekfac", refresh_every=n), 0.5 + n / 100) for n in range(1, 10)]
    first = [method["name"] for method in content.chart(only(runs))["methods"] if method["shown"]]
    assert first == ["Adam", *(f"EKFAC freq={n}" for n in range(1, 6))]


def test_the_recorded_runs_give_the_pages_numbers_in_two_megabytes() -> None:
    results = Path(__file__).parents[3] / "results"
    if not results.is_dir():
        pytest.skip("the recorded runs are not here")
    runs = find_runs([results / "mnist", results / "comparison"])
    assert len(page(runs, "report").encode()) < 2_000_000
    group = next(group for group in grouped(runs) if group.name == "autoencoder on mnist, 20 epochs, batch 200")
    times = content.times(group)
    assert times is not None
    shares = dict(zip(times["methods"], times["shares"]["Adam + BN|final"], strict=True))
    rows = tables.times(Record(results), 200).splitlines()[2:]
    for name, _, *cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        if name in shares:  # a method that was run for fewer epochs has a section of its own
            assert [None if cell == "never" else float(cell) for cell in cells] == shares[name]
    assert "EKFAC (defaults)" in shares


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
        count = "document.querySelector('.chart').drawn.series[0].x.length"
        assert opened.tab.evaluate(count) == 3
        opened.tab.get_by_label("log x").click()
        for record in base.history[3:]:
            writer.add(record)
        for _ in range(2000):
            if opened.tab.evaluate(count) == len(base.history):
                break
            opened.tab.wait_for_timeout(50)
        assert opened.tab.evaluate(count) == len(base.history)
        assert opened.tab.evaluate("document.querySelector('.chart').drawn.x.log")
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
