"""Commands about recorded runs: listed, compared, repeated, tagged; several seeds at once; settings from a file."""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ekfac
import started
from ekfac.cli import main as cli
from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import portable
from ekfac.lab.show.listing import repeated, row
from ekfac.lab.training.run import load_run
from ekfac.lab.training.runs import Run
from ekfac.lab.training.tags import Tags, read_tags
from ekfac.lab.training.trainer import Trainer

SOURCES = str(Path(ekfac.__file__).parents[1])
PLUGIN = str(Path(__file__).parents[1] / "lab" / "tiny_plugin.py")

LOOKS = """
import torch
from ekfac.lab import Dataset, Split, Task, label_cross_entropy, register_dataset, register_task


def numbers(folder):
    print("looked in", folder.name)
    x = torch.tensor([float(n) for n in (folder / "numbers.txt").read_text().split()])[:, None]
    return Dataset("numbers", {"train": Split(x, (x[:, 0] > 3).long()), "validation": Split(x, (x[:, 0] > 3).long())})


register_dataset("numbers", numbers)
register_task(
    "looks",
    Task(lambda width, bn: torch.nn.Linear(1, 2), label_cross_entropy, dataset="numbers", input_shape=(1,), width=1,
         batch_size=4, epochs=1),
)
"""


def run(*words: object) -> int:
    return cli.run([str(word) for word in words])


@pytest.fixture
def recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    base = ("train", "tiny", "--plugin", PLUGIN, "--device", "cpu", "--epochs", "2")
    assert (
        run(*base, "--optimizer", "sgd", "--lr", "0.1", "--out", tmp_path / "a", "--tag", "first", "--note", "n") == 0
    )
    assert run(*base, "--optimizer", "adam", "--lr", "0.05", "--out", tmp_path / "b") == 0
    capsys.readouterr()
    return tmp_path


