"""CONTRIBUTING.md: each extension is short, and its lines run as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import started
from ekfac.optim.engine import Engine
from ekfac.optim.methods.eigenbasis import EigenMethod

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"\*\*A (.+?)\*\*.*?```python\n(.*?)```", PAGE, re.DOTALL)
CODE = dict(BLOCKS)

# What is asked of each when its own lines have run.
CHECKS = {
    "kind of layer": """
from ekfac.curvature.blocks import find_blocks

twin = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
for mine, plain in ((model[0], twin[0]), (model[2], twin[2])):
    plain.load_state_dict({"weight": mine.kernel, "bias": mine.offset})
for net in (model, twin):
    opt = ekfac.EKFAC(net, scaling="per_example")
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
torch.testing.assert_close(model[2].kernel, twin[2].weight)
assert ekfac.summary(model).rows[0].block == "kronecker 5 x 6"
""",
    "rule": "assert loss.item() < 0.1\nekfac.EKFAC(model, scaling='power')",
    "damping mode": "assert opt.stats()['steps'] == 1",
    "task": """
from ekfac.lab.training.run import TrainConfig, train

run = train(TrainConfig("stripes", "ekfac-default", epochs=3, device="cpu"))
assert run.status == "finished" and len(run.history) == 4
""",
    "figure": """
from ekfac.lab.config import TrainConfig
from ekfac.lab.training.runs import Run

history = [{"epoch": e, "train_loss": 1 / (1 + e)} for e in range(3)]
figure = FIGURES.get("losses").draw(Request([Run(TrainConfig("classifier", "adam"), history)]))
(line,) = figure.axes[0].lines
assert list(line.get_ydata()) == [1, 1 / 2, 1 / 3]
""",
}


def named_in_the_plan() -> set[Path]:
    """The files and folders that the tree under "Layout" names, by their indentation."""
    block = re.search(r"## Layout\n\n```\nsrc/ekfac/\n(.*?)\ntests/", PAGE, re.DOTALL)
    assert block is not None
    found: set[Path] = set()
    source = room = ROOT / "src" / "ekfac"
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"(?:[\w.]+(?:/|\.py)(?:\s+|$))+", line.lstrip())
        assert names is not None and depth in (1, 2), line
        places = [(source if depth == 1 else room) / name.rstrip("/") for name in names[0].split()]
        found |= set(places)
        room = places[0] if depth == 1 else room
    return found


def test_the_plan_is_that_of_the_tree() -> None:
    named = named_in_the_plan()
    assert not [place for place in named if not place.exists()]
    source = ROOT / "src" / "ekfac"
    folders = {file.parent for file in source.rglob("*.py")} - {source}
    small = {folder for folder in folders if len(folder.relative_to(source).parts) > 2}  # within a room's corner
    assert folders - small <= named
    assert {file for file in source.glob("*.py") if file.name != "__init__.py"} <= named


def test_the_picture_names_what_there_is() -> None:
    picture = PAGE.split("## How data flows")[1].split("## Layout")[0]
    for place in re.findall(r"(?:curvature|optim)/[\w./]*\w", picture):
        found = ROOT / "src" / "ekfac" / place
        assert found.exists() or found.with_suffix(".py").exists(), place
    lines = re.findall(r"`(\w+)`", picture.split("The lines of Algorithm 1")[1].split("What a block keeps")[0])
    assert len(lines) == 7
    for name in lines:
        assert hasattr(Engine, name) or hasattr(EigenMethod, name), name


def test_every_extension_is_shown_in_few_lines() -> None:
    assert list(CODE) == list(CHECKS)
    for name, code in CODE.items():
        assert len(code.splitlines()) < 40, name


@pytest.mark.parametrize("name", CHECKS)
def test_an_extension_runs(name: str, tmp_path: Path) -> None:
    """In a process of its own, as it registers names."""
    (tmp_path / "mine.py").write_text(CODE[name] + "\n" + CHECKS[name])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = started.run(["mine.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
