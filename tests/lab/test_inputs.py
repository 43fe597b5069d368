"""Files of others that are wrong: one line that names the file, and nothing is run from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ekfac import sealed
from ekfac.lab import reproduce
from ekfac.lab.config import TrainConfig, parse_options
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.search.plan import read_plan
from ekfac.lab.search.sweep import Where, sweep
from ekfac.lab.settings import read_settings
from ekfac.lab.show.figures import make
from ekfac.lab.suite import config
from ekfac.lab.suite.records import Records, read_config
from ekfac.lab.training.runs import PROCESSES, machine
from fuzz.inputs import databases, measures
from fuzz.studies import PLUGIN
from lab.suite.cases import record


@pytest.mark.parametrize(
    "text",
    ["lr: 2020-13-45", "lr: !!float x", "[" * 100_000, "lr: !!python/object/apply:os.system ['true']", "a: &a [*a]"],
)
def test_settings_that_yaml_cannot_make_are_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(LabError, match=r"settings\.yaml") as caught:
        read_settings(tmp_path / "settings.yaml")
    assert "\n" not in str(caught.value)


def test_settings_say_where_they_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("task: tiny\nlr: [0.1\nepochs: 3\n")
    with pytest.raises(LabError, match=r"settings\.yaml cannot be read: line 3, column \d+: expected"):
        read_settings(tmp_path / "settings.yaml")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_files_that_other_systems_wrote_are_read(encoding: str, newline: str, tmp_path: Path) -> None:
    """With a byte order mark, CRLF, or in UTF-16, as Windows writes them."""

    def file(name: str, text: str) -> Path:
        (tmp_path / name).write_bytes(text.replace("\n", newline).encode(encoding))
        return tmp_path / name

    assert read_settings(file("s.yaml", "task: tiny\nlr: 1e-2\n# über\n")) == {"task": "tiny", "lr": 0.01}
    assert config.read(file("c.json", '{\n"about": "für alle"}')) == {"about": "für alle"}
    (one,) = read_plan(file("p.json", '[\n{"task": "classifier", "optimizer": "sgd"}]'))
    assert (one.task, one.optimizer) == ("classifier", "sgd")


def test_an_option_nested_too_deeply_is_text() -> None:
    for text in ("-" * 20_000 + "1", "[" * 5_000):
        assert parse_options([f"name={text}"]) == {"name": text}


def test_a_plugin_that_ends_the_process_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    with pytest.raises(LabError, match=r"leaves\.py' failed on import: SystemExit: 3"):
        load_plugin(str(tmp_path / "leaves.py"))


@pytest.mark.parametrize("text", ["abc", "-1", "0", "1.5"])
def test_a_number_of_processes_that_is_none_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESSES, text)
    with pytest.raises(LabError, match=f"EKFAC_PROCESSES must be a whole number .*, not '{text}'"):
        machine()
    monkeypatch.setenv(PROCESSES, "")
    assert machine()["processes"] == 1


@pytest.mark.parametrize("text", ["[]", "3", '{"config": {}}'])
def test_a_folder_of_something_else_is_no_suite(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LabError, match=r"holds no runs of the suite: its config\.json is of something else"):
        read_config(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line_in_reproduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "afile").write_text("mine")
    monkeypatch.setattr(reproduce, "reproduce", lambda names, out, *rest, **more: Path(out).mkdir(parents=True))
    assert reproduce.main(["vgg11", "--budget", "1", "--out", str(tmp_path / "afile" / "x")]) == 2
    assert capsys.readouterr().err == f"error: --out '{tmp_path}/afile/x' cannot be written: Not a directory\n"


def test_a_configuration_too_deep_to_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text("[" * 100_000)
    with pytest.raises(LabError, match=r"suite\.json cannot be read"):
        config.read(tmp_path / "suite.json")


@pytest.mark.parametrize("name", ["study.db", "study.log"])
def test_a_damaged_study_is_one_line(name: str, tmp_path: Path) -> None:
    load_plugin(PLUGIN)
    content = bytearray(databases()[name])
    if name == "study.db":
        content[4096:] = b"\xa5" * (len(content) - 4096)  # all but the first page
    else:
        content[len(content) // 2] = 0
    (tmp_path / name).write_bytes(content)
    url = f"sqlite:///{tmp_path / name}" if name == "study.db" else f"journal:{tmp_path / name}"
    wanted = TrainConfig("tiny", "sgd", plugins=(PLUGIN,), device="cpu", epochs=1, lr=0.1).resolved()
    with pytest.raises(LabError, match=rf"storage .*{name} cannot be (read or written|opened)"):
        sweep([wanted], Where.of(tmp_path / "out", url))
    (tmp_path / name).unlink()
    assert len(sweep([wanted], Where.of(tmp_path / "out", url))["tiny-sgd"].runs()) == 1


WHOLE = record("a", [2.0, 1.0], method="adamw", task="tabular", machine={"gpu": None, "processor": "x"})


@pytest.mark.parametrize(
    "change",
    [
        {"history": []},
        {"history": 3},
        {"history": [{"step": "x", "seconds": 0, "train_loss": 1}]},
        {"history": [{"step": 0, "seconds": 0}]},
        {"steps": None},
        {"machine": {}},
        {"versions": {}},
        {"method": 3},
        {"measure": None},
    ],
)
def test_a_record_of_the_suite_that_lacks_something_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(sealed.dumps(WHOLE))
    assert list(Records(tmp_path).runs) == ["a"]
    (tmp_path / "results.jsonl").write_bytes(sealed.dumps({**WHOLE, **change}))
    with pytest.raises(LabError, match=r"results\.jsonl, line 1 is not a record of the suite: "):
        Records(tmp_path)


@pytest.mark.parametrize("change", [{"G": [[1, 2], [3]]}, {"axes": {}}, {"G": "x"}])
def test_measures_that_are_no_measures_are_one_line(change: dict[str, object], tmp_path: Path) -> None:
    found = json.loads(measures())
    del found["checksum"]
    found["rescaling"]["values"].update(change)
    (tmp_path / "measures.json").write_bytes(sealed.dumps(found))
    with pytest.raises(LabError, match=r"measures\.json: rescaling cannot be drawn from its values"):
        make(["rescaling"], tmp_path / "out", quick=True, measures=tmp_path / "measures.json")
