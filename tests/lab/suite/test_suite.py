"""The suite from end to end on small tasks: runs, resumes, reports; what is wrong is said."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch

import started
from ekfac import EKFAC
from ekfac.cli.main import run as command
from ekfac.lab.registry import LabError
from ekfac.lab.suite import config, records, runner
from ekfac.lab.suite.__main__ import main, parse_seconds
from ekfac.lab.suite.jobs import make_job
from ekfac.lab.suite.records import Records
from ekfac.lab.suite.selection import due
from ekfac.lab.suite.tasks import TASKS, Context
from ekfac.lab.suite.training import train
from lab.suite.cases import record, tiny

pytestmark = pytest.mark.usefixtures("quick_collections")  # the suite collects after every run

RUNS = 4 + 2 * (3 + 1) + (3 + 1)  # EKFAC: two rates, two seeds; the others: three rates, and the best again


def write(tmp_path, **changes):
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(tiny(**changes)))
    return file


def lines(folder):
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def timeless(found):
    """Return what two runs of the same job share: by key, the measures at each step."""
    return {r["key"]: [{k: v for k, v in e.items() if k != "seconds"} for e in r["history"]] for r in found}


def assert_alike(found, others):
    """Check that runs of the same jobs measured the same, but for rounding: threads add in another order."""
    found, others = timeless(found), timeless(others)
    assert found.keys() <= others.keys()
    for key, history in found.items():
        for entry, other in zip(history, others[key], strict=True):
            assert entry == pytest.approx(other, rel=1e-3)


@pytest.fixture(scope="module", autouse=True)
def tests_share_the_processor():
    """Let runs count as timed although other tests take time on the processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "ALONE", 0.0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder in which the tiny suite was run once."""
    place = tmp_path_factory.mktemp("suite")
    assert main(["run", str(write(place)), "--out", str(place / "out"), "--device", "cpu"]) == 0
    return place


def test_every_run_is_made_once_and_the_best_rate_gets_the_other_seeds(made, capsys):
    found = lines(made / "out")
    assert len(found) == len({r["key"] for r in found}) == RUNS
    assert all(r["status"] == "finished" and r["timed"] and len(r["history"]) == 5 for r in found)
    for schedule in ("cosine", "constant"):
        cell = [r for r in found if (r["method"], r["schedule"]) == ("adamw", schedule)]
        first = {r["rate"]: r["history"][-1]["validation_loss"] for r in cell if r["seed"] == 0}
        assert [r["rate"] for r in cell if r["seed"] == 1] == [min(first, key=first.get)]
    assert {(r["rate"], r["seed"]) for r in found if r["method"] == "ekfac"} == {(1, 0), (1, 1), (3, 0), (3, 1)}
    before = (made / "out" / "results.jsonl").read_bytes()
    assert main(["run", str(made / "tiny.json"), "--out", str(made / "out"), "--device", "cpu"]) == 0
    assert "0 runs made; nothing is due" in capsys.readouterr().out
    assert (made / "out" / "results.jsonl").read_bytes() == before


def test_networks_and_batches_are_the_same_for_every_method(made):
    starts = {r["seed"]: set() for r in lines(made / "out")}
    for r in lines(made / "out"):
        starts[r["seed"]].add(json.dumps({k: v for k, v in r["history"][0].items() if k != "seconds"}))
    assert [len(found) for found in starts.values()] == [1, 1]
    assert starts[0] != starts[1]


def test_a_multiple_of_the_default_rate_is_that_and_keeps_the_default_course(tmp_path):
    """With a warm-up of a hundred steps built in, a first step at three times the rate goes three times as far."""
    moved = {}
    for rate in (1.0, 3.0):
        suite = config.parse(tiny())
        job = make_job(suite, suite.tasks["tabular"], suite.methods["ekfac"], "own", rate, 0)
        job = replace(job, settings={**job.settings, "steps": 1, "evaluations": 1})
        record = train(job, tmp_path, torch.device("cpu"))
        start, end = (entry["train_loss"] for entry in record["history"])
        moved[rate] = start - end
    assert moved[1.0] > 0 and moved[3.0] == pytest.approx(3 * moved[1.0], rel=0.2)


def test_a_multiple_of_the_default_rate_with_a_schedule_has_that_schedule_alone(tmp_path):
    """Also where a factor of the schedule is 1, so that the rate is the default's: no built-in course, no average."""
    suite = config.parse(tiny())
    job = make_job(suite, suite.tasks["tabular"], suite.methods["ekfac"], "constant", 1.0, 0)
    job = replace(job, settings={**job.settings, "warmup": 0, "steps": 5, "evaluations": 1})
    problem = TASKS.get("tabular")(Context(tmp_path, torch.device("cpu"), 0), **job.settings["settings"])
    with EKFAC(problem.model) as usual:
        named = replace(job, settings={**job.settings, "options": {"lr": usual.param_groups[0]["lr"]}})
    scheduled, named = (train(each, tmp_path, torch.device("cpu"))["history"][-1] for each in (job, named))
    assert scheduled["train_loss"] == named["train_loss"]


