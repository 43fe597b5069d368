"""Pages from recorded runs: the right numbers between the markers, and nothing where nothing was recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from ekfac.cli.main import run
from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.show.evidence import Record, claims, fill, fill_pages
from ekfac.lab.show.evidence.__main__ import main
from ekfac.lab.show.evidence.pages import PAGES, SOURCES
from ekfac.lab.show.evidence.record import MISSING, tried, write
from ekfac.lab.show.evidence.tables import final, lowest
from ekfac.lab.training.gather import find_runs

ROOT = Path(__file__).resolve().parents[3]
FLOOR = 45.0


def put(folder: Path, end: float, seconds: float = 1.0, epochs: int = 2, diverged: bool = False, **config: Any) -> None:
    """Write a run whose loss above the floor falls from ``2 * end`` at its first epoch to ``end`` at its last."""
    given = TrainConfig(**{"task": "autoencoder", "dataset": "mnist", "device": "cpu", **config}, epochs=epochs)
    settings = given.resolved()
    place = folder / key(settings)
    place.mkdir(parents=True)
    floor = FLOOR if settings.task == "autoencoder" else 0.0
    about = {
        "floor": {"train": floor, "validation": floor} if floor else {},
        "machine": {"gpu": "some GPU"},
        "versions": {"torch": "2"},
    }
    (place / "config.json").write_text(json.dumps({"format": 1, "config": settings.to_dict(), "about": about}))
    lines = []
    for epoch in range(epochs + 1):
        loss = floor + (100 if epoch == 0 else end * (1 + (epochs - epoch) / max(1, epochs - 1)))
        line = {
            "epoch": epoch,
            "step": 10 * epoch,
            "seconds": seconds * epoch,
            "diverged": diverged and epoch == epochs,
        }
        line |= {"train_loss": loss, "train_loss_mean": loss if epoch else None, "validation_loss": loss + 1}
        lines.append(line | {"validation_accuracy": None if floor else 1 - end / 10})
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def autoencoder(folder: Path) -> None:
    """Record the paper's five methods at one batch size: EKFAC-ra best and quick, EKFAC worse than Adam."""
    methods: dict[str, tuple[float, float, dict[str, Any]]] = {
        "sgd": (9, 1, {"batch_norm": True}),
        "adam": (4, 1, {"batch_norm": True}),
        "kfac": (8, 2, {"refresh_every": 50}),
        "ekfac": (5, 2, {"refresh_every": 50}),
        "ekfac-ra": (2, 1.2, {"refresh_every": 50}),
    }
    for name, (end, seconds, more) in methods.items():
        put(folder / "finals", end, seconds, optimizer=name, batch_size=200, lr=0.1, **more)
        put(folder / "seeds", end + 1, 99, optimizer=name, batch_size=200, lr=0.1, seed=1, **more)
        put(folder / "search", end / 100, optimizer=name, batch_size=200, lr=0.2, epochs=1, **more)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    results = tmp_path / "results"
    autoencoder(results / "mnist")
    # Every 50 steps is among the finals and seeds above.
    for name, end in (("kfac", 4 * 8.5), ("ekfac", 2 * 5.5), ("ekfac-ra", 5 * 2.5)):
        put(results / "mnist" / "frequency", end, optimizer=name, refresh_every=500, lr=0.1)
    for lr, end in ((0.1, 1.0), (0.2, 1.2), (0.3, 3.0)):
        for damping in (0.1, 0.2):
            settings = {"optimizer": "kfac", "lr": lr, "damping": damping, "refresh_every": 50, "batch_size": 500}
            put(results / "sensitivity", end, diverged=lr == 0.3, **settings)
    for name, end in (("ekfac-default", 0.5), ("adamw", 1.0), ("sgd", 2.0)):
        more = {} if name == "ekfac-default" else {"lr": 0.1}
        for seed in (0, 1):
            put(
                results / "comparison" / "classifier" / "finals",
                end,
                task="classifier",
                optimizer=name,
                seed=seed,
                **more,
            )
    return Record(results)


