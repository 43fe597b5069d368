"""Searches beside the grid: any option as an axis, settings from YAML, TPE, ASHA, importance; paused, not failed."""

import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from ekfac.cli import main as cli
from ekfac.cli.progress import SweepProgress
from ekfac.cli.sweep import parse_axes
from ekfac.lab import LabError
from ekfac.lab.search import sweep as search
from ekfac.lab.search.ask import importance
from ekfac.lab.search.sweep import State, Where, open_studies, state
from ekfac.lab.training.gather import find_runs

PLUGIN = str(Path(__file__).parents[1] / "tiny_plugin.py")
BASE = ("sweep", "tiny", "--plugin", PLUGIN, "--optimizer", "sgd", "--epochs", "2", "--random", "0")


def run(*words: object) -> int:
    return cli.run([str(word) for word in words])


def test_any_option_is_an_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s"
    words = ("--lr", "0.1", "--axis", "momentum=0.0,0.9", "--axis", "batch-norm=false", "--axis", "nesterov=false")
    assert run(*BASE, *words, "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["trials"] == {"tiny-sgd": 2}
    found = {r.config.options["momentum"] for r in find_runs([out])}
    assert found == {0.0, 0.9}
    for wrong, message in (
        ("colour=1", "no option 'colour'"),
        ("lr=1,2", "--lr takes a list itself"),
        ("momentum", "name=value,value"),
        ("momentum=", "name=value,value"),
    ):
        assert run(*BASE, "--axis", wrong, "--out", out) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(LabError, match="twice"):
        parse_axes(["a=1", "a=2"])


@pytest.mark.parametrize("sampler", [(), ("--sampler", "tpe", "--lr", "0.1,1", "--trials", "2")])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--axis", "colour=1,2"), "no argument 'colour'"),
        (("--set", "colour=1"), "no argument 'colour'"),
        (("--axis", "kl_clip=0.1,-1"), "kl_clip=-1 must be a finite number > 0"),
        (("--set", "kl_clip=0.1,0.2"), "--axis kl_clip=0.1,0.2 tries each"),
        (("--set", "nesterov=true,false"), "--axis nesterov=true,false tries each"),
    ],
)
def test_what_the_optimizer_refuses_is_refused_before_anything_runs(
    words: tuple[str, ...], message: str, sampler: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("sweep", "tiny", "--plugin", PLUGIN, "--optimizer", "ekfac-default", "--out", tmp_path / "s")
    assert run(*base, *sampler, *words) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_the_settings_line_says_every_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("--axis", "width=3,4", "--axis", "dtype=float32,float64", "--axis", "nesterov=true,false")
    assert run(*BASE, "--lr", "0.1", *axes, "--out", tmp_path, "--json") == 0
    (rows,) = json.loads(capsys.readouterr().out)["best"].values()
    for row in rows:
        assert re.fullmatch(r"lr 0.1, batch \d+, width [34], dtype float\d\d, nesterov \w+", row["setting"])
    assert "width" in state(list(open_studies(Where.of(tmp_path), ["tiny-sgd"]).values())).setting


def test_lists_in_a_file_are_values_to_try_and_the_command_line_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "task: tiny\noptimizer: sgd\nepochs: 1\nlr: [1e-1, 1e-2]\nseed: [0, 1]\noptions:\n  momentum: [0.0, 0.9]\n"
    )
    words = ("sweep", "--config", file, "--plugin", PLUGIN, "--random", "0", "--json")
    assert run(*words, "--out", tmp_path / "a") == 0
    assert json.loads(capsys.readouterr().out)["trials"] == {"tiny-sgd": 8}
    assert run(*words, "--lr", "0.05", "--seed", "3", "--out", tmp_path / "b") == 0
    found = [(r.config.lr, r.config.seed, r.config.epochs) for r in find_runs([tmp_path / "b"])]
    assert found == [(0.05, 3, 1)] * 2


@pytest.mark.parametrize("pruner", ["median", "asha"])
def test_tpe_proposes_as_many_as_asked_and_goes_on(
    pruner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*BASE, "--sampler", "tpe", "--lr", "1e-3,1", "--axis", "momentum=0.0,0.9", "--out", tmp_path / "s")
    more = ("--prune", "--pruner", pruner, "--json")
    assert run(*words, "--trials", "5", *more) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == {"tiny-sgd": 5}
    assert run(*words, "--trials", "8", *more) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == {"tiny-sgd": 8}
    runs = find_runs([tmp_path / "s"])
    assert len(runs) == 8 and all(1e-3 <= (r.config.lr or 0) <= 1 for r in runs)
    assert len({r.config.lr for r in runs}) > 4
    for wrong in (["--trials", "0"], ["--sampler", "magic"], ["--pruner", "axe"], ["--write-plan", "p.json"]):
        assert run(*words, *wrong) == 2
    assert run(*BASE, "--sampler", "tpe", "--lr", "0.1", "--out", tmp_path / "n") == 2
    assert "nothing for tpe to vary" in capsys.readouterr().err


def test_importance_says_which_parameter_the_loss_hangs_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s"
    assert run(*BASE, "--lr", "1e-5,1e-3,1e-1,1", "--seed", "0,1", "--out", out) == 0
    assert "what the loss depends on: lr" in capsys.readouterr().out
    (study,) = open_studies(Where.of(out), ["tiny-sgd"]).values()
    found = importance(study)
    assert found["lr"] > found["seed"] and math.isclose(sum(found.values()), 1.0)


def test_what_ctrl_c_cuts_is_paused_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "s", search._Reports.epoch
    monkeypatch.setattr(search._Reports, "epoch", lambda self, record: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(*BASE, "--lr", "0.1,0.01", "--out", out) == 130
    studies = list(open_studies(Where.of(out), ["tiny-sgd"]).values())
    assert state(studies).counts == {"paused": 1, "waiting": 1}
    monkeypatch.setattr(search._Reports, "epoch", real)
    assert run(*BASE, "--lr", "0.1,0.01", "--out", out) == 0
    found = state(studies)
    assert found.counts == {"complete": 2} and found.best is not None and found.setting.startswith("lr")


def test_the_line_says_the_best_and_an_honest_time_left() -> None:
    show = SweepProgress(Console(), 10, 2, "out")
    early = State({"waiting": 10}, 0, None)
    assert show.line(early) == "10 waiting"
    later = State({"complete": 3, "waiting": 7}, 1, 1.5, 60.0, "lr 0.1")
    assert show.line(later) == "3 complete, 7 waiting (1 diverged); about 4 min left; best loss 1.5 (lr 0.1)"
