"""The search: resumed after a kill, shared by workers, on each kind of storage."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

import started
from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.registry import load_plugin
from ekfac.lab.search import plan
from ekfac.lab.search.space import Space, settings
from ekfac.lab.search.study import Trials, open_storage, without_password
from ekfac.lab.search.sweep import Where, existing_studies, state, sweep
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.runs import Run

PLUGIN = str(Path(__file__).parents[1] / "tiny_plugin.py")
load_plugin(PLUGIN)
BASE = TrainConfig("tiny", "sgd", plugins=(PLUGIN,), device="cpu")


def search(lrs: tuple[float, ...] = (0.1, 0.03, 0.01)) -> list[TrainConfig]:
    BASE.resolved()
    return settings(BASE, Space(lrs=lrs, random_points=0))


def command(out: Path, *more: str) -> list[str]:
    words = [
        "-c",
        "from ekfac.cli.main import main; main()",
        "sweep",
        "tiny",
        "--optimizer",
        "sgd",
        "--plugin",
        PLUGIN,
        "--out",
        str(out),
    ]
    return [*words, "--random", "0", *more]


def ekfac(out: Path, *more: str, **environment: str) -> started.Started:
    """Start the command; its workers are forked, as the test with PostgreSQL has some that are spawned."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return started.start(command(out, *more), env=environment, group=True, forks=True)


def wait_for(condition: Callable[[], bool], process: started.Started) -> None:
    for _ in range(20_000):
        if process.poll() is not None or condition():
            break
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()


def test_every_setting_becomes_a_trial_and_a_diverged_one_is_recorded(tmp_path: Path) -> None:
    configs = [*search(), replace(BASE, lr=1e30).resolved()]
    studies = sweep(configs, Where.of(tmp_path))
    trials = studies["tiny-sgd"].all()
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 4
    assert [t.user_attrs["diverged"] for t in trials] == [False, False, False, True]
    assert trials[3].value == float("inf") and all(t.value < 10 for t in trials[:3])
    assert [t.params["lr"] for t in trials] == [0.1, 0.03, 0.01, 1e30]
    runs = studies["tiny-sgd"].runs()
    assert [run.status for run in runs] == ["finished"] * 3 + ["diverged"]
    assert trials[0].intermediate_values == {r["epoch"]: r["train_loss"] for r in runs[0].history}
    assert studies["tiny-sgd"].study.best_trial.params["lr"] == min(trials[:3], key=lambda t: t.value).params["lr"]


def test_a_second_call_repeats_nothing_and_adds_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EKFAC_TEST_LOG", str(tmp_path / "log"))
    sweep(search(), Where.of(tmp_path))
    studies = sweep(search((0.1, 0.03, 0.01, 0.003)), Where.of(tmp_path))
    assert (tmp_path / "log").read_text().count("built") == 4
    assert state(list(studies.values())).over == 4