def test_report_has_table_profiles_pictures_and_numbers(made):
    assert command(["suite", "report", str(made / "out")]) == 0
    place = made / "out" / "report"
    text = (place / "suite.md").read_text()
    assert "| task | EKFAC (nothing set) | AdamW | Schedule-Free |" in text
    assert "## Warm-up and cosine" in text and "## Constant learning rate" in text
    assert "within 1 %" in text and "By time, 1 task" in text
    assert "| EKFAC (nothing set) | 4 | 0 | " in text
    for name in ("profile-cosine", "curves-cosine", "profile-constant", "curves-constant"):
        assert f"({name}.svg)" in text
        assert (place / f"{name}.png").stat().st_size > 1000 and (place / f"{name}.svg").stat().st_size > 1000
    cosine, constant = json.loads((place / "suite.json").read_text())
    found = {(r["method"], r["schedule"], r["rate"], r["seed"]): r for r in lines(made / "out")}
    entry = cosine["table"]["tabular"]["adamw"]
    mean = sum(found["adamw", "cosine", entry["rate"], seed]["history"][-1]["validation_loss"] for seed in (0, 1)) / 2
    assert entry["mean"] == pytest.approx(mean) and entry["seeds"] == 2 and entry["edge"] == (entry["rate"] != 0.01)
    assert cosine["targets"] == constant["targets"] == {"tabular": pytest.approx(1.01 * mean)}
    assert cosine["table"]["tabular"]["schedule-free"] == constant["table"]["tabular"]["schedule-free"]


@pytest.mark.rounding
def test_killed_and_resumed_gives_the_uninterrupted_records(made, tmp_path):
    out = tmp_path / "cut"
    words = ["-m", "ekfac.lab.suite", "run", str(made / "tiny.json"), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = started.start([*words, "--device", "cpu"], env=environment)
    while len(Records(out).runs) < 3 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() in (-signal.SIGKILL, 0)  # on a busy machine it may be over by now: its last line is cut
    file = out / "results.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 40])  # the last line is cut off in the middle
    kept = len(Records(out).runs)
    assert kept >= 2
    assert main([*words[2:], "--device", "cpu"]) == 0
    again = Records(out)
    assert len(again.runs) == RUNS
    assert_alike(again.runs.values(), lines(made / "out"))


def test_side_by_side_gives_the_same_and_is_not_timed(made, tmp_path):
    words = ["run", str(made / "tiny.json"), "--out", str(tmp_path), "--device", "cpu", "--workers", "2"]
    words = ["-m", "ekfac.lab.suite", *words, "--methods", "adamw", "--schedules", "cosine"]
    done = started.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, forks=True)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path)
    assert len(found) == 4 and not any(r["timed"] for r in found) and {r["workers"] for r in found} == {2}
    assert_alike(found, lines(made / "out"))
    # Each method's best run is made again alone; then it is timed, and not made a third time.
    for count in (5, 5):
        assert main(["time", str(tmp_path), "--device", "cpu", "--methods", "adamw", "--schedules", "cosine"]) == 0
        assert len(lines(tmp_path)) == count
    assert lines(tmp_path)[-1]["timed"] and lines(tmp_path)[-1]["key"] in {r["key"] for r in found}


