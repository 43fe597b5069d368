"""The figures: right numbers in the right panels, from runs, from quick runs and computed on the spot."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from matplotlib.figure import Figure

import ekfac
from ekfac.cli.main import run
from ekfac.cli.show import measured_beside
from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.figures import (
    FIGURES,
    Request,
    correlation,
    drift,
    make,
    measure,
    quick,
    rescaling,
    sensitivity,
    style,
)
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.training.runs import Run

ALL = {
    "rescaling",
    "convolution",
    "correlation",
    "error",
    "autoencoder",
    "frequency",
    "vgg11",
    "resnet34",
    "batch-size",
    "schedule",
    "sensitivity",
    "comparison",
}


def made_up(config: TrainConfig, rate: float, seconds: float = 1.0, floor: float = 0.0, epochs: int = 4) -> Run:
    history = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "seconds": seconds * epoch,
            "train_loss": floor + 2 * rate**epoch,
            "train_loss_mean": floor + 3 * rate**epoch if epoch else None,
            "validation_loss": floor + 2 * rate**epoch + 0.1,
            "train_accuracy": 1 - 0.9 * rate**epoch,
            "validation_accuracy": 0.9 - 0.8 * rate**epoch,
            "diverged": False,
        }
        for epoch in range(epochs + 1)
    ]
    about = {"floor": {"train": floor, "validation": floor}} if floor else {"floor": {}}
    return Run(replace(config, epochs=epochs), history, "finished", about)


def cifar_runs(**changes: Any) -> list[Run]:
    found = []
    for task, (name, rate) in itertools.product(
        ("vgg11", "resnet34"), (("sgd", 0.8), ("kfac", 0.7), ("ekfac-ra", 0.5))
    ):
        for lr, size in itertools.product((0.1, 0.01), (200, 500)):
            every = None if name == "sgd" else 500
            config = TrainConfig(
                task, name, dataset="cifar10", lr=lr, damping=0.01, batch_size=size, refresh_every=every, **changes
            )
            found.append(made_up(config, rate + lr, seconds=1 / rate))
    return found


def drawn(name: str, runs: list[Run], quickly: bool = False) -> Figure:
    with style.styled():
        return FIGURES.get(name).draw(Request([r for r in runs if FIGURES.get(name).takes(r)], quickly))


def titles(figure: Figure) -> list[str]:
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def curve(figure: Figure, title: str, label: str) -> tuple[list[float], list[float]]:
    axis = next(axis for axis in figure.axes if axis.get_title().startswith(title))
    line = next(line for line in axis.lines if line.get_label() == label)
    return list(line.get_xdata()), list(line.get_ydata())


def test_every_figure_has_its_name_and_unknown_names_list_them() -> None:
    assert set(FIGURES) == ALL
    with pytest.raises(LabError, match=r"unknown figure 'none'; known: .*batch-size"):
        make(["none"], "figures")


def test_vgg11_shows_the_best_at_each_epoch_and_each_budget() -> None:
    figure = drawn("vgg11", cifar_runs())
    assert [t.split("\n")[0] for t in titles(figure)] == ["(a) training loss", "(b) wall-clock time", "(c) accuracy"]
    x, y = curve(figure, "(a)", "EKFAC-ra freq=500")
    # What an untrained network has, with batch-norm a matter of chance, is not shown.
    assert x == [1, 2, 3, 4] and numpy.allclose(y, [2 * 0.51**e for e in range(1, 5)])
    x, y = curve(figure, "(b)", "EKFAC-ra freq=500")
    assert numpy.allclose(x, [2 * e for e in range(1, 5)]) and numpy.allclose(y, [2 * 0.51**e for e in range(1, 5)])
    assert "CIFAR" in figure.get_suptitle() or "cifar10" in figure.get_suptitle()
    assert "padded" in drawn("vgg11", cifar_runs(), quickly=True).get_suptitle()


def test_scheduled_runs_go_to_their_own_figure_and_nowhere_else() -> None:
    plain, halved = cifar_runs(), cifar_runs(halve_every=20)
    assert not any(FIGURES.get("vgg11").takes(r) for r in halved) and not any(map(FIGURES.get("schedule").takes, plain))
    figure = drawn("schedule", plain + halved)
    assert titles(figure) == [
        "(a) VGG11, training loss",
        "(b) VGG11, wall-clock time",
        "(c) ResNet34, training loss",
        "(d) ResNet34, wall-clock time",
    ]
    assert "halved every 20 epochs" in figure.get_suptitle()


def test_batch_sizes_have_panels_by_epoch_and_methods_panels_by_iteration_and_time() -> None:
    figure = drawn("batch-size", cifar_runs())
    methods = ("KFAC freq=500", "EKFAC-ra freq=500")
    whats = ["batch 200", "batch 500"]
    whats += [f"{name},\n{how}" for how in ("by iteration", "by wall-clock time") for name in methods]
    assert titles(figure) == [f"{net}, {what}" for net in ("VGG11", "ResNet34") for what in whats]
    x, _ = curve(figure, "VGG11, KFAC freq=500,\nby iteration", "KFAC freq=500, batch 200")
    assert x == [0, 10, 20, 30, 40]
    limits = {axis.get_ylim() for axis in figure.axes[:2]}
    assert len(limits) == 1, "what stands side by side has one scale"


@pytest.mark.parametrize("name", ["vgg11", "schedule", "batch-size", "autoencoder", "frequency", "comparison"])
def test_where_nothing_was_timed_there_is_no_panel_over_time(name: str, tmp_path: Path) -> None:
    if name in ("vgg11", "schedule", "batch-size"):
        runs = cifar_runs(halve_every=20 if name == "schedule" else None)
    else:
        base = TrainConfig("autoencoder", "kfac", dataset="mnist-5k", refresh_every=50)
        runs = [made_up(replace(base, optimizer=one), 0.5, floor=45.76) for one in ("kfac", "ekfac-ra")]
    measures = Measures(tmp_path / "measures.json")  # without a file it would keep nothing, and measure
    distances = {each: [1.0, 2.0] for each in ("KFAC", "EKFAC", "EKFAC-ra")}
    values = {"steps": [0, 50], "distances": distances, "norms": [1.0, 1.0]}
    measures.put("frequency", values, "mnist-5k")
    for timed in (True, False):
        for one in runs:
            one.timed = timed
        with style.styled():
            figure = FIGURES.get(name).draw(Request(runs, measures=measures))
        assert any("time" in title for title in titles(figure)) is timed
        letters = [title[1] for title in titles(figure) if title.startswith("(")]
        assert letters == sorted(letters) and letters == list("abcd"[: len(letters)]), "no letter is left out"


def test_a_comparison_needs_two_methods() -> None:
    one = made_up(TrainConfig("vgg11", "sgd", dataset="cifar10", lr=0.1, batch_size=200), 0.5)
    with pytest.raises(LabError, match="at least two methods on one task"):
        drawn("comparison", [one])


def test_a_curve_that_rises_at_first_stays_in_its_panel() -> None:
    run = made_up(TrainConfig("autoencoder", "kfac", dataset="mnist", refresh_every=50), 0.5)
    run.history[1]["train_loss"] = 5 * run.history[0]["train_loss"]
    assert drawn("autoencoder", [run]).axes[0].get_ylim()[1] > run.history[1]["train_loss"]


def test_autoencoder_takes_the_best_setting_and_shows_the_plane() -> None:
    base = TrainConfig("autoencoder", "ekfac-ra", dataset="mnist", batch_size=200, refresh_every=50)
    runs = [
        made_up(replace(base, lr=lr, damping=damping, seed=seed), 0.3 + lr + damping + seed / 100, floor=45.76)
        for lr in (0.1, 0.01)
        for damping in (0.1, 0.01)
        for seed in (0, 1)
    ]
    runs.append(made_up(replace(base, optimizer="sgd", batch_norm=True, lr=0.1, refresh_every=None), 0.9, floor=45.76))
    figure = drawn("autoencoder", runs)
    assert titles(figure) == [
        "(a) training loss",
        "(b) wall-clock time",
        "(c) validation loss",
        "(d) EKFAC-ra freq=50",
    ]
    _, y = curve(figure, "(a)", "EKFAC-ra freq=50")
    assert numpy.allclose(y, [(2 * 0.32**e + 2 * 0.33**e) / 2 for e in range(5)]), "above the floor"
    axis = figure.axes[0]
    assert len(axis.collections) == 1, "a band over the seeds, for the one setting that has two"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["SGD + BN", "EKFAC-ra freq=50"]
    points = next(a for a in figure.axes if a.get_title().startswith("(d)")).collections[0].get_offsets()
    assert sorted(map(tuple, numpy.round(points, 6))) == [(0.01, 0.01), (0.01, 0.1), (0.1, 0.01), (0.1, 0.1)]


def test_a_single_setting_has_no_plane() -> None:
    one = made_up(TrainConfig("autoencoder", "kfac", dataset="mnist", lr=0.1, damping=0.1), 0.5, floor=45.76)
    assert len(titles(drawn("autoencoder", [one]))) == 3


def test_only_timed_runs_count_in_seconds_and_additions_have_a_dagger() -> None:
    base = TrainConfig("autoencoder", "muon", dataset="mnist", batch_size=200, lr=0.1)
    alone, beside = (made_up(replace(base, seed=seed), 0.5 + seed / 10, 2.0 + 10 * seed) for seed in (0, 1))
    short = made_up(replace(base, lr=0.2), 0.1, epochs=2)
    # Better and as long, but never alone on the machine: tried on the way.
    other = made_up(replace(base, lr=0.3), 0.1)
    beside.timed = other.timed = False
    figure = drawn("autoencoder", [alone, beside, short, other])
    x, y = curve(figure, "(b)", "Muon")
    assert x == [0, 2, 4, 6, 8] and numpy.allclose(y, [2 * 0.5**e for e in range(5)])
    assert numpy.allclose(curve(figure, "(a)", "Muon")[1], [0.5**e + 0.6**e for e in range(5)])
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["Muon †"]


def test_sensitivity_counts_what_ends_near_each_methods_own_best() -> None:
    base = TrainConfig("autoencoder", "ekfac-ra", dataset="mnist", batch_size=500, refresh_every=50)
    rates = {(0.1, 0.1): 0.5, (0.1, 0.01): 0.51, (0.01, 0.1): 0.6, (0.01, 0.01): 0.5}
    runs = [made_up(replace(base, lr=lr, damping=d), rate, floor=45.76) for (lr, d), rate in rates.items()]
    runs[-1].status, runs[-1].history[-1]["diverged"] = "diverged", True
    for lr, rate in ((0.1, 0.5), (0.01, 0.9), (0.001, 0.52)):
        config = replace(base, optimizer="adam", batch_norm=True, lr=lr, refresh_every=None)
        runs.append(made_up(config, rate, floor=45.76))
    planes, lines = sensitivity.grids(runs)
    one = planes["EKFAC-ra freq=50"]
    assert (one.near, one.tried, one.diverged) == (2, 4, 1) and math.isclose(one.best, 3 * 0.5**4, rel_tol=1e-6)
    assert (lines["Adam + BN"].near, lines["Adam + BN"].tried) == (2, 3)
    figure = drawn("sensitivity", runs)
    assert titles(figure)[0] == "EKFAC-ra freq=50\n2 of 4 within 1.25x"
    assert "batch 500" in figure.get_suptitle()
    with pytest.raises(LabError, match="several learning rates"):
        drawn("sensitivity", runs[:1])


def test_sensitivity_has_a_ring_around_the_best_and_none_where_all_diverged() -> None:
    base = TrainConfig("autoencoder", "kfac", dataset="mnist", batch_size=500, refresh_every=50)
    runs = [made_up(replace(base, lr=lr, damping=d), 0.5 + lr) for lr in (0.1, 0.2) for d in (0.1, 0.2)]
    assert len(drawn("sensitivity", runs).axes[0].patches) == 2, "one learning rate is best at either damping"
    for one in runs:
        one.status, one.history[-1]["diverged"] = "diverged", True
    assert not drawn("sensitivity", runs).axes[0].patches


def test_comparison_has_a_row_a_task_and_standard_errors() -> None:
    runs = []
    for task, name in itertools.product(("charlm", "classifier"), ("ekfac-default", "adamw")):
        config = TrainConfig(task, name, dataset="some", batch_size=200, lr=None if name[0] == "e" else 0.1)
        runs += [made_up(replace(config, seed=seed), 0.5 + seed / 10) for seed in (0, 1)]
        runs.append(made_up(replace(config, lr=0.3), 0.1, epochs=2))
    figure = drawn("comparison", runs)
    assert titles(figure)[::3] == ["Classifier on some, by epoch", "Transformer on some, by epoch"]
    assert curve(figure, "Transformer", "AdamW")[1][1] == pytest.approx(1.1)
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    # The mean of 1 and 1.2, and 0.1 either way.
    assert {round(float(y), 6) for x, y in band if x == 1} == {1.0, 1.2}


def test_measures_are_kept_and_not_measured_twice(tmp_path: Path) -> None:
    file = tmp_path / "some" / "measures.json"
    calls: list[int] = []

    def compute() -> dict[str, Any]:
        calls.append(1)
        return {"value": 1 / 3, "steps": [0, 1]}

    said: list[str] = []
    for dataset, count in (("mnist", 1), ("mnist", 1), ("mnist-5k", 2)):
        request = Request(dataset=dataset, measures=Measures(file, say=said.append))
        assert request.measured("error", compute) == {"value": 0.333333, "steps": [0, 1]}
        assert len(calls) == count
    assert said == [f"measuring for error on {name}, which may take minutes" for name in ("mnist", "mnist-5k")]
    runs = file.parent / "runs"
    runs.mkdir()
    assert measured_beside([str(runs)]) == measured_beside([str(file.parent)]) == [file], "beside the runs too"
    assert Measures(file).get("error", "mnist") is None and Measures(file).get("other") is None
    assert "--dataset mnist-5k" in file.read_text()
    file.write_text("no")
    with pytest.raises(LabError, match="cannot be read"):
        Measures(file)


def test_lines_are_told_apart_without_colour() -> None:
    labels = ["SGD", "SGD + BN", "Adam", "Adam + BN", "Mine", "Other", "EKFAC (defaults)"]
    labels += [name + norm for name in ("AdamW", "Muon", "SOAP") for norm in ("", " + BN")]
    labels += [f"{name} freq={every}" for name in ("KFAC", "EKFAC", "EKFAC-ra") for every in (1, 50, 500)]
    looks = style.lines(labels)
    assert len({(look.marker, str(style.linestyle(look))) for look in looks.values()}) == len(labels)
    assert looks["KFAC freq=50"].variant == looks["EKFAC freq=50"].variant == 1
    assert style.ordered(["EKFAC freq=50", "EKFAC freq=1", "SGD"]) == ["SGD", "EKFAC freq=1", "EKFAC freq=50"]


def test_rescaling_ekfac_touches_the_ellipse_and_kfac_does_not() -> None:
    model, data = rescaling.two_parameters(Request())
    G = rescaling.fisher(model, data, "full").dense().double()
    for name, touches in (("full", True), ("diagonal", True), ("ekfac", True), ("kfac", False)):
        directions, values = rescaling.axes_of(rescaling.fisher(model, data, name))
        true = torch.stack([directions[:, n] @ G @ directions[:, n] for n in range(2)])
        assert torch.allclose(values, true, rtol=1e-3) is touches
        if not touches:
            assert ((values / true).log().abs() > 0.2).all()


@pytest.fixture(scope="module")
def measured() -> tuple[drift.Drift, drift.Drift]:
    short = pytest.MonkeyPatch()
    # The first two layers' worth of steps, around one renewal, is enough.
    short.setattr(drift, "QUICK_ERRORS", (12, 3, 60))
    found = drift.errors(Request(quick=True), renew_every=6)
    short.undo()
    return found


def test_errors_obey_the_theorem_and_ekfac_ages_less(measured: tuple[drift.Drift, drift.Drift]) -> None:
    error, angle = measured
    assert error.steps == [0, 3, 6, 9, 12]
    assert all(e <= k for e, k in zip(error.distances["EKFAC"], error.distances["KFAC"], strict=True))
    assert all(0 <= a <= 180 for values in angle.distances.values() for a in values)
    # Just before a renewal against just after it.
    assert error.distances["KFAC"][1] > error.distances["KFAC"][2]


def test_the_error_at_a_renewal_is_that_of_the_librarys_operators() -> None:
    subject = measure.Subject("classifier", Request())
    subject.steps(3)
    layers, sample = [subject.layer(2), subject.layer(3)], subject.sample(80)
    G, kfac, corrected = (subject.fisher(name, sample, layers) for name in ("block", "kfac", "ekfac"))
    s, s_star = measure.flat_spectrum(kfac), measure.second_moments(kfac, subject.gradients(layers, sample))
    for values, operator in ((s, kfac), (s_star, corrected)):
        expected = float(ekfac.relative_error(G, operator))
        assert math.isclose(drift.frobenius(float(G.norm()), values, s_star), expected, rel_tol=1e-3)
    everything = subject.gradients(layers, sample)
    subject.backward(sample)
    assert torch.allclose(subject.mean_gradient(layers), everything.mean(0), atol=1e-6)


def test_padded_digits_are_the_digits() -> None:
    padded, digits = load_dataset("mnist-5k-padded"), load_dataset("mnist-5k")
    x = padded.train.x
    assert x.shape == (4000, 3, 32, 32) and torch.equal(padded.train.y, digits.train.y)
    inner = x[:, 0, 2:-2, 2:-2].flatten(1)
    assert torch.allclose(inner * digits.train.x.std() + digits.train.x.mean(), digits.train.x, atol=1e-5)
    assert torch.equal(x[:, 0], x[:, 2]) and x[:, :, 0].unique().numel() == 1


def test_figures_are_written_as_svg_and_png_and_the_same_twice(tmp_path: Path) -> None:
    made = [make(["convolution"], tmp_path / name)[0] for name in ("one", "two")]
    assert [file.suffix for file in made[0].files] == [".svg", ".png"]
    assert made[0].files[0].read_bytes() == made[1].files[0].read_bytes()
    assert made[0].files[1].read_bytes()[:4] == b"\x89PNG"


def test_quick_makes_the_runs_it_needs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(quick._AUTOENCODER, width=4, limit=100, batch_size=50, epochs=1)
    monkeypatch.setattr(quick, "_AUTOENCODER", tiny)
    monkeypatch.setattr(quick, "planes", list)
    said: list[str] = []
    made = make(["autoencoder"], tmp_path, quick=True, say=said.append)
    assert all(file.stat().st_size > 10_000 for file in made[0].files)
    assert len(list((tmp_path / "quick-runs").iterdir())) == 6
    stamps = [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("metrics.jsonl"))]
    make(["autoencoder"], tmp_path, quick=True)
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("metrics.jsonl"))] == stamps


def test_bad_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, message in (
        (["figure", "none"], "unknown figure 'none'"),
        (["figure", "vgg11", "--out", str(tmp_path / "f")], "figure vgg11 needs runs"),
        (["figure", "vgg11", "--runs", str(tmp_path)], "holds no run"),
        (["figure", "vgg11", "--workers", "0"], "workers must be at least 1"),
        (["report", str(tmp_path / "none")], "is not a folder"),
    ):
        assert run(words) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1


@pytest.mark.slow
def test_every_figure_can_be_made_quickly(tmp_path: Path) -> None:
    made = make(["all"], tmp_path, quick=True, workers=2)
    assert {one.name for one in made} == ALL
    assert all(file.stat().st_size > 10_000 for one in made for file in one.files)
    assert all(len(one.files) == 2 for one in made)


@pytest.mark.parametrize("figure", [rescaling, correlation])
def test_what_was_measured_is_drawn_again_without_the_data(
    figure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = figure.__name__.rsplit(".", 1)[-1]
    (first,) = make([name], tmp_path / "a", quick=True, measures=tmp_path / "m.json", formats=("png",))
    monkeypatch.setattr(figure, "measure", lambda request: pytest.fail("it was measured before"))
    (again,) = make([name], tmp_path / "b", quick=True, measures=tmp_path / "m.json", formats=("png",))
    assert first.files[0].read_bytes() == again.files[0].read_bytes()