def test_a_failed_trial_does_not_end_the_search_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = search()
    real = plan.run_one

    def short_of_memory(config: TrainConfig, *rest: object) -> Run:
        if config.lr == 0.03:
            raise MemoryError("no room")
        return real(config, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("ekfac.lab.search.sweep.run_one", short_of_memory)
    trials = sweep(configs, Where.of(tmp_path))["tiny-sgd"]
    assert trials.failures() == {key(configs[1]): "MemoryError: no room"}
    assert len(trials.runs()) == 2
    monkeypatch.setattr("ekfac.lab.search.sweep.run_one", real)
    trials = sweep(configs, Where.of(tmp_path))["tiny-sgd"]
    assert trials.failures() == {} and len(trials.runs()) == 3


def test_killed_and_resumed(tmp_path: Path) -> None:
    """SIGKILL in the middle of a trial: what was done stays, that trial goes on, nothing is run twice."""
    lrs, log = "0.1,0.05,0.03,0.02", tmp_path / "log"
    first = ekfac(tmp_path, "--lr", lrs, "--epochs", "6", EKFAC_TEST_HOLD="2,30", EKFAC_TEST_LOG=str(log))
    runs = tmp_path / "runs"
    wait_for(lambda: log.exists() and log.read_text().count("built") >= 3, first)
    wait_for(lambda: len(lengths := _lengths(runs)) == 2 and min(lengths) >= 3, first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    built = log.read_text().count("built")
    trials = existing_studies(Where.of(tmp_path))["tiny-sgd"]
    done = {t.user_attrs["key"]: t.datetime_complete for t in trials.all(TrialState.COMPLETE)}
    assert done and len(trials.all(TrialState.RUNNING)) == 1
    cut = trials.all(TrialState.RUNNING)[0].user_attrs["key"]
    kept = (runs / cut / "metrics.jsonl").read_text().splitlines()[:2]

    second = ekfac(tmp_path, "--lr", lrs, "--epochs", "6", EKFAC_TEST_LOG=str(log))
    stdout, stderr = second.communicate(timeout=300)
    assert second.returncode == 0, stdout + stderr
    trials = existing_studies(Where.of(tmp_path))["tiny-sgd"]
    complete = trials.all(TrialState.COMPLETE)
    assert len(complete) == 4 and len({t.user_attrs["key"] for t in complete}) == 4
    assert {t.user_attrs["key"]: t.datetime_complete for t in complete if t.user_attrs["key"] in done} == done
    assert log.read_text().count("built") == built + 1 + 4 - len(done), "one looks at the options"
    # The trial that was cut short went on from its checkpoint: its first epochs are those of before.
    assert (runs / cut / "metrics.jsonl").read_text().splitlines()[:2] == kept


def _lengths(runs: Path) -> list[int]:
    return [file.read_bytes().count(b"\n") for file in runs.glob("*/metrics.jsonl")]


def test_two_workers_share_one_study(tmp_path: Path) -> None:
    lrs = "0.1,0.09,0.08,0.07,0.06,0.05,0.04,0.03"
    more = ("--lr", lrs, "--workers", "2", "--json")
    process = ekfac(tmp_path, *more, EKFAC_TEST_MEET=str(tmp_path), EKFAC_TEST_LOG=str(tmp_path / "log"))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stdout + stderr
    answer = json.loads(stdout)
    assert answer["trials"] == {"tiny-sgd": 8}
    assert {row["by"] for row in answer["best"]["tiny-sgd: SGD"]} >= {"final training loss", "validation", "epoch 1"}
    trials = existing_studies(Where.of(tmp_path))["tiny-sgd"].all()
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 8
    assert len({t.user_attrs["worker"]["pid"] for t in trials}) == 2
    assert (tmp_path / "log").read_text().count("built") == 1 + 8, "one looks at the options"


@pytest.mark.parametrize("kind", ["sqlite:///{}/study.db", "journal:{}/study.log"])
def test_nobody_takes_a_trial_that_another_has(kind: str, tmp_path: Path) -> None:
    """Four connections ask for the next trial at the same moment, as long as there are any."""
    where = kind.format(tmp_path)
    count, askers = 40, 4
    Trials(open_storage(where), "tiny-sgd").add(search(tuple(0.1 / (i + 1) for i in range(count))))
    together = threading.Barrier(askers)

    def ask() -> list[int]:
        trials, taken = Trials(open_storage(where), "tiny-sgd"), []
        for _ in range(count // askers):
            together.wait()
            trial = trials.take()
            assert trial is not None
            taken.append(trial.number)
        return taken

    with ThreadPoolExecutor(askers) as pool:
        parts = [pool.submit(ask) for _ in range(askers)]
    assert sorted(number for part in parts for number in part.result()) == list(range(count))


def test_a_setting_that_two_machines_queued_runs_once(tmp_path: Path) -> None:
    configs = search((0.1, 0.03))
    trials = Trials(open_storage(Where.of(tmp_path).storage), "tiny-sgd")
    trials.add(configs)
    for config in configs:
        # What the other machine wrote between this one's look and its own writing.
        frozen = trials.all()[0]
        trials.study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.WAITING,
                user_attrs={**frozen.user_attrs, "key": key(config), "setting": config.to_dict()},
            )
        )
    sweep(configs, Where.of(tmp_path))
    counts = state([trials]).counts
    assert counts == {"complete": 2, "fail": 2} and trials.failures() == {}


def test_a_trial_of_a_silent_machine_is_taken_over_and_one_of_a_living_machine_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(open_storage(Where.of(tmp_path).storage), "tiny-sgd")
    trials.add(search((0.1, 0.03)))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        silent, living = trials.take(), trials.take()
    assert silent is not None and living is not None
    sign = {**silent.user_attrs["worker"], "seen": time.time() - 3600}
    silent.set_user_attr("worker", sign)
    assert trials.release() == 1
    assert {t.user_attrs["key"] for t in trials.all(TrialState.WAITING)} == {silent.user_attrs["key"]}
    assert trials.release() == 0


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_running_trial_gives_signs_of_life(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekfac.lab.search.study.SIGN_OF_LIFE", 0.01)
    monkeypatch.setenv("EKFAC_TEST_SLEEP", "0.02")
    signs: list[float] = []
    real = Trials.finish

    def finish(self: Trials, trial: optuna.Trial, run: Run) -> None:
        frozen = self.all(TrialState.RUNNING)[0]
        assert frozen.datetime_start is not None
        signs.append(frozen.user_attrs["worker"]["seen"] - frozen.datetime_start.timestamp())
        real(self, trial, run)

    monkeypatch.setattr(Trials, "finish", finish)
    storage = f"journal:{tmp_path / 'log'}" if kind == "journal" else None
    study = sweep(search((0.1,)), Where.of(tmp_path, storage))["tiny-sgd"]
    # Eight steps and three evaluations at 20 ms each lie between the first sign and the last.
    assert len(signs) == 1 and signs[0] > 0.1
    assert len(study.runs()) == 1


def test_pruning_is_off_unless_asked_for(tmp_path: Path) -> None:
    good = search((0.1, 0.09, 0.08, 0.07, 0.06, 0.05))
    bad = [replace(BASE, lr=1e-6, epochs=2).resolved()]
    kept = sweep([*good, *bad], Where.of(tmp_path / "kept"))["tiny-sgd"]
    assert not kept.all(TrialState.PRUNED)
    pruned = sweep([*good, *bad], Where.of(tmp_path / "pruned"), prune=True)["tiny-sgd"].all(TrialState.PRUNED)
    assert pruned[-1].params["lr"] == 1e-6
    assert {t.user_attrs["run"]["status"] for t in pruned} == {"unfinished"}


def test_runs_made_elsewhere_are_taken_into_the_study_once(tmp_path: Path) -> None:
    configs = search()
    trials = Trials(open_storage(Where.of(tmp_path).storage), "tiny-sgd")
    trials.add(configs[:2])
    plan.run_all(configs, tmp_path / "elsewhere")
    runs = find_runs([tmp_path / "elsewhere"])
    assert trials.take_in(runs) == 3 and trials.take_in(runs) == 0
    assert state([trials]).counts == {"complete": 3}
    assert {t.params["lr"]: t.value for t in trials.all()} == {
        run.config.lr: run.history[-1]["train_loss"] for run in runs
    }


def test_a_journal_file_is_a_storage(tmp_path: Path) -> None:
    where = Where.of(tmp_path, f"journal:{tmp_path / 'new' / 'journal.log'}")
    sweep(search((0.1,)), where)
    assert state(list(existing_studies(where).values())).counts == {"complete": 1}


@pytest.mark.parametrize("where", ["nonsense", "postgresql://user:secret@127.0.0.1:1/none", "mysql://a/b"])
def test_a_storage_that_cannot_be_opened_is_one_clear_error(where: str) -> None:
    with pytest.raises(LabError, match="cannot be opened") as caught:
        open_storage(where)
    assert "secret" not in str(caught.value)
    assert without_password("postgresql://user:secret@h/db") == "postgresql://user@h/db"


def test_bad_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from ekfac.cli.main import run

    for words in (
        ["sweep"],
        ["sweep", "nothing"],
        ["sweep", "classifier", "--lr", "fast"],
        ["sweep", "classifier", "--lr", ",", "--write-plan", str(tmp_path / "plan.json")],
        ["sweep", "classifier", "--seed", "", "--write-plan", str(tmp_path / "plan.json")],
        ["sweep", "classifier", "--optimizer", "sgd", "--damping", "0.1", "--write-plan", str(tmp_path / "plan.json")],
        ["sweep", "classifier", "--optimizer", "sgd", "--sua", "--write-plan", str(tmp_path / "plan.json")],
        ["sweep", "classifier", "--workers", "0", "--random", "0", "--out", str(tmp_path)],
        ["sweep", "classifier", "--plan", "plan.json"],
        ["sweep", "--take-in", str(tmp_path / "none")],
    ):
        assert run(words) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
        assert captured.out == "" and not (tmp_path / "plan.json").exists()


def test_where_every_setting_diverges_no_best_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ekfac.cli.main import run

    words = command(tmp_path, "--lr", "1e30")[2:]
    assert run([*words, "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out)["best"].values()
    assert [row["loss"] for row in rows if row["by"] == "validation"] == [None]
    assert "final training loss" not in {row["by"] for row in rows}
    assert run(words) == 0
    text = capsys.readouterr().out
    assert text.endswith("tiny-sgd: SGD: no setting converged\n") and "best" not in text and "inf" not in text


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """Start a PostgreSQL server of one's own, as its own user where this is root; yield its URL."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(w) for w in [shutil.which("initdb")] if w]
    if not found:
        pytest.skip("no PostgreSQL server is installed here (initdb not found)")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    tools = found[-1].parent
    as_user: list[str] = []
    folder = tmp_path / "postgres"
    folder.mkdir()
    if os.geteuid() == 0:
        if shutil.which("runuser") is None:
            pytest.skip("PostgreSQL refuses to run as root and there is no runuser here")
        as_user = ["runuser", "-u", "postgres", "--"]
        # Its user must reach the folder through all of its parents.
        folder = Path(subprocess.check_output([*as_user, "mktemp", "-d"], text=True).strip())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")

    def call(*words: str) -> None:
        done = subprocess.run([*as_user, *words], capture_output=True, text=True, cwd="/", timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    call(str(tools / "initdb"), "-D", data, "-A", "trust", "-U", "ekfac", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    call(str(tools / "pg_ctl"), "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql://ekfac@127.0.0.1:{port}/postgres"
    finally:
        call(str(tools / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")
        subprocess.run([*as_user, "rm", "-rf", str(folder)], check=True, cwd="/")


def test_postgresql_with_two_workers_and_a_resume(postgres: str, tmp_path: Path) -> None:
    configs = search((0.1, 0.05, 0.03, 0.01))
    where = Where.of(tmp_path, postgres)
    sweep(configs[:1], where)
    studies = sweep(configs, where, workers=2)
    trials = studies["tiny-sgd"].all()
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 4
    assert len({t.user_attrs["key"] for t in trials}) == 4
    again = sweep(configs, where)["tiny-sgd"]
    assert len(again.all()) == 4 and not list(tmp_path.glob("*.db"))
    assert [run.config.lr for run in again.runs()] == [0.1, 0.05, 0.03, 0.01]
