"""The step benchmark: a table and a record of every optimizer, and a reason for each that fails."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

import ekfac

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_networks
import bench_step
import clock
import contenders
import cost_at_scale
import peak

CPU = torch.device("cpu")


def test_every_optimizer_has_a_row_or_a_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "heavyball", None)
    words = ["bench_step.py", "--device", "cpu", "--threads", "1", "--tasks", "classifier:8", "--steps", "10"]
    monkeypatch.setattr(sys, "argv", [*words, "--warm-up", "2", "--out", str(tmp_path)])
    bench_step.main()
    rows = {row["optimizer"]: row for row in json.loads((tmp_path / "step-cpu.json").read_text())["rows"]}
    assert list(rows) == list(contenders.ENTRIES)
    assert rows["Adam + BN, CUDA graph"]["failed"] == "needs a GPU"
    assert "heavyball" in rows["SOAP of heavyball"]["failed"]
    for name in rows.keys() - {"Adam + BN, CUDA graph", "SOAP of heavyball"}:
        row = rows[name]
        assert row["failed"] is None, row["failed"]
        assert row["steps"] == 10 and row["mean_ms"] > 0 and 0 < row["state_bytes"] < row["peak_bytes"]
    assert rows["Adam + BN"]["ratio"] == 1
    page = (tmp_path / "step-cpu.md").read_text()
    assert "| EKFAC-ra (scaling='running') |" in page and "left out: needs a GPU" in page
    said = capsys.readouterr()
    assert "## classifier, batch 8" in said.out and "1 of 1 (classifier:8)" in said.err and "all done" in said.err


def test_state_is_counted_through_lists_and_shared_storage_once():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    big = torch.zeros(10)
    optimizer.state[model.weight] = {"a": [big, (big[:3], torch.zeros(2))], "b": {"c": 1}}
    assert contenders.state_bytes(optimizer) == 48


def test_one_that_fails_on_the_way_drops_out_and_the_others_go_on():
    def fail() -> None:
        raise RuntimeError("no inverse\nand more")

    runners = {"bad": contenders.Contender(fail), "good": contenders.Contender()}
    bench_step.measure(runners, 20, CPU)
    rows = bench_step.rows_of(runners, {})
    assert rows[0]["failed"] == "RuntimeError: no inverse" and rows[1]["ratio"] == 1 and rows[1]["steps"] == 20


@pytest.mark.parametrize("name", ["Adam + BN", "KFAC", "EKFAC-ra"])
def test_growth_measures_square_layers(name):
    found = contenders.on_square_layers(5, 2, 4, contenders.ENTRIES[name], CPU, refresh_every=3)
    assert found.failed is None and found.peak_bytes > found.state_bytes() > 0


def test_growth_makes_three_tables(monkeypatch):
    monkeypatch.setattr(bench_step, "grow", lambda point, *rest: [
        {"optimizer": name, "failed": None, "mean_ms": 1.0, "ratio": 1.0, "state_bytes": 0, "peak_bytes": 0}
        for name in bench_step.GROWING
    ])  # fmt: skip
    rows, page = bench_step.growth(10, 50, CPU)
    assert {row["sweep"] for row in rows} == {"width", "depth", "batch"}
    assert "## With width (depth 2, batch 200)" in page and "| 2,000 | 1.00 |" in page and "8,000" not in page


def test_the_clock_says_what_is_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    found = clock.Clock(4, stream)
    for _ in range(4):
        now[0] += 60
        found.part("x")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "1 of 4 (x): 60 s, about 3 min left" and lines[-1] == "4 of 4 (x): 4 min, all done"
    assert clock.duration(3 * 3600 + 300) == "3 h 5 min"


def test_a_peak_is_recorded_beside_what_the_summary_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peak.py", "--width", "40", "--out", str(tmp_path / "peak.json")])
    peak.main()
    found = json.loads((tmp_path / "peak.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found["state_mib"] == ekfac.summary(torch.nn.Linear(40, 40)).bytes / 2**20 < found["peak_mib"]
    assert found["grew_mib"] > 0


def test_cost_at_scale_adds_up(tmp_path, capsys):
    """State is shared out whole, and as evenly as blocks can be; the record holds what is printed."""
    cost_at_scale.main(["--models", "7B", "--ranks", "8", "64", "--out", str(tmp_path / "cost.json")])
    rows = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert (tmp_path / "cost.md").read_text() in capsys.readouterr().out
    assert [row["ranks"] for row in rows] == [8, 64]  # wider factors change nothing in this model
    whole = ekfac.summary(cost_at_scale.network("7B")).bytes
    for row in rows:
        assert row["state_mean"] * row["ranks"] == pytest.approx(whole)
        assert row["state_mean"] <= row["state"] <= 1.15 * row["state_mean"]
        assert 6.7e9 < row["parameters"] < 6.8e9
        assert row["sent"] < row["fsdp_sent"]
    assert rows[0]["refresh_seconds"] > 5 * rows[1]["refresh_seconds"]


def test_cost_at_scale_reads_what_was_measured():
    pieces = cost_at_scale.Pieces()
    assert pieces.widest == 2048 and pieces.solve == 26.238 and pieces.product == 0.346
    assert pieces.scaled(pieces.solve, 4096) == pytest.approx(8 * 0.026238)


def test_networks_are_measured_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt29", "vit", "resnet18", "resnet34", "autoencoder", "--tiny", "--steps", "2", "--device", "cpu"]
    bench_networks.main([*words, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "networks.json").read_text())["rows"]
    ours = [row for row in rows if row["optimizer"] == "EKFAC(model)"]
    assert len(ours) == 5 and all(row["mean"] > 0 and row["use"] > 0 for row in ours)
    assert "| autoencoder | EKFAC(model) |" in capsys.readouterr().out
