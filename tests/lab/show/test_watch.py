"""Watching runs: the terminal's view, and the page that is served to this machine alone."""

import http.client
import io
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from ekfac.cli.main import run
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.registry import load_plugin
from ekfac.lab.search import plan
from ekfac.lab.show.chart import chart, marks
from ekfac.lab.show.watch import leaders, make_server, view
from ekfac.lab.training.gather import find_runs
from lab.show.test_figures import made_up

PLUGIN = str(Path(__file__).parents[1] / "tiny_plugin.py")
load_plugin(PLUGIN)
BASE = TrainConfig("tiny", "sgd", lr=0.1, plugins=(PLUGIN,), device="cpu", epochs=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, and one cut off in the middle of its third record, as a run under way looks."""
    for optimizer in ("sgd", "adam"):
        config = TrainConfig("tiny", optimizer, lr=0.1, plugins=(PLUGIN,), device="cpu", epochs=4)
        plan.run_one(config, tmp_path)
    metrics = next(tmp_path.glob("tiny-adam-*/metrics.jsonl"))
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]) + lines[2][:20])
    return tmp_path


def shown(folder: Path, width: int = 120, height: int = 60) -> str:
    console = Console(width=width, height=height, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(find_runs([folder], skip_broken=True), width, height))
    return console.export_text()


def test_the_terminal_shows_every_run_and_the_leading_curves(folder: Path) -> None:
    text = shown(folder)
    assert "2 runs: 1 unfinished, 1 finished" in text
    assert "4 of 4" in text and "1 of 4" in text
    assert "tiny on tiny" in text and "s SGD   a Adam" in text
    assert text.index("1 of 4") < text.index("4 of 4"), "runs under way come first"
    narrow = shown(folder, width=80)
    assert max(map(len, narrow.splitlines())) <= 80 and "unfinished" in narrow


def test_a_folder_without_runs_and_a_broken_run_are_no_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert "no run yet" in shown(tmp_path / "none")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    assert "2 runs" in shown(folder)


def test_the_leader_is_the_setting_that_is_lowest_now(folder: Path) -> None:
    plan.run_one(TrainConfig("tiny", "sgd", lr=1e-6, plugins=(PLUGIN,), device="cpu", epochs=4), folder)
    assert leaders(find_runs([folder], skip_broken=True))["SGD"].config.lr == 0.1


def test_the_command_prints_once_where_nothing_can_be_redrawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", str(folder)]) == 0
    assert "1 unfinished" in capsys.readouterr().out
    for words in (["watch", str(folder / "none")], ["watch", str(folder), "--every", "0"]):
        assert run(words) == 2
    assert run(["watch", str(folder), "--page", "--port", "99999"]) == 2
    assert "port 99999 cannot be used" in capsys.readouterr().err


@pytest.fixture
def server(folder: Path) -> Iterator[ThreadingHTTPServer]:
    made = make_server([folder])
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def get(server: ThreadingHTTPServer, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_page_is_served_to_this_machine_alone_and_follows_the_runs(
    folder: Path, server: ThreadingHTTPServer
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, body = get(server, "/")
    assert status == 200 and b"charts" in body and b"connect-src 'self'" in body
    assert get(server, "/config.json")[0] == 404
    assert get(server, "/", host="evil.example")[0] == 403

    def points() -> int:
        sections = json.loads(get(server, "/data.json")[1])["sections"]
        adam = next(m for m in sections[0]["chart"]["methods"] if m["name"] == "Adam")
        return len(adam["curves"]["final"]["train_loss"]["epoch"]["x"])

    assert points() == 2
    # The run goes on.
    plan.run_one(TrainConfig("tiny", "adam", lr=0.1, plugins=(PLUGIN,), device="cpu", epochs=4), folder)
    assert points() == 5
    assert key(BASE.resolved()) in {path.name for path in folder.iterdir()}


def test_every_method_has_a_letter_of_its_own_name_and_nothing_overflows() -> None:
    names = ["SGD", "SGD + BN", "Adam", "Adam + BN", "AdamW", "KFAC freq=50", "EKFAC freq=50", "EKFAC-ra freq=50"]
    names += [f"EKFAC (defaults) {n}" for n in range(12)] + ["S", "Sg"]
    found = marks(names)
    assert len(set(found.values())) == len(names)
    assert [found[name] for name in names[:8]] == ["s", "S", "a", "A", "d", "k", "e", "E"]
    text = chart({name: [(0, 1.0), (1, 2.0)] for name in names}, "epoch", "loss", width=60)
    assert max(map(len, text.splitlines())) <= 70
    assert all(f"{found[name]} {name}" in text for name in names)


def test_losses_are_above_their_floor_as_in_train_and_ls() -> None:
    run = made_up(TrainConfig("autoencoder", "sgd", dataset="d", lr=0.1), 0.5)
    run.about["floor"] = {"train": 1.0}
    run.history[-1]["train_loss"] = 3.25
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view([run], 120, 60))
    assert "2.25" in console.export_text() and "3.25" not in console.export_text()


@pytest.mark.parametrize("height", [24, 40])
def test_many_tasks_fit_the_screen(height: int) -> None:
    runs = []
    for task in ("autoencoder", "classifier", "vgg11", "resnet34"):
        for optimizer in ("sgd", "adam", "kfac", "ekfac"):
            run = made_up(TrainConfig(task, optimizer, dataset="d", lr=0.1), 0.5)
            runs.append(run)
    console = Console(width=80, height=height, record=True, file=io.StringIO())
    console.print(view(runs, 80, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= height + 1 and max(map(len, lines)) <= 80
    assert any("not drawn for lack of room" in line for line in lines)
