"""Settings: defaults written out, typed, checked; the command line that repeats a run."""

import json
import shlex

import pytest

from ekfac.lab.config import TrainConfig, parse_options
from ekfac.lab.registry import LabError
from ekfac.lab.train import gather, parser


def test_defaults_come_from_the_user_then_the_task_then_the_optimizer():
    config = TrainConfig("vgg11", "ekfac-ra", lr=0.5, device="cpu").resolved()
    assert (config.lr, config.damping_mode, config.sua) == (0.5, "factored", True)
    assert config.options["scaling"] == "running"
    assert (config.dataset, config.width, config.batch_size) == ("cifar10", 64, 500)
    assert TrainConfig("vgg11", "sgd", device="cpu").resolved().batch_size == 200
    assert TrainConfig("autoencoder", "sgd", device="cpu").resolved().options == {"momentum": 0.9}


def test_the_librarys_defaults_are_left_alone_by_ekfac_default():
    config = TrainConfig("autoencoder", "ekfac-default", device="cpu").resolved()
    assert config.optimizer_options() == {}


def test_resolving_twice_changes_nothing():
    once = TrainConfig("resnet34", "kfac", options={"lr": 0.3, "momentum": 0.5}, device="cpu").resolved()
    assert once.resolved() == once
    assert once.lr == 0.3 and once.options["momentum"] == 0.5 and "lr" not in once.options


def test_settings_survive_json_and_the_command_line():
    options = {"kl_clip": 0.1, "on_refresh": "carry", "nesterov": True, "kind": None, "betas": (0.9, 0.99)}
    config = TrainConfig("autoencoder", "ekfac", batch_norm=True, lr=0.02, sua=False, options=options, seed=3)
    assert TrainConfig.from_dict(json.loads(json.dumps({**config.to_dict(), "options": {}}))).seed == 3
    words = shlex.split(config.command())[2:]
    assert TrainConfig.from_dict(gather(vars(parser().parse_args(words)))) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a task must be named; known: autoencoder"),
        ({"task": 3}, "a task must be named"),
        ({"task": "x", "epoch": 3}, "unknown setting 'epoch'"),
        ({"task": "x", "epochs": 2.5}, "epochs must be of type int"),
        ({"task": "x", "epochs": True}, "epochs must be of type int"),
        ({"task": "x", "lr": "0.1"}, "lr must be of type float"),
        ({"task": "x", "batch_norm": 1}, "batch_norm must be of type bool"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(settings, message):
    with pytest.raises(LabError, match=message):
        TrainConfig.from_dict(settings)


def test_options_are_typed():
    given = ["a=1", "b=0.5", "c=true", "d=None", "e=carry", "f=(1, 2)", "g=1e-3", "h=a=b", "i={1}"]
    expected = {"a": 1, "b": 0.5, "c": True, "d": None, "e": "carry", "f": (1, 2), "g": 1e-3, "h": "a=b", "i": "{1}"}
    assert parse_options(given) == expected


@pytest.mark.parametrize("pair", ["kl_clip", "=3", "a b=3", ""])
def test_options_without_name_or_value_are_refused(pair):
    with pytest.raises(LabError, match="--set takes name=value"):
        parse_options([pair])
