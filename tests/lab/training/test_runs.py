"""Run folders: complete, refused when taken, read back, resumed bit for bit."""

import io
import json

import pytest
import torch

from ekfac.lab.registry import LabError
from ekfac.lab.train import closing
from ekfac.lab.training import run as training
from ekfac.lab.training.run import Progress, TrainConfig, launch, load_run, train
from ekfac.lab.training.runs import Run, RunFolder

SMALL = {"width": 8, "limit": 200, "batch_size": 50, "device": "cpu"}
CLOCK = ("seconds", "images_per_second", "peak_memory")


def config(optimizer: str = "adam", epochs: int = 4, **more) -> TrainConfig:
    return TrainConfig("classifier", optimizer, epochs=epochs, **SMALL, **more)


def timeless(history):
    """Drop what a clock decides, and the drift, of which the optimizer tells the largest since the process began."""
    kept = []
    for record in history:
        stats = {n: v for n, v in record["optimizer"].items() if "seconds" not in n and n != "residual_drift"}
        kept.append({**{name: value for name, value in record.items() if name not in CLOCK}, "optimizer": stats})
    return kept


def weights(path):
    return torch.load(path / "checkpoint.pt", weights_only=True)["trainer"]["model"]


def _saved(content) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_folder_holds_everything_needed_to_repeat_the_run(tmp_path):
    run = train(config(), tmp_path / "run")
    folder = tmp_path / "run"
    text = json.loads((folder / "config.json").read_text())
    assert text["config"] == run.config.to_dict()
    about = text["about"]
    assert len(about["versions"]["source"]) == 12
    assert about["versions"]["torch"] == torch.__version__ and about["machine"]["cores"] >= 1
    assert about["command"].startswith("ekfac train classifier --optimizer adam")
    assert about["examples"] == {"train": 200, "validation": 1000}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3, 4]
    assert list(folder.glob("events.out.tfevents.*"))
    assert not list(folder.glob("*.part"))
    repeated = train(TrainConfig.from_dict(text["config"]))
    assert timeless(repeated.history) == timeless(run.history)


