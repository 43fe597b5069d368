"""A search by successive halving for a given time: what is wanted when, going on, and paces of steps timed alone."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Split, load_dataset
from ekfac.lab.reproduce import main, program
from ekfac.lab.search import workers
from ekfac.lab.search.cifar import FACTORED, NAMES, OF_TASK, Program
from ekfac.lab.search.known import KNOWN
from ekfac.lab.search.ladder import Group, Ladder, Stage, name_of
from ekfac.lab.search.workers import advance
from ekfac.lab.training import paces
from ekfac.lab.training.gather import find_runs
from ekfac.lab.training.runs import Run, load_run

BASE = TrainConfig("classifier", "ekfac-ra", width=8, limit=200, batch_size=50, epochs=4, device="cpu")


def trained(group: Group, config: TrainConfig, *losses: float) -> None:
    """Let a group have a run with these training losses after each epoch."""
    history = [
        {"epoch": n, "step": n, "seconds": 0.0, "train_loss": loss, "diverged": not math.isfinite(loss)}
        for n, loss in enumerate((3.0, *losses))
    ]
    over = history[-1]["diverged"]
    group.runs[name_of(config)] = Run(config, history, "diverged" if over else "finished")


def searched() -> tuple[Group, list[Stage]]:
    group = Group("g", BASE, (0.1, 0.01), (0.1, 0.01), seeds=(0, 1))
    grid = Stage("grid", group, 1)
    around = Stage("around", group, 1, by=1, needs=(grid,))
    best = Stage("best", group, 3, by=1, keep=2, needs=(around,))
    return group, [grid, around, best, Stage("seeds", group, 3, by=3, needs=(best,))]


def bowl(config: TrainConfig) -> float:
    """Return a loss that is least at lr 0.1, damping 0.001."""
    return 1 + (math.log10(config.lr) + 1) ** 2 + (math.log10(config.damping) + 3) ** 2


def test_a_search_climbs_until_the_best_has_all_its_neighbours_and_keeps_the_best() -> None:
    group, stages = searched()
    ladder = Ladder(stages, Path("nowhere"))
    grid = stages[0].wanted()
    assert grid is not None and len(grid) == 4 and stages[1].wanted() is None, "the grid comes first"
    while (job := ladder.next(())) is not None and job[2] == 1:
        trained(group, job[1], bowl(job[1]))
    best = group.ranked(1)[0]
    assert (best.lr, best.damping) == (0.1, 0.001)
    assert all(group.reached(config) >= 1 for config in group.around(best)), "no best at an edge"
    longer = stages[2].missing()
    assert longer is not None and [c for _, c, _ in longer] == group.ranked(1)[:2]
    for _, config, epochs in longer:
        trained(group, config, *[bowl(config)] * epochs)
    other = stages[3].wanted()
    assert other is not None and [(c.seed, c.lr, e) for _, c, e in other] == [(1, 0.1, 3)]


def test_what_diverged_or_failed_holds_nothing_up_and_never_wins() -> None:
    group, stages = searched()
    configs = group.grid()
    trained(group, configs[0], math.inf)
    group.failed.add(name_of(configs[1]))
    for config in configs[2:]:
        trained(group, config, bowl(config))
    assert stages[0].complete() and group.ranked(1)[0] in configs[2:]


def test_a_climb_ends_after_so_many_tries() -> None:
    group, stages = searched()
    group.most = 5
    ladder = Ladder(stages, Path("nowhere"))
    while (job := ladder.next(())) is not None and job[2] == 1:
        trained(group, job[1], bowl(job[1]))
    assert 5 <= len(group.tried()) <= 8 and stages[1].complete()


def test_a_worker_takes_its_own_task_first_and_else_what_comes_first() -> None:
    groups = [Group(task, replace(BASE, task=task)) for task in ("classifier", "autoencoder")]
    ladder = Ladder([Stage("best", group, 1) for group in groups], Path("nowhere"))
    first, own = ladder.next(()), ladder.next((), "autoencoder")
    assert first is not None and first[0] is groups[0] and own is not None and own[0] is groups[1]
    rest = ladder.next({name_of(own[1])}, "autoencoder")
    assert rest is not None and rest[0] is groups[0]


def test_a_run_goes_on_from_the_stage_before_and_what_is_cut_keeps_its_epochs(tmp_path: Path) -> None:
    group = Group("g", BASE)
    ladder = Ladder([Stage("best", group, 2)], tmp_path)
    config = group.at(None, None)
    folder = tmp_path / name_of(config)
    assert advance(replace(config, epochs=2), folder, None, math.inf) == "finished"
    two = load_run(folder).history
    assert advance(replace(config, epochs=4), folder, None, math.inf) == "finished"
    four = load_run(folder).history
    assert [r["train_loss"] for r in four[:3]] == [r["train_loss"] for r in two] and len(four) == 5
    assert advance(config, folder, None, 0.0) == "no time left"
    # One that is cut in the middle of what was asked for says how long it is.
    cut_after(folder, 3)
    (run,) = ladder.settle()
    assert run.config.epochs == 3 and load_run(folder).status == "finished"
    ladder.load()
    assert group.reached(config) == 3


def cut_after(folder: Path, lines: int) -> None:
    """Leave so many epochs of a run, as a kill does."""
    file = folder / "metrics.jsonl"
    file.write_bytes(b"\n".join(file.read_bytes().split(b"\n")[: lines + 1]) + b"\n")


def test_the_papers_program_has_all_methods_and_goes_by_importance() -> None:
    made = Program(NAMES, 600)
    names = [stage.group.name for stage in made.stages]
    for task, methods in OF_TASK.items():
        assert {f"{task} {method}" for method in methods} <= {*names}
    assert names.index("vgg11 KFAC") < names.index("resnet34 KFAC") < names.index("vgg11 KFAC halve_every 20")
    assert names.index("vgg11 KFAC halve_every 20") < names.index("vgg11 KFAC batch_size 200")
    for group in made.groups:
        if group.base.optimizer in ("kfac", "ekfac", "ekfac-ra") and group.base.task != "autoencoder":
            own = group.base.resolved()
            assert own.sua and own.refresh_every == 500 and not own.batch_norm and own.options.get("kl_clip") is None
            assert own.damping_mode in (None, "factored", "plain") and not own.options.get("momentum")
    assert max(stage.epochs for stage in Program(["vgg11"], 7200).stages) == 50
    assert {stage.group.base.task for stage in Program(["vgg11"]).stages} == {"vgg11"}
    assert set(FACTORED) < {*OF_TASK["vgg11"]}
    with pytest.raises(LabError, match="unknown experiment 'vgg'"):
        program(["vgg"], 1)


def test_steps_are_timed_alone_and_give_runs_side_by_side_their_seconds(tmp_path: Path) -> None:
    config = replace(BASE, refresh_every=50).resolved()
    found = paces.measure_all([config], tmp_path)
    (pace,) = found.values()
    assert pace.step > 0 and pace.renewal >= 0 and pace.every == 50
    assert paces.read(tmp_path) == found == paces.measure_all([config], tmp_path), "no kind is timed twice"
    assert paces.Pace(2.0, 10.0, 50).seconds(51) == 51 * 2 + 2 * 10 and paces.Pace(2.0).seconds(3) == 6
    advance(replace(config, epochs=1), tmp_path / "runs" / name_of(config), None, math.inf)
    raw = load_run(tmp_path / "runs" / name_of(config))
    (run,) = find_runs([tmp_path])
    assert run.timed and run.history[1]["seconds"] == pytest.approx(pace.seconds(4))
    assert raw.history[1]["seconds"] != run.history[1]["seconds"], "the file has the run's own"
    (tmp_path / paces.FILE).write_text("{}")
    with pytest.raises(LabError, match=r"paces.json cannot be read"):
        paces.read(tmp_path)


def test_a_pace_is_of_steps_between_renewals_and_a_renewal_of_what_is_left() -> None:
    # Three parts of six steps, each begun by a renewal of 10 s; a step takes 2 s, in the first part 5 s.
    at = {0: 0.0, 6: 40.0, 9: 56.0, 12: 62.0, 15: 78.0, 18: 84.0}
    assert paces._pace(at, 6, 500) == paces.Pace(2.0, 10.0, 500)
    assert paces._pace(at, 6, None) == paces.Pace((84.0 - 62.0) / 6)


def test_few_examples_are_timed_too() -> None:
    data = load_dataset("mnist-5k")
    few = replace(data, splits={"train": Split(*(part[:100] for part in data.train))})
    config = replace(BASE, batch_size=50, refresh_every=50).resolved()
    assert paces.measure(config, few).step > 0
    with pytest.raises(LabError, match=r"batch_size 500 is more than the 100"):
        paces.measure(replace(config, batch_size=500), few)


def test_paces_are_timed_again_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(BASE, refresh_every=50, epochs=1).resolved()
    advance(config, tmp_path / "runs" / name_of(config), None, math.inf)
    paces.write(tmp_path, {paces.label(config): paces.Pace(1e6, 0.0, 50)})
    assert main(["autoencoder", "--out", str(tmp_path), "--only-paces"]) == 0
    assert "1 kind of runs timed" in capsys.readouterr().out
    (pace,) = paces.read(tmp_path).values()
    assert pace.step < 1e3


def test_from_the_command_line_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [replace(BASE, optimizer=name, epochs=2) for name in ("sgd", "ekfac-ra")]
    monkeypatch.setitem(KNOWN, "autoencoder", lambda: [*both, both[0]])
    monkeypatch.setattr(workers, "loaded_plugins", list)  # another test's may be gone by now
    words = ["autoencoder", "--out", str(tmp_path), "--workers", "2", "--budget", "300", "--set", "width=4"]
    assert main(words) == 0
    assert "2 runs in" in capsys.readouterr().out
    runs = find_runs([tmp_path])
    assert all(run.timed and run.config.epochs == 2 and run.status == "finished" for run in runs)
    assert all(run.about["machine"]["processes"] == 2 for run in runs)
    kept = json.loads((tmp_path / "ladder.json").read_text())
    assert kept["left"] == [] and kept["failed"] == {} and kept["workers"] == 2
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("metrics.jsonl")}
    assert main(words) == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("metrics.jsonl")} == before, "nothing ran twice"
    assert main(["vgg", "--out", str(tmp_path)]) == 2 and main(["vgg11", "--out", "x", "--workers", "0"]) == 2


def test_data_that_are_loaded_already_and_a_known_start_change_nothing(tmp_path: Path) -> None:
    from ekfac.lab.training.run import train

    plain = train(BASE)
    data = load_dataset("mnist-5k")
    again = train(BASE, data=data, initial=plain.history[0])
    assert [r["train_loss"] for r in again.history] == [r["train_loss"] for r in plain.history]
    assert again.history[0]["validation_accuracy"] == plain.history[0]["validation_accuracy"]