def test_a_run_that_waited_for_its_processor_is_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "ALONE", 1e9)  # as if it had computed for next to none of its time
    file = write(tmp_path, methods={"adamw": {"lr": [0.01]}}, seeds=[0])
    words = ["run", str(file), "--out", str(tmp_path / "out"), "--device", "cpu", "--schedules", "cosine"]
    assert main(words) == 0 and "so its own does not count" in capsys.readouterr().out
    assert [r["timed"] for r in lines(tmp_path / "out")] == [False]
    assert main(["time", str(tmp_path / "out"), "--device", "cpu"]) == 3  # still due
    monkeypatch.setattr(runner, "ALONE", 0.0)
    assert main(["time", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert [r["timed"] for r in lines(tmp_path / "out")] == [False, False, True]


def test_out_of_time_drops_the_run_and_says_what_is_left(made, tmp_path, capsys):
    words = ["run", str(made / "tiny.json"), "--out", str(tmp_path), "--device", "cpu", "--budget", "0.000001s"]
    assert main(words) == 3
    assert "still due" in capsys.readouterr().out and lines(tmp_path) == []


def test_a_run_that_cannot_be_over_in_time_is_not_started(tmp_path):
    suite = config.parse(tiny())
    found = Records(tmp_path)
    job = due(suite, {})[0]
    found.add({**record("another", [1.0]), "task": job.plan, "method": job.method, "wall": 1e6})
    outcome = runner.run(suite.selected(methods=[job.method]), found, device="cpu", budget=1000)
    assert outcome.made == 0 and outcome.left == 4


def test_a_run_that_fails_is_recorded_and_tried_again_next_time(tmp_path, capsys):
    settings = {"width": 8, "layers": 2, "examples": 400, "batch_size": 401}
    tasks = {"tabular": {"steps": 4, "settings": settings}}
    file = write(tmp_path, tasks=tasks, methods={"adamw": {"lr": [0.01]}})
    for attempts in (1, 2):
        assert main(["run", str(file), "--out", str(tmp_path / "out"), "--device", "cpu", "--schedules", "cosine"]) == 1
        assert "batch_size must be from 1 to the 400" in capsys.readouterr().out
        assert [r["status"] for r in lines(tmp_path / "out")] == ["failed"] * attempts
    assert main(["report", str(tmp_path / "out")]) == 2
    assert "run more of the suite" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_task_without_its_data_is_left_out_once_and_the_others_are_run(tmp_path, capsys, monkeypatch, workers):
    monkeypatch.setenv("EKFAC_DATA", str(tmp_path / "empty"))
    tasks = tiny()["tasks"] | {"relu-autoencoder": {"steps": 4}}
    file = write(tmp_path, tasks=dict(sorted(tasks.items())), methods={"adamw": {"lr": [0.01, 0.02]}}, seeds=[0])
    words = ["run", str(file), "--out", str(tmp_path / "out"), "--device", "cpu", "--schedules", "cosine"]
    assert main([*words, "--workers", workers]) == 1
    said = capsys.readouterr().out
    assert said.count("left out: task relu-autoencoder: dataset fashion-mnist needs") == 1
    found = lines(tmp_path / "out")
    assert {(r["task"], r["status"]) for r in found} == {("tabular", "finished")}


def test_a_run_whose_loss_is_not_finite_is_recorded_as_diverged(tmp_path):
    file = write(tmp_path, methods={"adamw": {"lr": [1e-3]}, "sgd": {"lr": [1e30]}}, seeds=[0])
    assert main(["run", str(file), "--out", str(tmp_path / "out"), "--device", "cpu", "--schedules", "cosine"]) == 0
    sgd = [r for r in lines(tmp_path / "out") if r["method"] == "sgd"]
    assert [r["status"] for r in sgd] == ["diverged"] and sgd[0]["history"][-1]["step"] < 20
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "diverged (1 of 1)" in (tmp_path / "out" / "report" / "suite.md").read_text()


def test_a_folder_has_one_owner(tmp_path, capsys):
    with records.owned(tmp_path / "out"):
        assert main(["run", str(write(tmp_path)), "--out", str(tmp_path / "out")]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_files_of_several_machines_lie_side_by_side(made, tmp_path):
    text = (made / "out" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "one.jsonl").write_text("".join(text[:5]))
    (tmp_path / "two.jsonl").write_text("".join(text[3:]))
    assert due(config.parse(tiny()), Records(tmp_path).runs) == []


def test_a_missing_package_leaves_its_method_out_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    said: list[str] = []
    suite = config.parse(tiny(methods={"adamw": {"lr": [0.01]}, "soap": {"lr": [0.01]}}))
    assert list(runner.usable(suite, said.append).methods) == ["adamw"]
    assert len(said) == 1 and "soap" in said[0] and "pytorch_optimizer" in said[0]
    with pytest.raises(LabError, match="no method"):
        runner.usable(suite.selected(methods=["soap"]), said.append)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nowhere.json", "--out", "x"], "neither a file nor one of the library's: suite, widths"),
        (["run", "suite"], "--out"),
        (["run", "suite", "--out", "x", "--only", "nothing"], "no task 'nothing'; it has: relu-autoencoder"),
        (["run", "suite", "--out", "x", "--methods", "adam"], "no method 'adam'"),
        (["run", "suite", "--out", "x", "--schedules", "linear"], "no schedule 'linear'"),
        (["run", "suite", "--out", "x", "--budget", "soon"], "--budget takes a time such as 90s"),
        (["run", "suite", "--out", "x", "--budget", "0m"], "--budget"),
        (["run", "suite", "--out", "x", "--workers", "0"], "workers must be at least 1"),
        (["run", "suite", "--out", "x", "--device", "abacus"], "abacus"),
        (["time", "x"], "holds no runs of the suite"),
        (["report", "x"], "holds no runs of the suite"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert command(["suite", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("9m", 540), ("1.5h", 5400)])
def test_budgets(text, seconds):
    assert parse_seconds(text) == seconds