def test_the_table_has_means_and_errors_of_the_longest_runs(record: Record) -> None:
    lines = SOURCES["epochs-200"](record).splitlines()
    assert lines[0].startswith("| loss after epoch | 1 | 2 | full pass | validation | setting | tried | seeds |")
    row = next(line for line in lines if line.startswith("| EKFAC-ra freq=50 |"))
    # 2 and 3 at the end: the mean, and a half either way; twice that at the first epoch.
    assert row.startswith("| EKFAC-ra freq=50 | 5.00 ± 1.00 | 2.50 ± 0.50 | 2.50 ± 0.50 | 3.50 ± 0.50 | lr 0.1")
    assert row.endswith("| 2 | 2 |"), "two settings tried, one of them in the search; two seeds"
    assert SOURCES["epochs-500"](record) == MISSING


def test_what_only_the_grid_has_is_shown_as_such_and_is_no_part_of_a_claim(record: Record) -> None:
    put(record.folder / "mnist" / "seeds", 7, optimizer="ekfac-default", batch_size=500)
    put(record.folder / "sensitivity", 1, optimizer="ekfac-default", batch_size=500, lr=0.01, damping=1e-8)
    lines = SOURCES["epochs-500"](record).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| KFAC freq=50 ‡", "| EKFAC (defaults) †"]
    assert lines[2].endswith("| lr 0.1, damping 0.1 | 6 | 1 |") or lines[2].endswith("| lr 0.1, damping 0.2 | 6 | 1 |")
    assert "| 7.00 |" in lines[3] and lines[3].endswith("| no search | 1 |")
    assert "batch 500" not in SOURCES["claim-epoch"](record)


def test_a_method_that_diverged_is_listed_and_does_not_count_as_a_claim_that_held(tmp_path: Path) -> None:
    put(tmp_path / "mnist" / "finals", 2, optimizer="ekfac", batch_size=200, refresh_every=50)
    put(tmp_path / "mnist" / "seeds", 2, optimizer="ekfac", batch_size=200, refresh_every=50, seed=1, diverged=True)
    put(tmp_path / "mnist" / "finals", 1, optimizer="ekfac-ra", batch_size=200, refresh_every=50)
    put(tmp_path / "mnist" / "finals", 3, optimizer="kfac", batch_size=200, refresh_every=50)
    record = Record(tmp_path)
    assert "| EKFAC freq=50 | 1 of 2 seeds diverged |" in SOURCES["epochs-200"](record)
    claim = SOURCES["claim-epoch"](record)
    assert claim == "**partly** | batch 200: EKFAC-ra 1.00, KFAC 3.00, EKFAC 1 of 2 seeds diverged"


def test_times_are_those_of_runs_that_were_alone_as_shares_of_adams(record: Record) -> None:
    rows = {line.split(" | ")[0]: line for line in SOURCES["times-200"](record).splitlines()}
    assert rows["| Adam + BN"] == "| Adam + BN | 1.00 | 1.00 | 1.00 |"
    # EKFAC-ra is at 4, where Adam ends after two epochs, after its first, and an epoch takes 1.2 times as long.
    assert rows["| EKFAC-ra freq=50"] == "| EKFAC-ra freq=50 | 1.20 | 0.500 | 0.600 |"
    assert rows["| SGD + BN"] == "| SGD + BN | 1.00 | never | never |"


def test_verdicts_follow_their_rules(record: Record) -> None:
    assert SOURCES["claim-epoch"](record).startswith("**partly** | batch 200: EKFAC 5.50 ± 0.50, EKFAC-ra 2.50 ± 0.50")
    assert SOURCES["claim-time"](record).startswith("**reproduced** | batch 200, KFAC: ")
    assert SOURCES["claim-frequency"](record) == (
        "**partly** | loss above floor, every 500 over every 50: KFAC 4.00, EKFAC 2.00, EKFAC-ra 5.00"
    )
    assert SOURCES["claim-sensitivity"](record) == (
        "**not reproduced** | settings within 1.25x of the best: KFAC freq=50 4 of 6"
    )
    assert claims.alike(record).startswith("**not reproduced** | validation loss above floor, batch 200: KFAC")
    assert claims.burden(record).startswith("not judged | seconds an epoch, batch 200: KFAC")
    assert claims.every_update_is_dear(record) == claims.UNKNOWN, "KFAC at every update is not there"
    assert "| KFAC freq=50 | 4 of 6 | 2 | 1.00 |" in SOURCES["sensitivity"](record)
    assert SOURCES["claim-error"](record).startswith(MISSING)


