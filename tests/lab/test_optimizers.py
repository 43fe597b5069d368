"""Optimizers by name: every one trains, bad options are refused in one clear line, a user's file adds more."""

import pytest
import torch
from torch import nn

from ekfac.lab.optimizers import OPTIMIZERS, build_optimizer, register_optimizer
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.tasks import TASKS
from ekfac.lab.training import TrainConfig, train

SMALL = {"width": 8, "limit": 100, "batch_size": 50, "epochs": 2, "device": "cpu"}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_trains_and_is_recorded(name):
    run = train(TrainConfig("classifier", name, **SMALL))
    assert run.status == "finished"
    losses = [record["train_loss"] for record in run.history]
    assert losses[-1] != losses[0]
    if "kfac" in name:
        assert run.history[-1]["optimizer"]["refreshes"] > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("newton", {}, "unknown optimizer 'newton'; known: sgd, adam"),
        ("sgd", {"damping": 0.1}, "optimizer sgd has no option 'damping'; it has: .*momentum"),
        ("adam", {"lr": -1.0}, "optimizer adam: Invalid learning rate"),
        ("muon", {"beta": 1}, "optimizer muon has no option 'beta'"),
        ("ekfac", {"scaling": "magic"}, "optimizer ekfac: .*magic.*per_example"),
        ("ekfac", {"no_such_option": 1}, "optimizer ekfac: .*no_such_option"),
        ("kfac", {"damping": -1}, "optimizer kfac: .*damping"),
        ("ekfac-ra", {"refresh_every": 0}, "optimizer ekfac-ra: .*refresh_every"),
    ],
)
def test_bad_options_are_refused_in_one_line(name, options, message):
    with pytest.raises(LabError, match=message) as caught:
        build_optimizer(name, TASKS.get("classifier").build(4, False), options)
    assert "\n" not in str(caught.value)


def test_muon_takes_the_matrices_between_first_and_last_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = build_optimizer("muon", model, {})
    muon, rest = optimizer.optimizers
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(3, 3), (3, 3)]
    assert len(rest.param_groups[0]["params"]) == 6
    with pytest.raises(LabError, match="hidden weight matrices"):
        build_optimizer("muon", nn.Linear(3, 2), {})


def test_a_users_file_adds_an_optimizer_and_a_task(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from ekfac.lab import Task, label_cross_entropy, of_parameters, register_optimizer, register_task\n"
        "register_optimizer('mine-rprop', of_parameters(torch.optim.Rprop), {'lr': 0.001})\n"
        "register_task('mine-linear', Task(lambda width, batch_norm: nn.Linear(784, 10), label_cross_entropy,\n"
        "    'mnist-5k', (784,), width=1))\n"
    )
    config = TrainConfig("mine-linear", "mine-rprop", **SMALL, plugins=(str(plugin),))
    run = train(config)
    assert run.status == "finished" and run.about["parameters"] == 7850
    assert run.history[-1]["validation_accuracy"] is None
    load_plugin(str(plugin))  # a second time does nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_anywhere", "failed on import: ModuleNotFoundError"),
        ("1 / 0", "failed on import: ZeroDivisionError"),
        ("def broken(:", "failed on import: SyntaxError"),
        ("from ekfac.lab import register_task\nregister_task('vgg11', None)", "already registered"),
    ],
)
def test_a_plugin_that_fails_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(LabError, match=message):
        load_plugin(str(tmp_path / "bad.py"))


def test_a_missing_plugin_is_named(tmp_path):
    with pytest.raises(LabError, match=r"nothing\.py' does not exist"):
        load_plugin(str(tmp_path / "nothing.py"))
    with pytest.raises(LabError, match="no_such_module_anywhere"):
        load_plugin("no_such_module_anywhere")


def test_an_optimizer_with_any_options_passes_them_all():
    seen = {}

    def build(model, **options):
        seen.update(options)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    register_optimizer("takes-all", build)
    build_optimizer("takes-all", nn.Linear(2, 2), {"anything": 3})
    assert seen == {"anything": 3}
