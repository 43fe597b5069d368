"""Files that cannot lie, folders with one owner, code that only the user names, and ends that leave a word."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState, create_trial

import started
from ekfac import sealed
from ekfac.cli.main import run as ekfac
from ekfac.lab import LabError
from ekfac.lab.boundary import Stopped, stoppable
from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import load_plugin
from ekfac.lab.search import plan
from ekfac.lab.search.study import open_storage
from ekfac.lab.search.sweep import Where, sweep
from ekfac.lab.train import main
from ekfac.lab.training.lock import Lock
from ekfac.lab.training.run import launch, load_run, train
from ekfac.lab.training.runs import RunFolder
from fuzz.files import CONFIG, run_files
from lab.training.test_runs import same, timeless, weights
from processes import wait_until

PLUGIN = str(Path(__file__).parents[1] / "tiny_plugin.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small finished run, copied."""
    out = tmp_path / "run"
    out.mkdir()
    for name, content in run_files().items():
        (out / name).write_bytes(content)
    return out


# --- checksums --------------------------------------------------------------------------------------------------------


def test_a_flipped_weight_ends_no_training_silently(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((folder / "checkpoint.pt").read_bytes())
    at = content.find(weights(folder)["0.weight"].numpy().tobytes())
    assert at > 0
    content[at + 3] ^= 0x40
    (folder / "checkpoint.pt").write_bytes(content)
    assert main(["--resume", "--epochs", "2", "--out", str(folder)]) == 2
    assert "checkpoint.pt is corrupt" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_an_edited_number_is_noticed(name: str, folder: Path) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace('"lr": 0.', '"lr": 1.', 1))
    assert (folder / name).read_text() != text
    with pytest.raises(LabError, match=rf"{name}.* cannot be read: it was altered after it was written"):
        load_run(folder)


def test_a_run_of_an_older_version_is_read_and_resumed_with_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def older(content: bytes) -> dict:
        data = json.loads(content)
        del data["checksum"]
        return data

    before = load_run(folder)
    config = older((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "format": 1}))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(older(line)) + "\n" for line in lines))
    torch.save(torch.load(folder / "checkpoint.pt", weights_only=True), folder / "checkpoint.pt")
    assert load_run(folder).history == before.history
    assert main(["--resume", "--epochs", "2", "--out", str(folder)]) == 0
    assert "note: " in (said := capsys.readouterr().err) and "checkpoint.pt has no checksum" in said
    assert len(load_run(folder).history) == 3
    assert main(["--resume", "--epochs", "3", "--out", str(folder)]) == 0
    assert "note" not in capsys.readouterr().err, "what is written now has one"


def test_an_older_checkpoint_with_a_flipped_bit_is_refused_by_the_archives_crc(folder: Path) -> None:
    torch.save(torch.load(folder / "checkpoint.pt", weights_only=True), folder / "checkpoint.pt")
    content = bytearray((folder / "checkpoint.pt").read_bytes())
    content[content.find(weights(folder)["0.weight"].numpy().tobytes()) + 3] ^= 0x40
    (folder / "checkpoint.pt").write_bytes(content)
    with pytest.raises(LabError, match="is corrupt"):
        RunFolder(folder).load()