def test_the_median_of_an_even_number_of_settings_lies_between_the_middle_two(tmp_path: Path) -> None:
    for lr, end in ((0.1, 1.0), (0.2, 2.0), (0.3, 4.0), (0.4, 5.0)):
        put(tmp_path / "sensitivity", end, optimizer="adam", batch_norm=True, lr=lr, batch_size=500)
    assert SOURCES["sensitivity"](Record(tmp_path)).endswith("| Adam + BN | 1 of 4 | 0 | 1.00 | 3.00 |")


def test_what_was_measured_is_judged(record: Record) -> None:
    series = {"KFAC": [1.0, 2.0] * 2, "EKFAC": [0.9, 1.0] * 2}
    record.measures.put(
        "error", {"renewed_every": 100, "steps": [0, 50, 100, 150], "error": series, "angle": series}, "mnist"
    )
    record.measures.put("correlation", {"parameter_space": 0.3, "eigenbasis": 0.2}, "mnist")
    distances = {"KFAC": [0.0, 4.0], "EKFAC": [0.0, 1.0], "EKFAC-ra": [9.0, 8.0]}
    record.measures.put("frequency", {"steps": [0, 50], "distances": distances, "norms": [1.0, 2.0]}, "mnist")
    assert SOURCES["claim-error"](record).startswith(
        "**reproduced** | mean error 0.950 against KFAC's 1.50; right after a refresh"
    )
    assert SOURCES["claim-correlation"](record) == "**not reproduced** | 0.300 before, 0.200 in the basis"
    assert SOURCES["claim-spectrum"](record).startswith(
        "**partly** | EKFAC nearer at 100% of the steps, median distance 0.5"
    )
    assert SOURCES["spectra"](record).splitlines()[-1] == "| 50 | 2.00 | 0.500 | 4.00 | 2.00 |"
    assert "| relative error, mean over training | 1.50 (KFAC) | 0.950 (EKFAC) |" in SOURCES["measured"](record)


def test_the_comparison_counts_tasks(record: Record) -> None:
    assert SOURCES["defaults"](record) == (
        "With no setting chosen, it ends with the lowest training loss on 1 of 1 tasks, and with the best validation "
        "accuracy on 1 of 1 (the best validation loss on 1). It reaches AdamW's lowest training loss before AdamW on "
        "1 of 1."
    )
    table = SOURCES["comparison-classifier"](record)
    assert "| EKFAC (defaults) | 0.500 ± 0.000 | 0.500 ± 0.000 | 1.50 ± 0.00 | 95.0 ± 0.0 % | 2 |" in table
    assert SOURCES["comparison-vgg11"](record) == MISSING


def test_the_defaults_are_those_that_nobody_touched(record: Record) -> None:
    finals = record.folder / "comparison" / "classifier" / "finals"
    for better, more in ((0.1, {"options": {"pace": 0.1}}), (0.2, {"lr": 0.02}), (0.3, {"cosine": True})):
        put(finals, better, task="classifier", optimizer="ekfac-default", **more)
    table = SOURCES["comparison-classifier"](record)
    assert "| EKFAC (defaults) | 0.500 ± 0.000 |" in table and "| batch 200 | no search | 2 |" in table
    put(finals, 0.4, epochs=3, task="classifier", optimizer="ekfac-default", damping=1e-8)
    assert "| EKFAC (defaults) | 0.400 |" in SOURCES["comparison-classifier"](record), "the same numbers, written out"


