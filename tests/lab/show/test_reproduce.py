"""Reproducing a figure: plan and cost, the level that a budget allows, the runs, the verdict; again to go on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ekfac.cli.main import run
from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import method
from ekfac.lab.show.duration import duration, parse_duration
from ekfac.lab.show.evidence import Record, claims
from ekfac.lab.show.figures import FIGURES, frequency
from ekfac.lab.show.figures.base import Request
from ekfac.lab.show.figures.drift import Drift
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.reproduce import EXPERIMENTS, cost, make_plan, steps
from ekfac.lab.show.reproduce.claims import CLAIMS, Fresh
from ekfac.lab.show.reproduce.coverage import coverage
from lab.show.test_figures import made_up

SMALL = TrainConfig("autoencoder", dataset="mnist-5k", width=20, limit=400, batch_size=100, epochs=8, device="cpu")


def small() -> list[TrainConfig]:
    """Two methods, each a second or so."""
    base = replace(SMALL, refresh_every=50)
    return [
        replace(base, optimizer="ekfac-ra", lr=0.01, damping=0.001),
        replace(base, optimizer="kfac", lr=0.1, damping=0.1),
        replace(SMALL, optimizer="adam", lr=0.001, batch_norm=True),
    ]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(EXPERIMENTS.get("autoencoder"), known=small, search=None)
    monkeypatch.setitem(EXPERIMENTS._items, "autoencoder", entry)


def test_every_figure_and_every_table_can_be_reproduced() -> None:
    assert {EXPERIMENTS.get(name).figure for name in EXPERIMENTS} == set(FIGURES)
    for name in EXPERIMENTS:
        entry = EXPERIMENTS.get(name)
        for level in entry.levels:
            if level != "full":
                assert entry.settings(level), (name, level)
    grid = EXPERIMENTS.get("autoencoder").settings("grid")
    # Two batch sizes of 4 x 4 for three methods with damping, of 4 for two without.
    assert len(grid) == 2 * (3 * 16 + 2 * 4)


def test_the_known_level_is_that_of_the_record() -> None:
    results = Path(__file__).parents[3] / "results"
    if not results.is_dir():
        pytest.skip("the recorded runs are not here")
    wanted = {(c.optimizer, c.lr, c.damping, c.batch_size) for c in EXPERIMENTS.get("autoencoder").settings("known")}
    runs = [run.config for run in Record(results).runs("mnist/finals")]
    assert wanted <= {(c.optimizer, c.lr, c.damping, c.batch_size) for c in runs}
    for task in ("classifier", "vgg11", "resnet34", "charlm"):
        known = {(c.optimizer, c.lr, c.batch_norm) for c in EXPERIMENTS.get(f"comparison-{task}").settings("known")}
        found = {
            (r.config.optimizer, r.config.lr, r.config.batch_norm)
            for r in Record(results).runs(f"comparison/{task}/finals")
        }
        assert known == found


@pytest.mark.usefixtures("tiny")
def test_a_budget_takes_the_most_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    # A second for each epoch of each run, whatever the machine.
    monkeypatch.setattr(cost, "seconds_of", lambda configs, *more: [float(c.epochs or 0) for c in configs])
    assert make_plan("autoencoder").level == "known"
    whole = make_plan("autoencoder", budget=30.0)
    assert (whole.level, whole.seconds, len(whole.configs)) == ("known", 24.0, 3)
    short = make_plan("autoencoder", budget=12.0)
    assert short.level == "short" and {config.epochs for config in short.configs} == {4} and short.seconds <= 12
    assert "24 s would be needed" in short.why
    with pytest.raises(LabError, match="too small"):
        make_plan("autoencoder", budget=1.0)
    with pytest.raises(LabError, match="level must be one of known, quick"):
        make_plan("autoencoder", level="full")
    assert make_plan("convolution").level == "computed"


@pytest.mark.usefixtures("tiny")
def test_from_nothing_to_a_verdict_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["reproduce", "autoencoder", "--out", str(out)]
    assert run([*words, "--plan"]) == 0 and not out.exists()
    assert "3 runs of 8 epochs, about" in capsys.readouterr().out
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "EKFAC-ra train below" in text and "3 of 3" in text and (out / "autoencoder.png").exists()
    kept = json.loads((out / "reproduce.json").read_text())
    assert kept["level"] == "known" and len(kept["claims"]) == 5
    assert kept["claims"][0]["verdict"] in ("reproduced", "partly", "not reproduced")
    assert "EKFAC-ra" in kept["claims"][0]["numbers"] and any("SGD + BN" in part for part in kept["lacks"])
    before = {file: file.stat().st_mtime_ns for file in out.rglob("metrics.jsonl")}
    assert run([*words, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["claims"] == kept["claims"]
    assert {file: file.stat().st_mtime_ns for file in out.rglob("metrics.jsonl")} == before, "nothing ran twice"
    assert run(["reproduce", "frequency", "--out", str(out)]) == 2
    assert "holds the reproduction of autoencoder" in capsys.readouterr().err


def test_small_runs_are_drawn_as_such_and_measured_on_less_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def spectra(request: Request) -> Drift:
        asked.append((request.dataset, request.quick))
        return Drift([0, 10], {"KFAC": [0.0, 1.0], "EKFAC": [0.1, 0.1], "EKFAC-ra": [0.1, 0.1]}, [1.0, 1.0])

    monkeypatch.setattr(frequency, "spectra", spectra)
    config = TrainConfig("autoencoder", "kfac", dataset="mnist-5k", lr=0.1, damping=0.1, refresh_every=50).resolved()
    plan = steps.Plan("frequency", "quick", (config,), 1.0, "")
    said: list[str] = []
    result = steps.finish(plan, [made_up(config, 0.5)], tmp_path, say=said.append)
    assert asked == [("mnist-5k", True)] and said == ["drawing frequency", "measuring for frequency on mnist-5k"]
    (spectrum,) = [verdict for claim, verdict, _ in result.verdicts if "spectrum" in claim]
    assert spectrum == "reproduced", "what was measured is judged"


def test_the_list_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vgg11"]["where"] == "Fig. 6" and "quick" in found["vgg11"]["levels"]
    assert list(found) == list(EXPERIMENTS)


def test_a_plan_is_kept_and_a_broken_one_refused(tmp_path: Path) -> None:
    plan = steps.Plan("autoencoder", "short", tuple(c.resolved() for c in small()), 3.0, "why")
    steps.keep(plan, tmp_path)
    assert steps.kept("autoencoder", tmp_path) == plan and steps.kept("autoencoder", tmp_path / "none") is None
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(LabError, match="cannot be read"):
        steps.kept("autoencoder", tmp_path)


def test_the_cost_is_timed_here_and_grows_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [config.resolved() for config in small()[:1]]
    monkeypatch.setattr(cost, "_timed", {})
    said: list[str] = []
    cost.seconds_of(configs, say=said.append)
    cost.seconds_of(configs, say=said.append)
    assert len(said) == 1 and "1 of 1" in said[0], "no kind is timed twice"
    assert method(configs[0]) in said[0], "with batch-norm, and how often it renews"
    one, two = (cost.seconds_of([replace(c, epochs=n) for c in configs])[0] for n in (2, 200))
    assert 0 < one < two


def judged(name: str, place: int, runs: list) -> str:
    return CLAIMS[name][place].judge(Fresh(runs, Measures())).partition(" | ")[0]


def test_claims_of_networks_hold_where_they_hold() -> None:
    base = TrainConfig("vgg11", dataset="cifar10", lr=0.1, damping=0.1, batch_size=500, refresh_every=500)
    rates = {"kfac": 0.7, "ekfac": 0.6, "ekfac-ra": 0.5}
    runs = [made_up(replace(base, optimizer=name), rate) for name, rate in rates.items()]
    assert judged("vgg11", 0, runs) == "**reproduced**" and judged("vgg11", 1, runs) == "**reproduced**"
    slow = [made_up(replace(base, optimizer=name), 1.2 - rate) for name, rate in rates.items()]
    assert judged("vgg11", 0, slow) == "**not reproduced**"
    assert judged("vgg11", 0, runs[:1]) == judged("vgg11", 1, runs[:1]) == claims.UNKNOWN.partition(" | ")[0]
    sizes = [
        made_up(replace(base, optimizer=name, batch_size=size), rate)
        for size, ours in ((200, 0.6), (500, 0.5))
        for name, rate in (("kfac", 0.7), ("ekfac", ours))
    ]
    assert judged("batch-size", 0, sizes) == "**reproduced**" and judged("batch-size", 0, sizes[:2]) == claims.MISSING


def test_the_coverage_page_names_every_experiment(tmp_path: Path) -> None:
    rows = coverage(Record(tmp_path)).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(EXPERIMENTS)
    assert all(claims.MISSING in row or "computed" in row for row in rows)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10min", 600), ("2h", 7200), ("1h30m", 5400), ("1.5 d", 129600)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-2h", "2 hours and", "0s", "5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="budget"):
        parse_duration(text)


def test_times_are_written() -> None:
    assert [duration(s) for s in (8.2, 300, 7500, 400000)] == ["8 s", "5 min", "2 h 5 min", "5 days"]


def test_without_data_files_the_small_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "frequency", "--budget", "2min", "--data-dir", str(tmp_path)]) == 2
    assert "Small runs need no files: --level quick" in capsys.readouterr().err


def test_rare_renewals_are_held_against_the_next_where_none_is_rarer_than_50() -> None:
    config = TrainConfig("autoencoder", dataset="mnist", batch_size=200, lr=0.1, damping=0.1)
    runs = [
        made_up(replace(config, optimizer=name, refresh_every=every), rate)
        for name, rates in (("kfac", (0.5, 0.9)), ("ekfac", (0.5, 0.6)), ("ekfac-ra", (0.5, 0.7)))
        for every, rate in zip((10, 50), rates, strict=True)
    ]
    assert "every 50 over every 10: KFAC 10.5" in claims.frequency(Fresh(runs, Measures()))
    assert claims.frequency(Fresh(runs[1::2], Measures())).startswith(claims.MISSING)
