"""Lists of settings, run with torch and numpy alone, and taken into a study afterwards."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import started
from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import load_plugin
from ekfac.lab.search import plan
from ekfac.lab.search.space import Space, settings
from ekfac.lab.training.gather import find_runs
from processes import alive, children, wait_until

PLUGIN = str(Path(__file__).parents[1] / "tiny_plugin.py")
#: A plan on two workers, as words of a command line.
WORDS = ("plan.json", "--out", "done", "--workers", "2", "--devices", "cpu", "--plugin", PLUGIN)
load_plugin(PLUGIN)
BASE = TrainConfig("tiny", "sgd", plugins=(PLUGIN,), device="cpu")


@pytest.fixture
def configs() -> list[TrainConfig]:
    # One of them diverges.
    return [*settings(BASE, Space(lrs=(0.1, 0.01), random_points=0)), replace(BASE, lr=1e30).resolved()]


def test_a_written_plan_reads_back(configs: list[TrainConfig], tmp_path: Path) -> None:
    plan.write_plan(configs, tmp_path / "plan.json")
    assert plan.read_plan(tmp_path / "plan.json") == [replace(c, device="auto").resolved() for c in configs]
    assert "device" not in json.loads((tmp_path / "plan.json").read_text())[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"task": "tiny"}', "must be a JSON list"),
        ('[{"task": "tiny", "speed": 1}]', "setting 1: unknown setting 'speed'"),
        ('[{"task": "classifier", "lr": -1}]', "setting 1: lr must be a positive number"),
    ],
)
def test_a_bad_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(LabError, match=message):
        plan.read_plan(tmp_path / "plan.json")


def test_what_is_over_is_not_run_again_and_leaves_no_checkpoint(
    configs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("EKFAC_TEST_LOG", str(log))
    first = plan.run_all(configs, tmp_path / "runs")
    assert [o.run.status for o in first if o.run] == ["finished", "finished", "diverged"]
    assert log.read_text().count("built") == 3
    again = plan.run_all(configs, tmp_path / "runs")
    assert log.read_text().count("built") == 3
    assert [o.run.history for o in again if o.run] == [o.run.history for o in first if o.run]
    assert not list(tmp_path.rglob("checkpoint.pt"))


def test_one_failing_setting_does_not_end_the_others(configs: list[TrainConfig], tmp_path: Path) -> None:
    wrong = replace(configs[0], options={"colour": "red"})
    outcomes = plan.run_all([wrong, configs[0]], tmp_path)
    assert outcomes[0].run is None and "no option 'colour'" in (outcomes[0].error or "")
    assert outcomes[1].run is not None and outcomes[1].run.status == "finished"


def test_the_command_on_a_bare_machine(configs: list[TrainConfig], tmp_path: Path) -> None:
    plan.write_plan(configs, tmp_path / "plan.json")
    bare = (
        "import sys\n"
        "for name in ('optuna', 'typer', 'rich', 'matplotlib', 'tensorboard', 'mlxtend'):\n"
        "    sys.modules[name] = None\n"
        "from ekfac.lab.search.plan import main\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "bare.py").write_text(bare)
    command = [sys.executable, "bare.py", *WORDS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("finished, training loss") == 2 and answer.stdout.count("diverged") == 1
    assert sorted(run.status for run in find_runs([tmp_path / "done"])) == ["diverged", "finished", "finished"]


def test_bad_usage_of_the_command_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert plan.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error:") == 2 and "Traceback" not in captured.err
    (tmp_path / "plan.json").write_text("[]")
    assert plan.main([str(tmp_path / "plan.json"), "--out", str(tmp_path / "plan.json" / "x")]) == 2
    assert "plan.json/x' cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["killed", "Ctrl-C"])
def test_workers_end_with_their_parent(how: str, configs: list[TrainConfig], tmp_path: Path) -> None:
    plan.write_plan([replace(config, epochs=10_000) for config in configs[:2]], tmp_path / "plan.json")
    words = ["-m", "ekfac.lab.search.plan", *WORDS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EKFAC_TEST_SLEEP": "0.02"}
    process = started.start(words, cwd=tmp_path, env=environment, group=True, forks=True)
    try:
        wait_until(lambda: len(list(tmp_path.glob("done/*/metrics.jsonl"))) == 2 or process.poll() is not None)
        workers = children(process.pid)
        assert len(workers) >= 2
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            process.wait(timeout=60)
    finally:
        process.kill()
    error = process.communicate(timeout=60)[1]
    wait_until(lambda: not any(alive(worker) for worker in workers))
    if how == "Ctrl-C":
        assert process.returncode == 130 and error == "interrupted; run the same command to resume\n"


def test_a_plan_goes_out_and_its_results_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    from ekfac.cli.main import run

    file, done, out = str(tmp_path / "plan.json"), str(tmp_path / "done"), str(tmp_path / "search")
    settings_words = ["--optimizer", "sgd", "--plugin", PLUGIN, "--lr", "0.1,0.01", "--random", "1"]
    assert run(["sweep", "tiny", *settings_words, "--write-plan", file]) == 0
    assert "4 settings written" in capsys.readouterr().out
    assert plan.main([file, "--out", done]) == 0
    capsys.readouterr()
    for taken in ("4 of 4", "0 of 4"):
        assert run(["sweep", "--take-in", done, "--out", out]) == 0
        assert f"{taken} runs taken in" in capsys.readouterr().out
    assert run(["sweep", "--take-in", done, "--out", out, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trials"] == {"tiny-sgd": 4}
    losses = [o.history[-1]["train_loss"] for o in find_runs([done])]
    assert answer["best"]["tiny-sgd: SGD"][0]["loss"] == min(losses)
    # All is there: searching the same settings runs nothing.
    assert run(["sweep", "--plan", file, "--out", out]) == 0
    assert not (tmp_path / "search" / "runs").exists()
