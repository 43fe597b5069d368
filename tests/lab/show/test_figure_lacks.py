"""Figures that know what they lack: methods, batch sizes, lengths, data."""

from dataclasses import replace
from pathlib import Path

import pytest

from ekfac.lab.config import TrainConfig
from ekfac.lab.data.files import DataError
from ekfac.lab.show.figures import make, paper
from ekfac.lab.show.figures.base import FIGURES, Request
from lab.show.test_figures import drawn, made_up

FREQUENT = TrainConfig("autoencoder", "ekfac", dataset="mnist", batch_size=200, lr=0.1, damping=0.1, refresh_every=50)
NETWORK = TrainConfig("vgg11", dataset="cifar10", batch_size=500, lr=0.1, damping=0.1)


def test_missing_methods_are_named_where_it_is_said_and_in_the_picture(tmp_path: Path) -> None:
    runs = [made_up(FREQUENT, 0.5), made_up(replace(FREQUENT, optimizer="kfac"), 0.5)]
    (made,) = make(["autoencoder"], tmp_path, runs=runs, formats=["svg"])
    assert made.lacks == ("SGD + BN, Adam + BN, EKFAC-ra",)
    assert "missing: SGD + BN, Adam + BN, EKFAC-ra" in made.files[0].read_text()


def test_missing_batch_sizes_networks_intervals_and_epochs_are_named() -> None:
    sizes = [made_up(replace(NETWORK, optimizer=name, batch_size=500), 0.5) for name in ("kfac", "ekfac", "ekfac-ra")]
    sizes.append(made_up(replace(NETWORK, optimizer="kfac", batch_size=200), 0.5))
    assert paper.lacks("batch-size", sizes) == [
        "vgg11 at batch 200: EKFAC, EKFAC-ra",
        "vgg11 at batch 1000",
        "all of resnet34",
    ]
    often = [made_up(replace(FREQUENT, optimizer=name), 0.5) for name in ("kfac", "ekfac", "ekfac-ra")]
    assert paper.lacks("frequency", often) == ["a second refresh interval"]
    often.append(made_up(replace(FREQUENT, refresh_every=500), 0.5, epochs=2))
    assert paper.lacks("frequency", often) == [
        "KFAC freq=500",
        "EKFAC-ra freq=500",
        "EKFAC freq=500 beyond epoch 2 of 4",
    ]
    assert paper.lacks("comparison", often) == [] and paper.lacks("vgg11", []) == []


def test_a_run_of_another_length_never_wins_a_selection() -> None:
    runs = [made_up(replace(NETWORK, optimizer=name), 0.8) for name in ("kfac", "ekfac")]
    short = made_up(replace(NETWORK, optimizer="ekfac", lr=0.5), 0.1, epochs=2)
    assert {run.config.epochs for run in paper.of_one_length([*runs, short])} == {4}
    panel = drawn("vgg11", [*runs, short]).axes[0]
    (line,) = [line for line in panel.get_lines() if str(line.get_label()).startswith("EKFAC")]
    expected = drawn("vgg11", runs).axes[0]
    (same,) = [line for line in expected.get_lines() if str(line.get_label()).startswith("EKFAC")]
    assert list(line.get_ydata()) == list(same.get_ydata())
    # One long run does not push all the others out.
    long = made_up(replace(NETWORK, optimizer="sgd"), 0.8, epochs=9)
    assert {run.config.epochs for run in paper.of_one_length([*runs, long])} == {4}
    assert paper.of_one_length([]) == []


def test_methods_that_are_not_the_papers_carry_their_mark() -> None:
    runs = [made_up(replace(NETWORK, optimizer=name), 0.8) for name in ("kfac", "muon")]
    figure = drawn("vgg11", runs)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "Muon †" in words and not any(word.startswith("KFAC") and "†" in word for word in words)
    assert "† not in the paper" in figure.get_suptitle()


def test_frequency_needs_no_data_files_where_there_are_runs(tmp_path: Path) -> None:
    runs = [made_up(replace(FREQUENT, refresh_every=every), 0.5) for every in (1, 50)]
    (made,) = make(["frequency"], tmp_path, runs=runs, data_dir=tmp_path / "nothing", formats=["svg"])
    assert made.files[0].exists() and any("spectra" in part for part in made.lacks)
    with pytest.raises(DataError):  # alone, the panel is all there is
        FIGURES.get("frequency").draw(Request(dataset="mnist", data_dir=tmp_path / "nothing"))


def test_the_pages_recipes_sweep_kfac_as_its_recorded_runs_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "figures.md").read_text()
    sweeps = [line for line in page.splitlines() if "ekfac sweep" in line and "--optimizer kfac" in line]
    assert len(sweeps) == 2 and all("--set pi_correction=false" in line for line in sweeps)
    assert not [line for line in page.splitlines() if line.startswith("for name in") and " kfac" in line]
