"""The command: each verb end to end on tiny settings; every bad option is one clear line and exit status 2."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ekfac
import started
from ekfac.cli import main as cli
from ekfac.cli.train import signature
from ekfac.lab import train
from ekfac.lab.boundary import outermost, writing
from ekfac.lab.optimizers import OPTIMIZERS
from ekfac.lab.registry import LabError
from ekfac.lab.show import demo
from ekfac.lab.training.run import load_run
from lab.conftest import mnist_bytes


def run(*words: str) -> int:
    return cli.run([str(word) for word in words])


def test_train_records_a_run_and_says_how_it_went(tiny, tmp_path, capsys):
    assert run("train", *tiny, "--optimizer", "ekfac-ra", "--out", tmp_path / "run", "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert "classifier by ekfac-ra: 6,586 parameters, 200 examples of mnist-5k, batch 50, 2 epochs on cpu" in text
    assert "finished after epoch 2; recorded in" in text
    assert load_run(tmp_path / "run").status == "finished"
    assert run("train", "--resume", "--out", tmp_path / "run", "--epochs", "3") == 0
    assert "finished after epoch 3" in capsys.readouterr().out


def test_train_json_is_one_object_and_nothing_else(tiny, capsys):
    assert run("train", *tiny, "--optimizer", "adam", "--set", "betas=(0.8, 0.9)", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "finished" and len(result["history"]) == 3
    assert result["config"]["options"]["betas"] == [0.8, 0.9]


def test_a_run_that_diverges_exits_with_1(tiny, capsys, tmp_path):
    assert run("train", *tiny, "--optimizer", "sgd", "--lr", "1e20", "--out", tmp_path) == 1
    assert "diverged in epoch" in capsys.readouterr().out
    assert load_run(tmp_path).status == "diverged"


def test_both_front_ends_have_the_same_options():
    plain = {action.dest for action in train.parser()._actions} - {"help"}
    more = {"config", "seeds", "tag", "note"}  # the command's own
    assert plain == set(signature().parameters) - more


BAD = [
    (["train"], "a task must be named; known: autoencoder, classifier"),
    (["train", "gan"], "unknown task 'gan'; known: autoencoder"),
    (["train", "gan"], "one of your own needs --plugin FILE.py, the file that registers it"),
    (["train", "classifier", "--optimizer", "newton"], "unknown optimizer 'newton'; known: sgd"),
    (["train", "classifier", "--optimizer", "newton"], "one of your own needs --plugin FILE.py"),
    (["train", "classifier", "--dataset", "svhn"], "unknown dataset 'svhn'; known: mnist-5k"),
    (["train", "classifier", "--epochs", "two"], "'two'"),
    (["train", "classifier", "--lr", "fast"], "'fast'"),
    (["train", "classifier", "--epochs", "0"], "epochs must be at least 1, not 0"),
    (["train", "classifier", "--batch-size", "-5"], "batch_size must be at least 1, not -5"),
    (["train", "classifier", "--batch-size", "5000"], "batch_size 5000 is more than the 4000 training examples"),
    (["train", "classifier", "--width", "0"], "width must be at least 1, not 0"),
    (["train", "classifier", "--limit", "9999"], "limit 9999 is more than the 4000"),
    (["train", "classifier", "--lr", "nan"], "lr must be a positive number, not nan"),
    (["train", "classifier", "--lr", "-1"], "lr must be a positive number, not -1"),
    (["train", "classifier", "--damping", "0"], "damping must be a positive number, not 0"),
    (["train", "classifier", "--damping-mode", "wild"], "damping_mode='wild' is not known. Allowed: 'plain'"),
    (["train", "classifier", "--refresh-every", "0"], "refresh_every must be at least 1, not 0"),
    (["train", "classifier", "--halve-every", "0"], "halve_every must be at least 1, not 0"),
    (["train", "classifier", "--seed", "-1"], "seed must be between 0"),
    (["train", "classifier", "--device", "abacus"], "device 'abacus' cannot be used"),
    (["train", "classifier", "--dtype", "int4"], "unknown dtype 'int4'; known: float32"),
    (["train", "classifier", "--set", "momentum"], "--set takes name=value, not 'momentum'"),
    (["train", "classifier", "--set", "no_such=1"], "no_such"),
    (["train", "classifier", "--optimizer", "adam", "--set", "betas=[0.9]"], "out of range (lr=0.001, betas=[0.9])"),
    (["train", "classifier", "--optimizer", "adam", "--set", "capturable=true"], "adam has no option 'capturable'"),
    (["train", "classifier", "--optimizer", "sgd", "--sua"], "optimizer sgd has no option 'sua'"),
    (["train", "classifier", "--plugin", "missing.py"], "plugin 'missing.py' does not exist"),
    (["train", "classifier", "--resume"], "--resume needs the folder of the run: --out"),
    (["train", "--resume", "--out", "nope"], "nope holds no run"),
    (["train", "classifier", "--resume", "--out", "nope"], "nope holds no run"),
    (["train", "classifier", "--no-such-option"], "no-such-option"),
    (["train", "classifier", "extra"], "extra"),
    (["train", "classifier", "--dataset", "mnist", "--data-dir", "/nowhere"], "not found in /nowhere"),
]
ONLY_EKFAC = [
    (["demo", "--seconds", "0"], "seconds must be positive"),
    (["demo", "--seconds", "soon"], "'soon'"),
    (["sweep", "classifier", "--random", "some"], "'some'"),
    (["summary"], "task"),
    (["summary", "gan"], "one of your own needs --plugin FILE.py"),
    (["figure", "gan"], "unknown figure 'gan'"),
    (["figure", "rescaling", "--batch-size", "-3"], "batch_size must be at least 1, not -3"),
    (["train", "classifier", "--seeds", "0,-1"], "seed must be between 0 and 2**32 - 1, not -1"),
    (["summary", "vgg11", "--width", "-1"], "width must be at least 1"),
    (["data", "fetch", "svhn"], "known: mnist-5k, mnist, cifar10"),
    (["data", "verify", "svhn"], "known: mnist-5k, mnist, cifar10"),
    (["data", "burn"], "burn"),
    (["swim"], "swim"),
]


@pytest.mark.parametrize(("words", "message"), BAD + ONLY_EKFAC, ids=lambda value: " ".join(value[:8]))
def test_bad_usage_is_one_line_and_exit_status_2(words, message, capsys):
    assert cli.run(words) == 2
    answer = capsys.readouterr()
    assert message in answer.err and answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1 and "Traceback" not in answer.err


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: " ".join(value[:8]))
def test_bad_usage_without_typer_is_the_same(words, message, capsys):
    assert train.main(words[1:]) == 2
    answer = capsys.readouterr()
    assert message in answer.err and answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1 and "Traceback" not in answer.err


def test_a_taken_folder_is_bad_usage(tiny, tmp_path, capsys):
    assert run("train", *tiny, "--out", tmp_path) == 0
    assert run("train", *tiny, "--out", tmp_path) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run("train", *tiny, "--out", tmp_path, "--overwrite", "--resume") == 2
    assert run("train", *tiny, "--out", tmp_path, "--overwrite") == 0


TINY = ["classifier", "--width", "8", "--limit", "200", "--batch-size", "50", "--epochs", "1"]
UNWRITABLE = [
    (["train", *TINY], "--out", "afile/x"),
    (["train", *TINY], "--out", "/proc/foo"),
    (["figure", "rescaling"], "--out", "afile"),
    (["figure", "rescaling"], "--out", "afile/x"),
    (["figure", "rescaling"], "--measures", "afile/m.json"),
    (["report", "run"], "--out", "afile/x.html"),
    (["sweep", "classifier", "--random", "0"], "--write-plan", "afile/p.json"),
    (["sweep", "classifier", "--random", "0"], "--out", "afile"),
    (["sweep", "--take-in", "run"], "--out", "afile/x"),
    (["demo", "--seconds", "0.01"], "--out", "afile/x"),
    (["data", "fetch", "mnist-5k"], "--data-dir", "afile"),
    (["data", "fetch", "mnist-5k"], "--data-dir", "afile/x"),
]


@pytest.fixture
def a_file_and_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("mine")
    assert train.main([*TINY, "--optimizer", "sgd", "--out", "run"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(("words", "option", "value"), UNWRITABLE, ids=lambda value: " ".join(value))
@pytest.mark.usefixtures("a_file_and_a_run")
def test_what_cannot_be_written_is_bad_usage(words, option, value, capsys):
    assert run(*words, option, value) == 2
    answer = capsys.readouterr()
    assert answer.err.startswith(f"error: {option} '{value}' cannot be written: ") and answer.err.count("\n") == 1
    assert answer.out == "" and Path("afile").read_text() == "mine"


@pytest.mark.usefixtures("a_file_and_a_run")
def test_what_cannot_be_written_without_typer_is_the_same(capsys):
    assert train.main([*TINY, "--out", "afile/x"]) == 2
    assert capsys.readouterr().err == "error: --out 'afile/x' cannot be written: Not a directory\n"


@pytest.mark.usefixtures("a_file_and_a_run")
def test_a_file_that_no_option_names_is_still_one_line(monkeypatch, capsys):
    monkeypatch.setenv("EKFAC_DATA", "afile")
    assert run("data", "fetch", "mnist-5k") == 2
    assert capsys.readouterr().err == "error: 'afile' cannot be used: Not a directory\n"


def test_an_error_of_the_system_that_is_not_about_a_file_is_no_bad_usage(tiny, monkeypatch):
    def broken(*words, **more):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("ekfac.cli.train.launch", broken)
    with pytest.raises(OSError, match="Input/output"):
        run("train", *tiny)


def _stop(*words, **more):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "where", "message"),
    [
        (["doctor", "classifier"], "ekfac.cli.doctor.examine", "nothing was written"),
        (["demo"], "ekfac.lab.show.demo.race", "nothing was written"),
        (["demo", "--out", "d"], "ekfac.lab.show.demo.race", "what each had done by then is recorded in d"),
        (["figure", "all", "--out", "f"], "ekfac.lab.show.figures.make", "figures drawn so far are in f"),
        (
            ["figure", "all", "--quick", "--out", "f"],
            "ekfac.lab.show.figures.make",
            "figures drawn so far are in f; the small runs are kept in f/quick-runs: run the same command to resume",
        ),
        (["sweep", "classifier", "--out", "s"], "ekfac.lab.search.sweep.sweep", "run the same command to resume"),
        (["data", "fetch", "mnist-5k"], "ekfac.lab.data.files.fetch", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_ctrl_c_says_what_is_left(words, where, message, monkeypatch, capsys):
    monkeypatch.setattr(where, _stop)
    assert run(*words) == 130
    answer = capsys.readouterr()
    assert answer.err == ("interrupted\n" if message is None else f"interrupted; {message}\n") and answer.out in (
        "",
        "loading data\n",
    )


FRONT_ENDS = {
    "ekfac train": lambda *words: cli.run(["train", *words]),
    "python -m ekfac.lab.train": lambda *words: train.main(words),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)
def test_a_command_whose_output_nobody_reads_ends_without_a_word(front_end, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert outermost(lambda: front_end(*TINY, "--optimizer", "sgd")) == 141
    monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_another_broken_pipe_is_no_reader_that_left(monkeypatch):
    def broken():
        raise BrokenPipeError("a worker's")

    with open(os.devnull, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(BrokenPipeError, match="a worker's"):
            outermost(broken)


@pytest.mark.usefixtures("a_file_and_a_run")
def test_what_the_terminal_cannot_show_is_an_escape(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert outermost(lambda: run("note", "run", "1 ± 2")) == 0
    assert stream.buffer.getvalue() == b"1 \\xb1 2\n"


def test_a_name_that_is_no_text_is_bad_usage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("train", *TINY, "--out", os.fsdecode(b"bad\xff")) == 2
    assert capsys.readouterr().err.startswith("error: --out 'bad\\udcff' is not valid UTF-8")
    assert not list(tmp_path.iterdir())


def test_the_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"ekfac {ekfac.__version__}\n"


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_help_lists_the_optimizers_and_the_default(command, capsys):
    assert run(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    found = re.search(r"one of: (.*?), or a plugin's \[default: ekfac-ra\]", text)
    assert found is not None
    listed = found[1].split(", ")  # what other tests have registered since is not
    assert listed == list(OPTIMIZERS)[: len(listed)] and {"sgd", "adamw", "kfac", "ekfac-default"} <= {*listed}


def test_the_example_of_a_figure_uses_runs_that_are_there(capsys):
    assert run("figure", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    folder = re.search(r"--runs (results/\S+)", text).group(1)
    assert list((Path(__file__).parents[2] / folder).rglob("config.json"))


def test_one_is_singular(tiny, tmp_path, capsys):
    assert run("train", *tiny, "--optimizer", "sgd", "--epochs", "1", "--out", tmp_path / "run") == 0
    assert "batch 50, 1 epoch on " in capsys.readouterr().out
    assert run("report", tmp_path / "run", "--out", tmp_path / "report.html") == 0
    assert capsys.readouterr().out.startswith("1 run reported in")
    for answer in ("1 of 1 run taken in\n", "0 of 1 run taken in; 1 was there already\n"):
        assert run("sweep", "--take-in", tmp_path / "run", "--out", tmp_path / "study") == 0
        assert capsys.readouterr().out.startswith(answer)
    plan = ["--lr", "0.1", "--optimizer", "sgd", "--random", "0", "--write-plan", tmp_path / "plan.json"]
    assert run("sweep", "classifier", *plan) == 0
    assert capsys.readouterr().out.startswith("1 setting written")


@pytest.mark.parametrize("task", ["autoencoder", "vgg11"])
def test_summary_shows_the_blocks(task, capsys):
    assert run("summary", task, "--width", "8") == 0
    text = capsys.readouterr().out
    assert task in text and "kronecker" in text
    assert run("summary", task, "--width", "8", "--json", "--batch-norm") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == sum(_size(shape) for shape in data["shapes"].values())
    assert run("summary", "tiny", "--plugin", str(Path(__file__).parents[1] / "lab" / "tiny_plugin.py")) == 0
    assert capsys.readouterr().out.startswith("tiny: 23 parameters; trained on tiny\n")


def _size(shape):
    size = 1
    for length in shape:
        size *= length
    return size


def test_verify_and_fetch(official, tmp_path, capsys):
    data_dir = official("mnist", mnist_bytes())
    assert run("data", "verify", "mnist", "--data-dir", data_dir) == 0
    assert capsys.readouterr().out.count(": ok") == 4
    (data_dir / "train-labels-idx1-ubyte").write_bytes(b"short")
    assert run("data", "verify", "mnist", "--data-dir", data_dir, "--json") == 1
    answers = json.loads(capsys.readouterr().out)["mnist"]
    assert answers["t10k-labels-idx1-ubyte"] == "ok" and "MD5" in answers["train-labels-idx1-ubyte"]
    assert run("data", "fetch", "mnist-5k", "--data-dir", tmp_path / "new") == 0
    assert run("data", "verify", "mnist-5k", "--data-dir", tmp_path / "new") == 0


def test_demo_trains_all_six_and_says_who_is_ahead(monkeypatch, capsys, tmp_path):
    from dataclasses import replace

    race = demo.RACES["autoencoder"]
    small = {name: replace(c, width=8, limit=200, batch_size=50) for name, c in race.entrants.items()}
    monkeypatch.setitem(demo.RACES, "autoencoder", replace(race, entrants=small))
    assert run("demo", "--race", "autoencoder", "--seconds", "0.2", "--out", tmp_path) == 0
    text = capsys.readouterr().out
    for name in ("SGD + BN", "Adam + BN", "KFAC", "EKFAC", "EKFAC-ra", "(defaults)"):
        assert name in text
    assert "steps" in text and "seconds of training" in text and "is ahead" in text
    names = ["adam+bn", "ekfac", "ekfac-defaults", "ekfac-ra", "kfac", "report.html", "sgd+bn"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert run("demo", "--race", "autoencoder", "--seconds", "0.05", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["verdict"]["standings"]) == 6 and set(data["runs"]) == set(small)


def test_the_first_demo_can_be_changed_and_the_recorded_one_replayed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run("demo", "--seconds", "0.05", "--width", "8", "--batch-size", "1000", "--batch-norm", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert set(runs) == {"SGD", "Adam", "Adam + BN", "EKFAC"}
    assert {(r["config"]["width"], r["config"]["batch_size"]) for r in runs.values()} == {(8, 1000)}
    assert run("demo", "--recorded", "--seconds", "0.01") == 0
    text = capsys.readouterr().out
    assert "EKFAC (defaults) is ahead" in text and not list(tmp_path.iterdir())
    assert run("demo", "--race", "boats") == 2


@pytest.mark.parametrize(
    "words", [[], ["train"], ["demo"], ["summary"], ["doctor"], ["data"], ["data", "fetch"], ["data", "verify"]]
)
def test_help_everywhere_with_examples(words, capsys):
    assert cli.run([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: ekfac" in text.replace("\n", " ")
    if words != ["data"]:
        assert "ekfac " + " ".join(words) in text.split("Usage", 1)[1].split("\n", 1)[1]


def test_no_arguments_show_the_help(capsys):
    assert cli.run([]) == 2
    assert "Commands" in capsys.readouterr().out


def test_shell_completion_knows_the_names():
    environment = {**os.environ, "_EKFAC_COMPLETE": "complete_bash", "COMP_WORDS": "ekfac train au", "COMP_CWORD": "2"}
    answer = started.run(["-c", "from ekfac.cli.main import main; main()"], env=environment)
    assert answer.stdout.split() == ["autoencoder"]


def test_the_version_is_there_before_torch_is() -> None:
    """What is slow about a command line is importing torch; the version needs nothing."""
    code = (
        "import sys; sys.argv = ['ekfac', '--version']\n"
        "from ekfac.cli.entry import main; main()\n"
        "assert not {'torch', 'numpy', 'typer', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"ekfac {ekfac.__version__}\n"


@pytest.mark.parametrize("module", ["ekfac", "ekfac.cli.main"])
def test_a_module_is_the_command_too(module: str) -> None:
    version, wrong = (started.run(["-m", module, *words]) for words in (["--version"], ["summary", "gan"]))
    assert (version.returncode, version.stdout) == (0, f"ekfac {ekfac.__version__}\n")
    assert wrong.returncode == 2 and "error: unknown task 'gan'" in wrong.stderr


def test_every_public_name_is_there_when_it_is_asked_for() -> None:
    for name in ekfac.__all__:
        assert getattr(ekfac, name) is not None and name in dir(ekfac)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ekfac.nothing


def test_train_says_its_settings_and_shows_losses_above_their_floor(tmp_path, capsys):
    words = ["autoencoder", "--width", "20", "--limit", "200", "--batch-size", "50", "--epochs", "1", "--device", "cpu"]
    assert run("train", *words, "--optimizer", "ekfac-ra", "--out", tmp_path / "run") == 0
    text = capsys.readouterr().out
    assert "lr 0.03, damping 0.001, freq 10, seed 0" in text
    found = load_run(tmp_path / "run")
    floor = found.about["floor"]["train"]
    assert f"losses are above their floor: {floor:.2f} train" in text
    assert f"{found.history[-1]['train_loss'] - floor:.4g}" in text
    assert f"{found.history[-1]['train_loss']:.4g}" not in text


def test_a_file_beside_its_place_is_named_as_the_option(tmp_path: Path) -> None:
    """A file is written beside its place first; the error names what was asked for."""
    page = tmp_path / "page.html"
    with pytest.raises(LabError, match=f"--out '{page}' cannot be written: No such file"), writing({"out": str(page)}):
        raise OSError(errno.ENOENT, "No such file", f"{page}.{os.getpid()}.part")