def test_markers_hold_blocks_or_parts_of_lines_and_filling_twice_changes_nothing(record: Record) -> None:
    page = "a <!-- begin machine -->old<!-- end machine --> b\n<!-- begin spectra -->\nold\n<!-- end spectra -->\n"
    filled = fill(page, record)
    assert filled == (
        "a <!-- begin machine -->some GPU, torch 2<!-- end machine --> b\n"
        f"<!-- begin spectra -->\n{MISSING}\n<!-- end spectra -->\n"
    )
    assert fill(filled, record) == filled
    for wrong, message in (
        ("<!-- begin machine -->", "no end"),
        ("<!-- begin x --><!-- end x -->", "marker x is not known"),
    ):
        with pytest.raises(LabError, match=message):
            fill(wrong, record)


def test_numbers_are_written_to_what_can_be_told() -> None:
    assert [write(*pair) for pair in ((123.4, 2.0), (12.34, 0.04), (0.0123, None), (0.0, None))] == [
        "123 ± 2",
        "12.34 ± 0.04",
        "0.0123",
        "0.00",
    ]
    assert write(None) == write(float("nan")) == ""


def test_tries_are_settings_not_seeds_lengths_or_batches(record: Record) -> None:
    assert tried(record.runs("mnist/finals", "mnist/seeds", "mnist/search"))["Adam + BN"] == 2


def test_the_command_fills_the_pages(record: Record, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in PAGES:
        (docs / name).write_text((ROOT / "docs" / name).read_text())
    words = ["--results", str(record.folder), "--docs", str(docs)]
    assert main(["tables", *words]) == 0 and "partly" in (docs / "mnist.md").read_text()
    assert not fill_pages(record, docs)
    assert main(["other", *words]) == 2


def test_a_folder_that_is_not_there_is_no_empty_record(record: Record, tmp_path: Path, capsys: Any) -> None:
    for words in (["--results", str(tmp_path / "nowhere")], ["--results", str(record.folder), "--docs", "nowhere"]):
        assert main(["tables", *words]) == 2
        assert "nowhere" in capsys.readouterr().err


def test_the_command_line_tells_timed_runs_and_batch_sizes(record: Record, tmp_path: Path) -> None:
    mnist, out = record.folder / "mnist", tmp_path / "figures"
    words = ["--runs", str(mnist / "finals"), "--runs", str(mnist / "seeds"), "--timed", str(mnist / "finals")]
    assert run(["figure", "autoencoder", *words, "--batch-size", "200", "--out", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["autoencoder-200.png", "autoencoder-200.svg"]
    assert [one.timed for one in find_runs([mnist / "seeds"], timed=[mnist / "finals"])] == [False] * 5
    assert run(["figure", "autoencoder", *words, "--batch-size", "300", "--out", str(out)]) == 2


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="recorded runs come with the repository alone")
def test_the_pages_say_what_the_record_says() -> None:
    record = Record(ROOT / "results")
    for name in PAGES:
        text = (ROOT / "docs" / name).read_text()
        assert fill(text, record, name) == text, f"docs/{name} is behind results/: make figures"


def test_a_jump_upwards_at_the_end_is_no_goal_for_others(tmp_path: Path) -> None:
    put(tmp_path / "mnist" / "finals", 4, optimizer="adam", batch_norm=True, batch_size=200)
    curve = next(iter(Record(tmp_path).autoencoder(200).values()))
    ended = lowest(curve)
    assert ended == final(curve) == pytest.approx(float(curve.mean("train_loss").min()))
    metrics = next((tmp_path / "mnist" / "finals").glob("*/metrics.jsonl"))
    lines = metrics.read_text().splitlines()
    last = json.loads(lines[-1])
    metrics.write_text("\n".join([*lines, json.dumps({**last, "epoch": last["epoch"] + 1, "train_loss": 99.0})]) + "\n")
    curve = next(iter(Record(tmp_path).autoencoder(200).values()))
    assert (lowest(curve), final(curve)) == (ended, 99.0)