def test_runs_are_listed_sorted_and_chosen(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", recorded, "--json", "--sort", "train_loss") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 and rows[0]["train_loss"] <= rows[1]["train_loss"]
    assert run("ls", recorded, "--tag", "first", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["method"] == "SGD" and row["tags"] == ["first"] and row["note"] == "n" and row["epoch"] == 2
    assert run("ls", recorded) == 0
    text = capsys.readouterr().out
    assert "2 runs" in text and "lr 0.05" in text and "2 of 2" in text
    assert run("ls", recorded, "--status", "diverged", "--json") == 0 and json.loads(capsys.readouterr().out) == []
    for words in (["--sort", "colour"], ["--status", "good"]):
        assert run("ls", recorded, *words) == 2
    assert run("ls", recorded / "none") == 2


def test_changed_defaults_are_not_listed_as_the_defaults() -> None:
    plain = TrainConfig("deep", "ekfac-default", device="cpu").resolved()
    assert row(Run(plain, []))["method"] == "EKFAC (defaults)"
    assert row(Run(replace(plain, lr=0.01), []))["method"] == "EKFAC (changed)"


def test_what_differs_between_two_runs_is_shown(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", recorded / "a", recorded / "b", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["optimizer"] == ["sgd", "adam"] and found["settings"]["lr"] == [0.1, 0.05]
    assert "task" not in found["settings"] and "versions" not in found and "train_loss" in found["result"]
    assert run("diff", recorded / "a", recorded / "a") == 0 and "no difference" in capsys.readouterr().out
    assert run("diff", recorded / "a", recorded / "b") == 0 and "optimizer" in capsys.readouterr().out


def test_a_run_is_repeated_from_its_folder(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rerun", recorded / "a", "--plugin", PLUGIN, "--device", "cpu", "--out", recorded / "again") == 0
    assert "the same as recorded after epoch 2" in capsys.readouterr().out
    first, again = (load_run(recorded / name) for name in ("a", "again"))
    assert [r["train_loss"] for r in first.history] == [r["train_loss"] for r in again.history]
    assert run("rerun", recorded / "a", "--plugin", PLUGIN, "--lr", "0.01", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"]["lr"] == 0.01 and result["config"]["optimizer"] == "sgd"
    assert result["differences"]["settings"]["lr"] == [0.1, 0.01]
    assert run("rerun", recorded / "a", "--out", recorded / "a", "--plugin", PLUGIN) == 2


def test_a_repeated_run_is_compared_above_the_floor() -> None:
    floor = {"floor": {"train": 40.0}}
    before, after = (Run(TrainConfig("autoencoder"), [{"train_loss": loss}], about=floor) for loss in (50.0, 55.0))
    assert repeated(before, before) == "the same as recorded after epoch 0: training loss 10"
    assert repeated(before, after) == "after epoch 0: training loss 15; recorded: training loss 10 (0.5 apart)"


def test_a_warning_is_one_line_without_a_place(tmp_path: Path) -> None:
    plugin = tmp_path / "warns.py"
    plugin.write_text("import warnings\nwarnings.warn('take care', stacklevel=1)\n")
    words = [sys.executable, "-m", "ekfac", "summary", "classifier", "--plugin", str(plugin)]
    answer = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": SOURCES}, capture_output=True, text=True, check=True
    )
    assert answer.stderr == "warning: take care\n"


def test_the_recorded_command_repeats_the_run_on_another_machine(
    tmp_path: Path,
) -> None:
    """It names no folder of the machine that recorded it: neither of data nor of plugins."""
    here, there = tmp_path / "here", tmp_path / "there"
    for machine in (here, there):
        (machine / "plugins").mkdir(parents=True)
        shutil.copy(PLUGIN, machine / "plugins" / "tiny_plugin.py")

    def command_of(machine: Path, *words: object) -> None:
        done = started.run(["-m", "ekfac", *words], cwd=machine, env={**os.environ, "PYTHONPATH": SOURCES})
        assert done.returncode == 0, done.stderr

    words = ["--device", "cpu", "--epochs", "1", "--optimizer", "sgd", "--lr", "0.1", "--data-dir", here]
    command_of(here, "train", "tiny", "--plugin", here / "plugins" / "tiny_plugin.py", *words, "--out", here / "run")
    recorded = load_run(here / "run")
    assert str(tmp_path) not in recorded.about["command"]
    command = shlex.split(recorded.about["command"])
    assert command[command.index("--plugin") + 1] == "plugins/tiny_plugin.py" and "--data-dir" not in command
    command_of(there, *command[1:], "--out", there / "run")
    assert load_run(there / "run").history[-1]["train_loss"] == recorded.history[-1]["train_loss"]


def test_plugins_are_named_without_folders_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable("mine.module") == "mine.module" and portable("../mine.py") == "../mine.py"
    assert portable(str(tmp_path / "more" / "mine.py")) == str(Path("more") / "mine.py")
    assert portable(str(tmp_path.parent / "mine.py")) == "mine.py"


def test_rerun_looks_for_data_where_this_machine_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that was named there may not be here: then it is EKFAC_DATA's, or that of --data-dir."""
    plugin = tmp_path / "looks.py"
    plugin.write_text(LOOKS)
    for name in ("old", "new", "given"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numbers.txt").write_text("0 1 2 3 4 5 6 7")
    monkeypatch.setenv("EKFAC_DATA", str(tmp_path / "new"))
    words = ["--plugin", plugin, "--device", "cpu"]
    train = ["train", "looks", *words, "--optimizer", "sgd", "--epochs", "1", "--data-dir", tmp_path / "old"]
    assert run(*train, "--out", tmp_path / "run") == 0
    capsys.readouterr()

    def looked_in(*more: object) -> str:
        assert run("rerun", tmp_path / "run", *words, *more) == 0
        said = capsys.readouterr().out
        assert "the same as recorded after epoch 1" in said
        return said.split("looked in ")[1].split()[0]

    assert looked_in() == "old"
    assert looked_in("--data-dir", tmp_path / "given") == "given"
    shutil.rmtree(tmp_path / "old")
    assert looked_in() == "new"


def test_a_repeated_run_on_other_data_is_told(tmp_path: Path) -> None:
    record = {"epoch": 0, "train_loss": 1.0}
    one, two = (Run(TrainConfig("classifier"), [dict(record)], about={"data_sha256": h}) for h in "ab")
    assert repeated(one, two) == "the same as recorded after epoch 0: training loss 1"
    two.history[0]["train_loss"] = 2.0
    assert repeated(one, two) == "after epoch 0: training loss 2; recorded: training loss 1, on other data (1 apart)"
    two = replace(two, config=TrainConfig("classifier", lr=0.1, seed=1), about=one.about)
    assert repeated(one, two).startswith("after epoch 0 with lr 0.1, seed 1: training loss 2; recorded: "), "told so"


def test_tags_and_notes_leave_the_record_alone(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {f.name: f.read_bytes() for f in (recorded / "b").iterdir() if f.is_file()}
    assert run("tag", recorded / "b", "good", "paper") == 0 and "good, paper" in capsys.readouterr().out
    assert run("tag", recorded / "b", "paper", "--remove") == 0
    assert run("note", recorded / "b", "worth a look") == 0
    assert read_tags(recorded / "b") == Tags(("good",), "worth a look")
    assert all((recorded / "b" / name).read_bytes() == content for name, content in before.items())
    assert run("note", recorded / "b") == 0 and "worth a look" in capsys.readouterr().out
    for command in ("note", "tag"):
        assert run(command, recorded / "b", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"tags": ["good"], "note": "worth a look"}
    assert run("report", recorded, "--out", recorded / "r.html", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(recorded / "r.html"), "runs": 2, "timed": 2}
    for words in (["tag", recorded / "b", "two words"], ["tag", recorded, "x"], ["note", recorded, "x"]):
        assert run(*words) == 2
    (recorded / "b" / "tags.json").write_text("{")
    assert run("tag", recorded / "b", "good") == 2 and "cannot be read" in capsys.readouterr().err
    assert run("train", "tiny", "--plugin", PLUGIN, "--tag", "x") == 2


def test_several_seeds_are_several_runs_and_one_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train",
        "tiny",
        "--plugin",
        PLUGIN,
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--optimizer",
        "sgd",
        "--lr",
        "0.1",
    )
    assert run(*words, "--seeds", "3,5", "--out", tmp_path / "out") == 0
    runs = [load_run(tmp_path / "out" / f"seed-{seed}") for seed in (3, 5)]
    losses = [found.history[-1]["train_loss"] for found in runs]
    assert [found.config.seed for found in runs] == [3, 5] and losses[0] != losses[1]
    assert f"2 seeds, training loss {statistics.mean(losses):.4g} ±" in capsys.readouterr().out
    assert run(*words, "--seeds", "0,1", "--json") == 0 and len(json.loads(capsys.readouterr().out)) == 2
    for wrong in (["--seeds", "1,1"], ["--seeds", "x"], ["--seeds", "1", "--seed", "1"]):
        assert run(*words, *wrong) == 2


def test_broken_runs_are_named_and_the_others_listed(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("broken", "marked"):
        shutil.copytree(recorded / "a", recorded / name)
    with (recorded / "broken" / "metrics.jsonl").open("a") as stream:
        stream.write("garbage\n")
    (recorded / "marked" / "tags.json").write_text("{")
    assert run("ls", recorded, "--json") == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 2
    first, second = said.err.splitlines()
    assert first.startswith("note: left out: ") and "broken/metrics.jsonl, line 4 cannot be read" in first
    assert "marked/tags.json cannot be read" in second


def test_names_of_runs_stay_whole_in_a_terminal(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for name, whole in (("a-name-that-has-thirty-letters", True), ("a" * 70, False)):
        shutil.copytree("a", f"all/{name}")
        assert run("ls", "all") == 0
        text = capsys.readouterr().out
        assert (f"all/{name}"[:34] in text) == whole and "2 of 2" in text and "finished" in text
        shutil.rmtree("all")


@pytest.mark.parametrize("columns", [40, 71])
def test_a_narrow_terminal_cuts_no_name(
    columns: int, recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    shutil.copytree("a", "all/seeds/seed-number-0")
    assert run("note", "all/seeds/seed-number-0", "a note") == 0 and run("ls", "all") == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert "".join(line.split("  ")[0].strip() for line in lines) == "all/seeds/seed-number-0"
    assert "finished" in lines[0]


def test_seeds_that_were_not_begun_start_where_the_others_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "--plugin", PLUGIN, "--out", tmp_path / "out", "--json")
    assert run(*words, "--resume", "--seeds", "0,1") == 2 and "no checkpoint" in capsys.readouterr().err
    assert run(*words, "tiny", "--optimizer", "sgd", "--lr", "0.1", "--epochs", "1", "--seeds", "0,1") == 0
    (tmp_path / "out" / "seed-1" / "checkpoint.pt").unlink()  # killed within its first epoch
    capsys.readouterr()
    assert run(*words, "--resume", "--seeds", "0,1,2", "--epochs", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["config"]["seed"] for one in found] == [0, 1, 2] and {len(one["history"]) for one in found} == {3}
    assert {(one["config"]["optimizer"], one["config"]["lr"]) for one in found} == {("sgd", 0.1)}


def test_tags_are_checked_first_written_as_the_run_begins_and_added(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ("train", "tiny", "--plugin", PLUGIN, "--epochs", "1", "--out", recorded / "c")
    assert run(*begin, "--tag", "two words") == 2 and not (recorded / "c").exists()
    resume = ("train", "--plugin", PLUGIN, "--resume", "--out", recorded / "a", "--epochs", "3")
    assert run(*resume, "--tag", "second") == 0
    assert read_tags(recorded / "a") == Tags(("first", "second"), "n")

    def stop(self: Trainer, *arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train_epoch", stop)
    assert run(*begin, "--tag", "cut") == 130 and read_tags(recorded / "c") == Tags(("cut",))
    assert run(*begin, "--overwrite") == 130 and read_tags(recorded / "c") == Tags()


def test_settings_from_a_file_lie_beneath_those_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("task: tiny\noptimizer: sgd\nlr: 1e-1\nepochs: 3\noptions: {momentum: 0.5, nesterov: true}\n")
    words = ("train", "--config", file, "--plugin", PLUGIN, "--device", "cpu", "--json")
    assert run(*words, "--epochs", "1", "--set", "momentum=0.8") == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["lr"], config["epochs"], config["options"]) == (0.1, 1, {"momentum": 0.8, "nesterov": True})
    for text in ("lr: [", "- 1", "colour: red", "task: tiny\nplugins: [x.py]", "task: tiny\noptions: 3"):
        file.write_text(text)
        assert run(*words) == 2, text
        assert "config" in capsys.readouterr().err
