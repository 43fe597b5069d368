"""The race: everyone gets the same time; the verdict compares like with like; the chart shows the curves."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from ekfac.lab.show import demo, replay
from ekfac.lab.show.chart import chart
from ekfac.lab.training.run import TrainConfig, load_run
from ekfac.lab.training.runs import Run

SMALL = {"width": 8, "limit": 100, "batch_size": 50, "device": "cpu"}


def record(step, seconds, loss, diverged=False):
    return {"epoch": step, "step": step, "seconds": seconds, "train_loss": loss, "diverged": diverged}


def made_up(points, status="finished", floor=1.0) -> Run:
    history = [record(*point) for point in points]
    return Run(TrainConfig("autoencoder"), history, status, {"floor": {"train": floor}})


def test_the_verdict_compares_at_what_all_have_reached():
    quick = made_up([(0, 0, 9), (10, 1, 5), (20, 2, 4), (30, 3, 3)])
    slow = made_up([(0, 0, 9), (10, 1.5, 2.5), (20, 3.1, 2)])
    result = demo.verdict({"quick": quick, "slow": slow})
    assert result.steps == 20 and result.seconds == 3
    by_name = {s.name: s for s in result.standings}
    assert (by_name["quick"].loss_by_step, by_name["slow"].loss_by_step) == (3, 1)
    assert (by_name["quick"].loss_by_time, by_name["slow"].loss_by_time) == (2, 1.5)
    assert (by_name["quick"].place_by_step, by_name["slow"].place_by_step) == (2, 1)
    assert demo.sentence(result) == "After 20 steps slow is ahead; after 3 s of training it is still ahead."


def test_the_verdict_can_differ_by_step_and_by_time_and_leaves_out_the_diverged():
    quick = made_up([(0, 0, 9), (20, 1, 4), (80, 3, 1.5)])
    slow = made_up([(0, 0, 9), (10, 1.5, 5), (20, 3, 2)])
    lost = made_up([(0, 0, 9), (10, 0.5, None, True)], "diverged")
    result = demo.verdict({"quick": quick, "slow": slow, "lost": lost})
    assert demo.sentence(result) == "After 20 steps slow is ahead; after 3 s of training quick is."
    assert [s.place_by_time for s in result.standings] == [1, 2, None]
    assert demo.sentence(demo.verdict({"lost": lost})) == "Every optimizer diverged."


def test_each_gets_the_same_time_and_its_own_folder(tmp_path):
    entrants = {
        "one": TrainConfig("classifier", "sgd", **SMALL),
        "two": TrainConfig("classifier", "adam", **SMALL),
        "lost": TrainConfig("classifier", "sgd", lr=1e20, **SMALL),
    }
    seen = []
    runs = demo.race(entrants, seconds=0.1, out=tmp_path, on_epoch=lambda name, run: seen.append(name))
    for name in ("one", "two"):
        *before, last = (r["seconds"] for r in runs[name].history)
        assert last >= 0.1 > before[-1]
    assert runs["lost"].status == "diverged" and runs["one"].status == "finished"
    assert seen[:3] == ["one", "two", "lost"] and len(seen) == sum(len(run.history) for run in runs.values())
    recorded = load_run(tmp_path / "one")
    assert recorded.history == runs["one"].history and recorded.status == "finished"
    assert f"--epochs {len(recorded.history) - 1} " in recorded.about["command"]  # what it had time for, and no more


def test_a_race_that_is_cut_short_leaves_runs_that_can_be_repeated(tmp_path):
    def stop(name, run):
        if len(run.history) == 3:
            raise KeyboardInterrupt

    entrants = {"one": TrainConfig("classifier", "sgd", **SMALL), "two": TrainConfig("classifier", "adam", **SMALL)}
    with pytest.raises(KeyboardInterrupt):
        demo.race(entrants, seconds=1e9, out=tmp_path, on_epoch=stop)
    for name in entrants:
        run = load_run(tmp_path / name)
        assert run.config.epochs == max(1, run.history[-1]["epoch"])


def test_the_number_of_epochs_can_be_bounded():
    runs = demo.race({"one": TrainConfig("classifier", "sgd", **SMALL)}, seconds=1e9, max_epochs=3)
    assert [r["epoch"] for r in runs["one"].history] == [0, 1, 2, 3]


def test_the_entrants_are_the_papers_five_and_the_default():
    used = [(c.task, c.optimizer, c.batch_norm) for c in demo.RACES["autoencoder"].entrants.values()]
    assert used == [
        ("autoencoder", "sgd", True),
        ("autoencoder", "adam", True),
        ("autoencoder", "kfac", False),
        ("autoencoder", "ekfac", False),
        ("autoencoder", "ekfac-ra", False),
        ("autoencoder", "ekfac-default", False),
    ]


def test_the_first_race_is_on_one_network_with_the_library_as_it_comes():
    entrants = demo.RACES[demo.FIRST].entrants
    assert len({(c.task, c.batch_norm, c.width, c.batch_size) for c in entrants.values()}) == 1
    assert entrants["EKFAC"] == TrainConfig("deep", "ekfac-default"), "nothing is set"
    for name in ("SGD", "Adam"):
        own = entrants[name]
        assert own == TrainConfig(own.task, own.optimizer, lr=own.lr), "only the learning rate is set"
    for race in demo.RACES.values():
        assert all(replace(c, device="cpu").resolved().dataset == "mnist-5k" for c in race.entrants.values())


def test_threads_are_the_races_while_it_lasts():
    before, seen = torch.get_num_threads(), []
    entrants = {"one": TrainConfig("classifier", "sgd", **SMALL)}
    demo.race(entrants, 1e9, max_epochs=1, threads=1, on_epoch=lambda name, run: seen.append(torch.get_num_threads()))
    assert set(seen) == {1} and torch.get_num_threads() == before


def test_a_busy_machine_is_told():
    assert demo.busy(60.0, 55.0) == "" and demo.busy(60.0, 110.0) == ""
    assert demo.busy(60.0, 20.0).startswith("The machine was busy: this had a core for 20 of 60 s.")


def test_the_demo_says_what_was_set():
    said = demo.what_was_set(demo.RACES[demo.FIRST].entrants)
    assert said == "Settings: SGD: lr 0.1; Adam: lr 0.01; EKFAC: defaults."
    options = {"one": TrainConfig("deep", "kfac", damping=1e-3, refresh_every=5, options={"kl_clip": 0.1})}
    assert demo.what_was_set(options) == "Settings: one: damping 0.001, refresh every 5, kl_clip 0.1."


def test_the_recorded_race_is_the_records_and_is_replayed_in_order():
    title, runs = replay.load()
    assert "H200" in title and set(runs) == set(replay.SHOWN)
    results = Path(__file__).parents[3] / "results"
    if results.is_dir():
        kept = resources.files("ekfac.lab.show").joinpath(replay.FILE).read_text()
        assert json.loads(kept) == replay.extract(results)
    seen, slept = [], []
    recorded = runs[replay.DEFAULTS].about["source"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "source_digest", lambda: "of today")
        assert "as it was when this was recorded" in replay.older(runs)
        patch.setattr(replay, "source_digest", lambda: recorded)
        assert replay.older(runs) == "" == replay.older({})
    found = replay.replay(runs, lambda name, run: seen.append(run.history[-1]["seconds"]), 3.0, slept.append)
    assert seen == sorted(seen) and len(seen) == sum(len(run.history) for run in runs.values())
    assert sum(slept) == pytest.approx(3.0) and found == runs
    assert demo.verdict(found).standings


def test_the_chart_draws_falling_curves_falling():
    text = chart({"fast": [(0, 100), (10, 1)], "slow": [(0, 100), (10, 10)]}, "steps", "loss", width=20, height=9)
    rows = text.splitlines()[1:10]
    assert rows[0].startswith("     100 |") and rows[-1].startswith("       1 |")
    assert rows[-1].rstrip().endswith("f") and rows[4].rstrip().endswith("s")
    assert "f fast   s slow" in text and "(log scale)" in text


@pytest.mark.parametrize("points", [[], [(0, float("nan"))], [(0, -1.0)]])
def test_a_chart_of_nothing_says_so(points):
    assert chart({"none": points}, "steps", "loss") == "(nothing to draw)"


def test_a_chart_of_one_level_is_drawn():
    assert "f" in chart({"flat": [(0, 5.0), (1, 5.0)]}, "steps", "loss")
