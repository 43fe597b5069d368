"""docs/lab.md: every line of it that can run offline is run, in an empty folder, as a new user would."""

import re
import shlex
from pathlib import Path

import pytest

from ekfac import cli
from ekfac.lab.training import load_run

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("ekfac")
]


def test_the_page_is_one_page():
    assert len(TEXT.splitlines()) < 170 and len(PYTHON) == 2 and len(LINES) >= 8


@pytest.mark.parametrize("line", [line for line in LINES if "--plugin mine.py" in line])
def test_the_own_task_trains(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"mine_{abs(hash(line))}"  # each test process may register the names once
    changed = PYTHON[1].replace('"spirals"', f'"{name}"').replace('"rmsprop"', f'"{name}-rmsprop"')
    Path("mine.py").write_text(changed)
    words = shlex.split(line)[1:]
    words[1] = name
    words = [f"{name}-rmsprop" if word == "rmsprop" else word for word in words]
    assert cli.run(words) == 0, capsys.readouterr().err
    if "ekfac-ra" in words:
        assert load_run("runs/spirals").history[-1]["validation_accuracy"] > 0.95


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[0], "lab.md", "exec"), {})
    assert capsys.readouterr().out.startswith("finished")


@pytest.mark.parametrize("line", [line for line in LINES if "mine.py" not in line and "mnist " not in line])
def test_every_other_line_runs(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    status = cli.run(words)
    # Nothing has been fetched into the folder, so verifying it must say so.
    assert status == (1 if words[:2] == ["data", "verify"] else 0), capsys.readouterr().err