def test_the_events_hold_the_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(config("ekfac-ra", epochs=2), tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [event.value for event in events.Scalars("train_loss")]
    assert found == pytest.approx([record["train_loss"] for record in run.history], rel=1e-6)
    assert events.Scalars("optimizer/refreshes")


def test_a_run_is_read_back_as_it_was_given(tmp_path):
    run = train(config(epochs=2), tmp_path)
    read = load_run(tmp_path)
    assert (read.config, read.history, read.status, read.about) == (run.config, run.history, "finished", run.about)


def test_a_folder_that_holds_a_run_is_refused_unless_asked(tmp_path):
    train(config(epochs=1), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(LabError, match="already holds a run; --resume continues it, --overwrite removes it"):
        train(config(epochs=1), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    train(config("sgd", epochs=2), tmp_path, overwrite=True)
    assert load_run(tmp_path).config.optimizer == "sgd" and len(load_run(tmp_path).history) == 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwrite_with_a_bad_setting_removes_nothing(tmp_path):
    train(config(epochs=1), tmp_path)
    with pytest.raises(LabError):
        train(config("sgd", epochs=1, lr=-1.0), tmp_path, overwrite=True)
    with pytest.raises(LabError):
        train(config("sgd", epochs=1, options={"no": 1}), tmp_path, overwrite=True)
    assert load_run(tmp_path).config.optimizer == "adam"


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon", "soap", "kfac", "ekfac", "ekfac-ra"])
def test_resumed_equals_uninterrupted_bit_for_bit(optimizer, tmp_path):
    # Refreshing every 3 steps of 4 an epoch puts the cut between two refreshes.
    more = {"refresh_every": 3} if "kfac" in optimizer else {}
    whole = train(config(optimizer, 4, **more), tmp_path / "whole")
    train(config(optimizer, 1, **more), tmp_path / "cut")
    train(config(optimizer, 3, **more), tmp_path / "cut", resume=True)
    resumed = train(config(optimizer, 4, **more), tmp_path / "cut", resume=True)
    assert timeless(resumed.history) == timeless(whole.history)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert [r["epoch"] for r in load_run(tmp_path / "cut").history] == [0, 1, 2, 3, 4]
    seconds = [r["seconds"] for r in resumed.history]
    assert seconds == sorted(seconds)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["before the line", "after the line", "inside the checkpoint", "first epoch"])
def test_whatever_is_left_behind_resuming_gives_each_epoch_once(where, tmp_path, monkeypatch):
    whole = train(config(epochs=4), tmp_path / "whole")
    when = 1 if where == "first epoch" else 3

    def add(self, record, old=RunFolder.add):
        if record["epoch"] == when and where in ("before the line", "first epoch"):
            with self.metrics_file.open("a") as stream:
                stream.write('{"epoch": 3, "trai')  # cut in the middle of a line
            raise Killed
        old(self, record)

    def save(self, state, old=RunFolder.save):
        if state["trainer"]["epoch"] == when:
            if where == "inside the checkpoint":
                (self.path / "checkpoint.pt.part").write_bytes(b"half")
            raise Killed
        old(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add", add)
        patch.setattr(RunFolder, "save", save)
        with pytest.raises(Killed):
            train(config(epochs=4), tmp_path / "cut")
    left = load_run(tmp_path / "cut")
    assert left.status == "unfinished"
    resumed = train(config(epochs=4), tmp_path / "cut", resume=True)
    assert timeless(resumed.history) == timeless(whole.history)
    assert load_run(tmp_path / "cut").history == resumed.history
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_resume_takes_the_folders_settings_and_refuses_others(tmp_path):
    launch({"task": "classifier", "optimizer": "sgd", "epochs": 1, "lr": 0.5, **SMALL}, tmp_path)
    run = launch({"epochs": 2}, tmp_path, resume=True)
    assert run.config.lr == 0.5 and run.history[-1]["epoch"] == 2
    with pytest.raises(LabError, match=r"holds a run with lr 0\.5, not 0\.1"):
        launch({"lr": 0.1}, tmp_path, resume=True)
    with pytest.raises(LabError, match="holds a run with task 'classifier', not 'autoencoder'"):
        launch({"task": "autoencoder", "width": 8}, tmp_path, resume=True)
    with pytest.raises(LabError, match="--resume needs the folder of the run: --out"):
        launch({"task": "classifier"}, resume=True)
    with pytest.raises(LabError, match="cannot both"):
        launch({"task": "classifier"}, tmp_path, resume=True, overwrite=True)


def test_resume_of_nothing_starts_and_of_a_finished_run_changes_nothing(tmp_path):
    first = train(config(epochs=2), tmp_path / "new", resume=True)
    assert first.status == "finished"
    checkpoint = (tmp_path / "new" / "checkpoint.pt").read_bytes()
    again = train(config(epochs=2), tmp_path / "new", resume=True)
    assert again.history == first.history
    assert (tmp_path / "new" / "checkpoint.pt").read_bytes() == checkpoint


def test_the_command_goes_on_only_from_a_checkpoint(tmp_path):
    with pytest.raises(LabError, match="nope holds no run"):
        launch({"task": "classifier"}, tmp_path / "nope", resume=True)
    train(config(epochs=1), tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(LabError, match="run has no checkpoint; --overwrite starts again"):
        launch({"epochs": 2}, tmp_path / "run", resume=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    assert not (tmp_path / "nope").exists()
    # A search has nobody to ask.
    assert train(config(epochs=2), tmp_path / "run", resume=True).status == "finished"


def test_fewer_epochs_than_there_are_is_refused(tmp_path):
    train(config(epochs=3), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(LabError, match=r"epochs must be at least 3, as many as .* has, not 1"):
        launch({"epochs": 1}, tmp_path, resume=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert launch({"epochs": 3}, tmp_path, resume=True).status == "finished"


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip", _saved([1]), _saved({"a": 1})])
def test_a_broken_checkpoint_is_one_clear_line(content, tmp_path):
    train(config(epochs=1), tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(LabError, match=r"checkpoint\.pt is corrupt, or not a checkpoint of this library$"):
        train(config(epochs=2), tmp_path, resume=True)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    train(config(epochs=1), tmp_path / "run")

    class Attack:
        def __reduce__(self):
            return (tmp_path / "run-by-attack").touch, ()

    torch.save({"trainer": Attack()}, tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(LabError, match="is corrupt, or not") as caught:
        train(config(epochs=2), tmp_path / "run", resume=True)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "run-by-attack").exists()


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    train(config(epochs=1), tmp_path / "run")
    other = TrainConfig("classifier", "adam", epochs=1, **{**SMALL, "width": 9})
    train(other, tmp_path / "other")
    (tmp_path / "other" / "checkpoint.pt").replace(tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(LabError, match="does not fit this run"):
        train(config(epochs=2), tmp_path / "run", resume=True)


def test_no_run_and_a_broken_config_are_named(tmp_path):
    with pytest.raises(LabError, match="holds no run"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LabError, match=r"config\.json cannot be read"):
        load_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="is not a folder"):
        train(config(epochs=1), tmp_path / "file")


def test_ctrl_c_ends_tidily_and_the_run_goes_on_later(tmp_path):
    class Stop(Progress):
        def step(self, step, steps):
            if training_epoch[-1] == 2:
                raise KeyboardInterrupt

        def epoch(self, record):
            training_epoch.append(record["epoch"])

    training_epoch = [0]
    run = train(config(epochs=4), tmp_path, progress=Stop())
    assert run.status == "interrupted" and run.exit_code == 130 and run.history[-1]["epoch"] == 2
    assert closing(run) == f"interrupted after epoch 2; continue with --out {tmp_path} --resume"
    first = Run(run.config, run.history[:1], run.status, run.about, run.path)
    assert closing(first) == f"interrupted after epoch 0; start again with --out {tmp_path} --overwrite"
    whole = training.train(config(epochs=4))
    assert timeless(train(config(epochs=4), tmp_path, resume=True).history) == timeless(whole.history)


@pytest.mark.parametrize(
    ("optimizer", "seed", "other"), [("sgd", 1, "seed 1, not 0"), ("ekfac", 0, "optimizer 'ekfac', not 'sgd'")]
)
def test_a_checkpoint_of_another_run_is_refused(optimizer, seed, other, tmp_path):
    """Both files are as they were written, and the networks have the same shapes."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    train(config("sgd", epochs=1), mine)
    train(config(optimizer, epochs=1, seed=seed), theirs)
    (mine / "checkpoint.pt").write_bytes((theirs / "checkpoint.pt").read_bytes())
    before = {file.name: file.read_bytes() for file in mine.iterdir()}
    with pytest.raises(LabError, match=f"checkpoint.pt does not fit this run: it belongs to a run with {other}"):
        launch({"epochs": 2}, mine, resume=True)
    assert {file.name: file.read_bytes() for file in mine.iterdir()} == before
