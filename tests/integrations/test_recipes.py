"""The pages' recipes for other libraries run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import recipes, run_recipe


@pytest.mark.parametrize(("heading", "code"), recipes(of_libraries=True))
def test_a_recipe_of_a_library_runs_by_itself(
    heading: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(heading, code, tmp_path, monkeypatch)


def test_every_library_has_a_recipe() -> None:
    headings = [
        "Hugging Face Trainer",
        "Accelerate",
        "Lightning",
        "LoRA",
        "timm",
        "stable-baselines3",
        "torchrl",
        "skorch",
        "PyTorch Geometric",
    ]
    assert [recipe.id for recipe in recipes(of_libraries=True)] == headings
