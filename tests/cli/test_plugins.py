"""Plugins that bring wrong data, networks or functions: one line that names what is wrong, never a traceback."""

import re
from pathlib import Path

import pytest

from ekfac.cli import main as cli
from ekfac.lab import train as plain

GOOD = """
import torch
from torch import nn

from ekfac.lab import Dataset, Split, Task, label_correct, label_cross_entropy
from ekfac.lab import register_dataset, register_optimizer, register_task


def load(folder):
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Dataset("NAME", {"train": Split(x, y)})


def build(width, batch_norm):
    return nn.Linear(2, 2)


class Odd:
    def __init__(self, model):
        self.param_groups = [{"lr": 0.1}]

    def zero_grad(self):
        pass

    def step(self):
        raise RuntimeError("no step today")


register_dataset("NAME", load)
register_optimizer("NAME-odd", lambda model: Odd(model))
register_task("NAME", Task(build, label_cross_entropy, "NAME", (2,), width=2, batch_size=10, epochs=1))
"""

#: What is replaced in the plugin above, and by what; what the error then says.
WRONG = {
    "load_fails": ("    x = torch", "    x = 1 / 0 * torch", r"load\(folder\) failed: load_fails.py, line 10: ZeroDiv"),
    "load_nothing": ("return Dataset", "Dataset", r"load\(folder\) returned a NoneType. Allowed: a Dataset with"),
    "no_train": ('"train"', '"test"', r"returned the splits test. Allowed: a Dataset with a split 'train'"),
    "arrays": ("Split(x, y)", "Split(x.numpy(), y)", r"train: a ndarray. Allowed: Split\(x, y\) of two tensors"),
    "build_fails": ("return nn", "return bad", r"error: build_fails.py, line 16: NameError: name .bad. is not"),
    "too_wide": ("nn.Linear(2, 2)", "nn.Linear(3, 2)", r"its network, on examples torch.float32 .* \(40, 2\), failed"),
    "high_labels": (".long()", ".long() + 5", r"losses\(output, x, y\) failed: IndexError: Target \d is out of bounds"),
    "float_labels": (".long()", ".double()", r"losses\(output, x, y\) failed: RuntimeError: expected target dtype"),
    "one_loss": (
        "build, label_cross_entropy",
        "build, lambda o, x, y: label_cross_entropy(o, x, y).mean()",
        r"losses\(output, x, y\) returned shape \(\). Allowed: one number for each of the 40 examples",
    ),
    "no_loss": ("build, label_cross_entropy", "build, lambda o, x, y: 3.0", r"returned a float. Allowed: one number"),
    "detached": (
        "build, label_cross_entropy",
        "build, lambda o, x, y: label_cross_entropy(o, x, y).detach()",
        "its losses do not depend on the network's parameters",
    ),
    "wrong_count": ("epochs=1)", "epochs=1, correct=lambda o, y: 'yes')", r"correct\(output, y\) returned a str."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plugin(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, message = WRONG[name]
    plugin = tmp_path / f"{name}.py"
    assert before in GOOD
    plugin.write_text(GOOD.replace("NAME", name).replace(before, after, 1))
    words = ["train", name, "--plugin", str(plugin), "--device", "cpu"]
    assert cli.run(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert re.search(message, said), said


def test_an_error_in_the_code_of_a_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "stepless.py"
    plugin.write_text(GOOD.replace("NAME", "stepless"))
    words = ["stepless", "--optimizer", "stepless-odd", "--plugin", str(plugin), "--device", "cpu"]
    for command in (lambda: cli.run(["train", *words]), lambda: plain.main(words)):
        assert command() == 2
        assert capsys.readouterr().err == "error: stepless.py, line 27: RuntimeError: no step today\n"
