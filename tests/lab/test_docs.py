"""The pages for users: docs/lab.md's lines run, docs/tuning.md has every argument.

Every line of docs/lab.md that can run offline is run, in an empty folder, as a new user would.
"""

import ast
import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import ekfac
from ekfac.cli import main as cli
from ekfac.lab.training.run import load_run
from ekfac.optim.options import GROUPS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "lab.md").read_text()
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


def test_the_table_of_settings_has_every_argument_and_its_default():
    page = (ROOT / "docs" / "tuning.md").read_text().split("## All arguments")[1].split("\n## ")[0]
    shown = {name: ast.literal_eval(value) for name, value in re.findall(r"^\| `([\w.]+)` \| `(.+?)` \|", page, re.M)}
    parameters = inspect.signature(ekfac.EKFAC.__init__).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GROUPS}
    kinds = [*GROUPS.values(), *ekfac.rules.RULES.values()]
    grouped = {f"{kind.__name__}.{f.name}": f.default for kind in kinds for f in fields(kind)}
    assert shown == {**own, **grouped}
