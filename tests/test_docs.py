"""The pages for users: code runs, tables are complete, links lead somewhere, sentences are short.

Every line of docs/lab.md that can run offline is run, in an empty folder, as a new user would.
"""

import ast
import contextlib
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ekfac
from ekfac.cli import main as cli
from ekfac.lab.data.datasets import DATASETS, Split, load_dataset
from ekfac.lab.training.run import load_run
from ekfac.optim.options import GROUPS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEXT = (DOCS / "lab.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("ekfac")
]
#: Pages that tell users what to do. History (design, performance) is as long-winded as it was.
GUIDES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(DOCS / f"{name}.md" for name in (
        "index", "quickstart", "migrate", "rules", "works", "memory_speed", "recipes", "tuning", "troubleshooting",
        "curvature", "gallery", "results", "mnist", "cifar", "claims", "comparison", "coverage", "suite", "reliability",
        "layers", "method", "distributed", "lab", "search", "figures",
    )),
]  # fmt: skip
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MOST_WORDS = 35


# --- the lab's page -----------------------------------------------------------------------------------------------


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
    """As it stands, but with a sixth of the data and less time."""
    monkeypatch.chdir(tmp_path)
    whole = load_dataset("mnist-5k")
    fewer = {name: Split(*(part[::6] for part in split)) for name, split in whole.splits.items()}
    monkeypatch.setitem(DATASETS._items, "mnist-5k", lambda folder: replace(whole, splits=fewer))
    words = shlex.split(line)[1:]
    if "--seconds" in words:
        words[words.index("--seconds") + 1] = "0.2"
    status = cli.run(words)
    # Nothing has been fetched into the folder, so verifying it must say so.
    assert status == (1 if words[:2] == ["data", "verify"] else 0), capsys.readouterr().err


# --- code on all pages --------------------------------------------------------------------------------------------


class Network(nn.Module):
    """What pages call ``model``: with a body and a head, as those on parameter groups say."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def names() -> dict[str, Any]:
    """What pages take for granted."""
    torch.manual_seed(0)
    x = torch.randn(64, 20)
    y = (x[:, 0] > 0).long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, loss_fn = Network(), nn.CrossEntropyLoss()
    found: dict[str, Any] = {
        "torch": torch, "nn": nn, "ekfac": ekfac, "model": model, "loader": loader, "loss_fn": loss_fn,
        "x": x, "y": y, "steps": 200, "device": "cpu", "opt": ekfac.EKFAC(model),
        "v": torch.randn(sum(p.numel() for p in model.parameters())),
    }  # fmt: skip
    found["tokens"] = [{"input_ids": t, "labels": t} for t in torch.randint(0, 64, (16, 12))]
    return found


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def blocks(page: Path) -> list[tuple[str, str]]:
    """The page's Python, each block with the heading that it stands under."""
    found, heading = [], ""
    for match in re.finditer(r"^#+ ([^\n]*)$|^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if match[2] is None:
            heading = match[1]
        else:
            found.append((heading, match[2]))
    return found


RECIPES = blocks(DOCS / "recipes.md")
NEEDS = {"transformers", "accelerate", "lightning", "peft", "timm", "stable_baselines3", "torch_geometric"}
NEEDS |= {"torchrl", "tensordict", "skorch"}


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{n}.md" for n in ("quickstart", "migrate", "rules", "works", "tuning",
                                                     "troubleshooting", "curvature"))]
)  # fmt: skip
def test_the_pages_code_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, namespace = blocks(ROOT / name), names()
    assert found
    for heading, code in found:
        exec(compile(code, f"{name}: {heading}", "exec"), namespace)


@pytest.mark.parametrize(("heading", "code"), RECIPES, ids=[heading for heading, _ in RECIPES])
def test_a_recipe_runs_by_itself(heading, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in NEEDS & set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace = names()
    if "language_model" in code:
        namespace["language_model"] = language_model()
    with one_process(tmp_path) if "DistributedDataParallel" in code else contextlib.nullcontext():
        exec(compile(code, f"recipes.md: {heading}", "exec"), namespace)
    for name in ("opt", "optimizer"):
        if "step()" in code and "trainer" not in code and hasattr(namespace.get(name), "stats"):
            assert namespace[name].stats()["steps"] > 0


# --- what pages say -----------------------------------------------------------------------------------------------


def test_the_table_of_settings_has_every_argument_and_its_default():
    page = (DOCS / "tuning.md").read_text().split("## All arguments")[1].split("\n## ")[0]
    tables = re.split(r"^\| `", page, flags=re.MULTILINE)[1:]
    shown: dict[str, dict[str, Any]] = {}
    owner = ""
    for row in (f"| `{row}" for row in tables):
        if head := re.match(r"\| `(\w+)(?:=\w+\(\.\.\.\))?` \| default \|", row):
            owner = head[1]
            shown[owner] = {}
        elif line := re.match(r"\| `(\w+)` \| `(.+?)` \|", row):
            shown[owner][line[1]] = ast.literal_eval(line[2])
    parameters = inspect.signature(ekfac.EKFAC.__init__).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GROUPS}
    groups = {name: {f.name: f.default for f in fields(group)} for name, group in GROUPS.items()}
    assert shown == {"EKFAC": own, **groups}


def test_the_readme_is_one_screen_and_a_half():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page's prose: no code, nothing that is written from the record, each cell and item by itself."""
    text = re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    parts: list[str] = [""]
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            parts += [*line.split("|"), ""]
        elif not line.strip() or re.match(r"\s*([-*#]|\d+\.)\s", line):
            parts.append(line)
        else:
            parts[-1] += f" {line.strip()}"
    for part in parts:
        yield from re.split(r"(?<=[.!?])[)\"*]*\s+", part)


def words(sentence: str) -> int:
    return len(re.findall(r"[\w.'-]*\w", sentence))


def test_a_long_sentence_is_noticed():
    assert max(map(words, sentences(f"Short one. {'word ' * 40}end. `code`"))) == 41
    assert max(map(words, sentences(f"```sh\n{'word ' * 40}\n```\n\n| {'word ' * 9}| {'word ' * 8}|"))) == 9


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_no_sentence_is_long(page):
    long = [sentence.strip() for sentence in sentences(page.read_text()) if words(sentence) > MOST_WORDS]
    assert not long


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if (ROOT / "results").is_dir() or "results" not in place.parts:
            assert place.exists(), target
        if anchor and place.suffix == ".md" and place.exists():
            assert anchor in anchors(place), target


def test_every_picture_is_shown_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert [file.name for file in sorted((DOCS / "images").iterdir()) if f"images/{file.name}" not in text] == []


def test_every_kfac_command_on_the_autoencoder_leaves_the_plateau():
    """With the pi correction KFAC stays there, as docs/mnist.md says: no page may recommend it."""
    lines = [line for page in (ROOT / "docs").glob("*.md") for line in page.read_text().splitlines()]
    found = [line for line in lines if re.search(r"ekfac (sweep|train) autoencoder .*--optimizer kfac\b", line)]
    assert found and all("--set pi_correction=false" in line for line in found), found
