"""What makes steps fast on a GPU stands around the algorithm: without ``optim/cuda`` the results are the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ekfac

PACKAGE = Path(ekfac.__file__).parent
LINE = re.compile(r"^from ekfac\.optim\.cuda\.executor import make_executor .*$", re.MULTILINE)

PROGRAM = """
import sys

import torch
from torch import nn

import ekfac


def trained(make):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 3)
    )
    opt = make(model)
    for step in range(14):
        generator = torch.Generator().manual_seed(step)
        opt.zero_grad()
        x, y = torch.randn(12, 2, 6, 6, generator=generator), torch.randint(3, (12,), generator=generator)
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 8:
            model[0].weight.grad[0] = float("nan")
        opt.step()
    assert opt.stats()["skipped_steps"] == 1
    return [p.detach() for p in model.parameters()]


def main(file=None):
    torch.set_num_threads(1)
    found = {
        "default": trained(ekfac.EKFAC),
        "paper": trained(lambda model: ekfac.EKFAC(model, **ekfac.PAPER | {"refresh_every": 4})),
        "per_example": trained(lambda model: ekfac.EKFAC(model, scaling="per_example", refresh_every=4)),
        "kfac": trained(lambda model: ekfac.KFAC(model, refresh_every=4)),
    }
    if file is not None:
        torch.save(found, file)
    return found


if __name__ == "__main__":
    assert "ekfac.optim.cuda" not in sys.modules
    main(sys.argv[1])
"""
program: dict[str, object] = {"__name__": "program"}
exec(PROGRAM, program)


@pytest.mark.over_a_second
def test_the_optimizer_without_its_cuda_folder_does_the_same(tmp_path: Path) -> None:
    """A copy of the package, the folder deleted and its one line in the engine replaced by what stands beside it."""
    copied = tmp_path / "ekfac"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("cuda", "lab", "cli", "__pycache__"))
    apart = copied / "optim" / "engine.py", copied / "__init__.py"  # which imports names when they are asked for
    others = [f for f in copied.rglob("*.py") if "ekfac.optim.cuda" in f.read_text() and f not in apart]
    assert [f for f in others if "import" in next(li for li in f.read_text().splitlines() if "optim.cuda" in li)] == []
    engine = copied / "optim" / "engine.py"
    text, replaced = LINE.subn("from ekfac.optim.executor import make_executor", engine.read_text())
    assert replaced == 1 and "cuda" not in "".join(re.findall(r"^(?:from|import) .*$", text, re.MULTILINE))
    engine.write_text(text)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "program.py", "out.pt"], cwd=tmp_path, check=True, env=environment)
    without = torch.load(tmp_path / "out.pt", weights_only=True)
    threads = torch.get_num_threads()
    try:
        whole = program["main"]()  # type: ignore[operator]
    finally:
        torch.set_num_threads(threads)
    assert without.keys() == whole.keys()
    for name, parameters in whole.items():
        for p, q in zip(parameters, without[name], strict=True):
            assert torch.equal(p, q), name
