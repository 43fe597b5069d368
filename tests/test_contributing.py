"""CONTRIBUTING.md: each extension is short, and its lines run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"\*\*A (.+?)\*\*.*?```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
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


def test_every_extension_is_shown_in_few_lines() -> None:
    assert list(CODE) == list(CHECKS)
    for name, code in CODE.items():
        assert len(code.splitlines()) < 40, name


@pytest.mark.parametrize("name", CHECKS)
def test_an_extension_runs(name: str, tmp_path: Path) -> None:
    """In a process of its own, as it registers names."""
    (tmp_path / "mine.py").write_text(CODE[name] + "\n" + CHECKS[name])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
