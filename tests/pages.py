"""The code on the documentation's pages, and what it takes for granted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ekfac

DOCS = Path(__file__).parents[1] / "docs"
#: Libraries that tests/integrations has, in an environment of its own.
NEEDS = {"transformers", "accelerate", "lightning", "peft", "timm", "stable_baselines3", "torch_geometric"}
NEEDS |= {"torchrl", "tensordict", "skorch"}


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


def needs(code: str) -> set[str]:
    """Return which of those libraries a block imports."""
    return NEEDS & set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))


def recipes(of_libraries: bool) -> list[Any]:
    """Return the blocks of the page of recipes that import a library, or those that import none, for a test."""
    found = blocks(DOCS / "recipes.md")
    return [pytest.param(heading, code, id=heading) for heading, code in found if bool(needs(code)) == of_libraries]


def run_recipe(heading: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a recipe by itself, as a new user would; where it takes steps, it has taken some."""
    monkeypatch.chdir(folder)
    for package in needs(code):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace = names()
    if "language_model" in code:
        namespace["language_model"] = language_model()
    with one_process(folder) if "DistributedDataParallel" in code else contextlib.nullcontext():
        exec(compile(code, f"recipes.md: {heading}", "exec"), namespace)
    for name in ("opt", "optimizer"):
        if re.search(r"step\(\)|train\(\)|learn\(", code) and hasattr(namespace.get(name), "stats"):
            assert namespace[name].stats()["steps"] > 0