def test_other_programs_read_the_files_as_before(folder: Path) -> None:
    assert set(torch.load(folder / "checkpoint.pt", weights_only=True)) == {"trainer", "history", "config"}
    assert json.loads((folder / "config.json").read_text())["config"]["task"] == "classifier"
    assert [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_the_seal_is_the_digest_of_the_file_with_zeros_for_its_digits(folder: Path) -> None:
    import hashlib

    text = (folder / "config.json").read_bytes()
    at = text.index(b"sha256:") + 7
    assert text[at : at + 64].decode() == hashlib.sha256(text[:at] + 64 * b"0" + text[at + 64 :]).hexdigest()
    with pytest.raises(ValueError, match="checksum"):
        sealed.dumps({"checksum": 1})
    with pytest.raises(sealed.Altered, match="broken"):
        sealed.loads(text.replace(b'"checksum": ', b'"checksum":\t', 1))  # JSON all the same


# --- one owner --------------------------------------------------------------------------------------------------------


def test_the_second_to_come_is_told_who_is_there(folder: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    owner = Lock(folder)
    owner.acquire()
    for flags in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(LabError, match=rf"run is in use by process {os.getpid()} on .* since 2"):
            train(CONFIG, folder, **flags)
    owner.release()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert train(CONFIG, folder, resume=True).status == "finished"
    assert not (folder / ".lock").exists()


def test_an_owner_that_has_not_signed_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import threading

    monkeypatch.setattr("ekfac.lab.training.lock._TO_SIGN", 120.0)
    with (tmp_path / ".lock").open("a+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        signed = json.dumps({"pid": 7, "host": "there", "since": "2000-01-01 00:00:00"})
        later = threading.Timer(0.1, lambda: (owner.write(signed), owner.flush()))
        later.start()
        with pytest.raises(LabError, match="in use by process 7 on there since 2000"):
            Lock(tmp_path).acquire()
        later.join()


def test_an_owner_that_never_signs_holds_the_folder_all_the_same(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("a+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(LabError, match="in use by another process: wait"):
            Lock(tmp_path).acquire()


def test_two_trainings_in_one_folder_never_mix(tmp_path: Path) -> None:
    words = ["-m", "ekfac.lab.train", "tiny", "--plugin", PLUGIN, "--optimizer", "sgd"]
    words += ["--epochs", "3", "--device", "cpu", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EKFAC_TEST_SLEEP": "0.05"}
    both = [started.start(words, env=environment) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    loser = codes.index(2)
    # On a busy machine the owner may be over before the other reads its name, or not have written it after a second.
    assert "is in use by" in errors[loser] or "already holds a run" in errors[loser]
    assert [record["epoch"] for record in load_run(tmp_path / "run").history] == [0, 1, 2, 3]


def test_a_dead_process_holds_no_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    lock = Lock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.acquire()
        os.write(writer, b"x")
        signal.pause()
    try:
        os.read(reader, 1)
        with pytest.raises(LabError, match=f"in use by process {child} on"):
            lock.acquire()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lock.acquire()
    assert lock.held and json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_bad_input_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(LabError):
        train(TrainConfig("classifier", "sgd", options={"nothing": 1}), tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


# --- code named in data never runs ------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path: Path) -> tuple[Path, Path]:
    """A plugin that leaves a trace when it runs, and the trace."""
    trace = tmp_path / "trace"
    file = tmp_path / f"trap_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(f"open({str(trace)!r}, 'w').close()\n")
    return file, trace


def test_a_runs_config_starts_no_code(folder: Path, trap: tuple[Path, Path], capsys) -> None:
    file, trace = trap
    data, _ = sealed.loads((folder / "config.json").read_bytes())
    data["config"]["plugins"] = [str(file)]
    (folder / "config.json").write_bytes(sealed.dumps(data, indent=2))
    assert main(["--resume", "--epochs", "2", "--out", str(folder)]) == 2
    assert f"pass --plugin {file}" in capsys.readouterr().err
    assert ekfac(["report", str(folder), "--out", str(folder / "page.html")]) == 0
    assert not trace.exists()
    # Named here, it runs; also from another place than it was at then.
    assert main(["--resume", "--epochs", "2", "--out", str(folder), "--plugin", str(file)]) == 0
    assert trace.exists()


def test_a_plan_starts_no_code(trap: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    file, trace = trap
    (tmp_path / "plan.json").write_text(json.dumps([{"task": "classifier", "plugins": [str(file), "antigravity"]}]))
    assert ekfac(["sweep", "--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out")]) == 2
    assert plan.main([str(tmp_path / "plan.json"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count(f"pass --plugin {file} --plugin antigravity") == 2
    assert not trace.exists() and "antigravity" not in sys.modules


def test_a_study_starts_no_code_and_waits_for_whoever_brings_it(trap: tuple[Path, Path], tmp_path: Path) -> None:
    load_plugin(PLUGIN)
    file, trace = trap
    where = Where.of(tmp_path / "out")
    base = TrainConfig("tiny", "sgd", plugins=(PLUGIN,), device="cpu", epochs=1)
    mine = base.resolved()
    Path(where.out).mkdir()
    trials = sweep([mine], where)["tiny-sgd"]
    attributes = dict(trials.all()[0].user_attrs)
    theirs = {**attributes["setting"], "lr": 0.5, "plugins": [str(file)]}
    trials.study.add_trial(
        create_trial(state=TrialState.WAITING, user_attrs={**attributes, "key": "theirs", "setting": theirs})
    )
    trials = sweep([mine], where)["tiny-sgd"]
    assert not trace.exists()
    assert any(f"--plugin {file}" in note for note in trials.notes)
    assert len(trials.all(TrialState.WAITING)) == 1 and len(trials.runs()) == 1


# --- foreign trials ---------------------------------------------------------------------------------------------------


def test_a_foreign_trial_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_plugin(PLUGIN)
    study = optuna.create_study(storage=open_storage(Where.of(tmp_path).storage), study_name="tiny-sgd")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    study.enqueue_trial({"x": 0.5})
    words = ["sweep", "tiny", "--plugin", PLUGIN, "--optimizer", "sgd", "--lr", "0.1", "--random", "0"]
    words += ["--epochs", "1", "--out", str(tmp_path)]
    for _ in range(2):
        assert ekfac(words) == 0
        captured = capsys.readouterr()
        assert captured.err.count("is left alone: it was not created by ekfac sweep") == 3
        assert "1 complete" in captured.out
    assert len(study.get_trials()) == 4


def test_a_study_of_another_kind_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(Where.of(tmp_path).storage)
    optuna.create_study(storage=storage, study_name="classifier-sgd", directions=["minimize", "maximize"])
    assert ekfac(["sweep", "classifier", "--optimizer", "sgd", "--lr", "0.1", "--out", str(tmp_path)]) == 2
    assert "study 'classifier-sgd' does not minimize one number" in capsys.readouterr().err


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "checkpoint.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        code = main(["--resume", "--epochs", "3", "--out", str(folder)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error == f"error: --out '{folder}' cannot be written: File too large: '{folder}/checkpoint.pt'\n"
    assert (folder / "checkpoint.pt").read_bytes() == before and not list(folder.glob("*.part"))
    whole = train(TrainConfig.from_dict({**CONFIG.to_dict(), "epochs": 3}))
    resumed = launch({"epochs": 3}, folder, resume=True)
    assert timeless(resumed.history) == timeless(whole.history)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_run_with_a_word_and_it_goes_on_later(number: int, code: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["-m", "ekfac.lab.train", "tiny", "--plugin", PLUGIN, "--optimizer", "sgd"]
    words += ["--epochs", "15", "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = started.start(words, env={**environment, "EKFAC_TEST_SLEEP": "0.02", "EKFAC_TEST_HOLD": "1,60"})
    wait_until(lambda: (out / "checkpoint.pt").exists() or process.poll() is not None)
    process.send_signal(number)
    said, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    name = signal.Signals(number).name
    assert f"interrupted by {name} after epoch" in said and "--resume" in said and "Traceback" not in error
    assert not list(out.glob("*.part")) and not (out / ".lock").exists()
    assert started.run([*words, "--resume"], env=environment).returncode == 0
    assert started.run([*words[:-1], str(tmp_path / "whole")], env=environment).returncode == 0
    assert timeless(load_run(out).history) == timeless(load_run(tmp_path / "whole").history)
    assert same(weights(out), weights(tmp_path / "whole"))


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        with pytest.raises(Stopped) as caught, stoppable():
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_term_ends_a_search_with_its_workers_and_it_goes_on_later(tmp_path: Path) -> None:
    words = ["-c", "from ekfac.cli.main import main; main()", "sweep", "tiny", "--plugin", PLUGIN]
    words += ["--optimizer", "sgd", "--lr", "0.1,0.2", "--random", "0", "--epochs", "30", "--out", str(tmp_path)]
    words += ["--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    held = {**environment, "EKFAC_TEST_SLEEP": "0.02", "EKFAC_TEST_HOLD": "1,120"}
    process = started.start(words, env=held, forks=True)
    wait_until(lambda: bool(list(tmp_path.glob("runs/*/checkpoint.pt"))) or process.poll() is not None)
    process.terminate()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 143 and error == "interrupted by SIGTERM; run the same command to resume\n", error
    assert not list(tmp_path.glob("runs/*/.lock"))
    # One worker suffices to go on, and is this process itself.
    done = started.run([*words[:-1], "1"], env=environment)
    assert done.returncode == 0 and "2 complete" in done.stdout, done.stderr


# --- tracebacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "lr=abc"], "lr must be of type float, not 'abc'"),
        (["--set", "lr=[1]"], "lr must be of type float, not [1]"),
        (["--set", "refresh_every=0.5", "--optimizer", "ekfac-ra"], "refresh_every must be of type int, not 0.5"),
        (["--set", "momentum=abc"], "optimizer sgd: "),
    ],
)
def test_a_bad_value_is_one_line(words: list[str], message: str, tiny: list[str], capsys) -> None:
    assert ekfac(["train", *tiny, "--optimizer", "sgd", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"\xff\xfe"),
        ("config.json", b'{"format": 1, "config": [], "about": {}}'),
        ("config.json", b'{"format": 1, "config": {"task": "classifier", "options": 3}, "about": {}}'),
        ("config.json", b'{"format": 1, "config": {"task": "classifier"}, "about": {"floor": {"train": "x"}}}'),
        ("config.json", b"[" * 100_000),
        ("metrics.jsonl", b"\xff\n"),
        ("metrics.jsonl", b"[]\n"),
        ("metrics.jsonl", b'{"epoch": 0}\n'),
        ("metrics.jsonl", b'{"epoch": 0, "step": 0, "seconds": NaN, "train_loss": 1, "diverged": false}\n'),
    ],
)
@pytest.mark.parametrize("command", ["report", "resume"])
def test_a_broken_run_is_one_line(name: str, content: bytes, command: str, folder: Path, capsys) -> None:
    if name == "metrics.jsonl":
        data, _ = sealed.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps({**data, "format": 1}))
    (folder / name).write_bytes(content)
    words = {
        "report": ["report", str(folder), "--out", str(folder / "page.html")],
        "resume": ["train", "--resume", "--epochs", "2", "--out", str(folder)],
    }
    if command == "resume" and name == "metrics.jsonl":
        assert ekfac(words[command]) == 0, "the checkpoint holds the records too"
        return
    assert ekfac(words[command]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder / name}") and error.count("\n") == 1
    assert ekfac(["watch", str(folder)]) == 0, "what cannot be read is left out"
