"""The examples: short, with pictures in both forms, shown on the gallery's page, three of them as notebooks."""

import copy
import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from PIL import Image

from ekfac.lab.show import picture

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DRAWN = [file.stem for file in EXAMPLES if "publish(" in file.read_text()]
GALLERY = (ROOT / "docs" / "gallery.md").read_text()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_short_and_in_the_gallery(file):
    assert len(file.read_text().splitlines()) < 80
    assert f"(../examples/{file.name})" in GALLERY


def test_what_users_come_for_has_a_picture_in_both_forms():
    assert {"augment", "continual", "gpt", "influence", "laplace", "lora", "pinn"} <= set(DRAWN)
    for name in DRAWN:
        light, dark = (Image.open(ROOT / "docs" / "images" / f"{name}{form}.png") for form in ("", "-dark"))
        assert light.size == dark.size and sum(light.convert("RGB").getpixel((0, 0))) == 3 * 255
        assert f'src="images/{name}.png"' in GALLERY and f'srcset="images/{name}-dark.png"' in GALLERY


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="recorded runs come with the repository alone")
def test_every_picture_has_the_numbers_of_its_run():
    for name in DRAWN:
        found = json.loads((ROOT / "results" / "gallery" / f"{name}.json").read_text())
        assert found["command"] == f"python examples/{name}.py" and found["numbers"] and found["processor"]


# --- pictures -----------------------------------------------------------------------------------------------------


def test_a_picture_is_saved_twice_and_labels_do_not_overlap(tmp_path):
    seen = []

    def draw(figure):
        axes = figure.subplots()
        for height in (1.0, 1.01, 1.02, 3.0):
            axes.plot([0, 1], [0, height], label=f"{height}")
        axes.plot([0, 1], [0, 0])
        picture.label_ends(axes, gap=0.1)
        places = [(text.get_position()[1], text.get_text()) for text in axes.texts]
        assert [name for _, name in places] == ["1.0", "1.01", "1.02", "3.0"], "in the order of the curves, no other"
        heights = [place for place, _ in places]
        assert min(b - a for a, b in itertools.pairwise(heights)) >= 0.1 - 1e-9
        seen.append(figure.get_facecolor())

    files = picture.save(draw, tmp_path / "some" / "name.png")
    assert [file.name for file in files] == ["name.png", "name-dark.png"] and all(file.exists() for file in files)
    assert sum(seen[0][:3]) == 3 and sum(seen[1][:3]) < 0.5


# --- notebooks ----------------------------------------------------------------------------------------------------

NOTEBOOKS = ("laplace", "lora", "pinn")


def make():
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    spec = importlib.util.spec_from_file_location("make", ROOT / "examples" / "notebooks" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_its_example(name):
    maker = make()
    assert maker.NAMES == NOTEBOOKS
    stored = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text())
    wanted = maker.notebook(name)
    assert ["".join(cell["source"]) for cell in stored["cells"]] == [cell["source"] for cell in wanted["cells"]]
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code) and "image/png" in code[-1]["outputs"][0]["data"]


@pytest.mark.over_a_second
@pytest.mark.parametrize("names", [("lora",), pytest.param(NOTEBOOKS, marks=pytest.mark.slow)], ids=" ".join)
def test_the_notebooks_run(names):
    """One after the other in one kernel, which forgets all names but has imported torch. CI runs all as examples."""
    maker = make()
    whole = maker.notebook(names[0])
    lasts = [len(whole["cells"]) - 1]
    for name in names[1:]:
        cells = maker.notebook(name)["cells"]
        forget = next(cell for cell in copy.deepcopy(cells) if cell["cell_type"] == "code")
        forget["source"] = "%reset -f"
        whole["cells"] += [forget, *cells]
        lasts.append(len(whole["cells"]) - 1)
    done = maker.execute(whole)
    for last in lasts:
        assert "image/png" in done["cells"][last]["outputs"][0]["data"]
