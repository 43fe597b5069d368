"""Optimizers by name: every one trains, bad options are refused in one clear line, a user's file adds more."""

import sys

import pytest
import torch
from torch import nn

from ekfac.lab.optimizers import OPTIMIZERS, build_optimizer, register_optimizer
from ekfac.lab.registry import LabError, load_plugin, loaded_plugins
from ekfac.lab.tasks import TASKS
from ekfac.lab.training.run import TrainConfig, train

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
        ("muon", {"adjust_lr_fn": "mine"}, "optimizer muon: .*mine"),
        ("soap", {"rank": 1}, "optimizer soap has no option 'rank'; it has: betas, .*precondition_frequency"),
        ("soap", {"lr": -1.0}, "optimizer soap: "),
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


def test_muon_takes_all_weight_matrices_unless_told_to_spare_the_ends():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))

    def split(**options):
        muon, rest = build_optimizer("muon", model, options).optimizers
        return [tuple(p.shape) for p in muon.views], len(rest.param_groups[0]["params"])

    assert split() == ([(3, 4), (3, 3), (3, 3), (2, 3)], 6)
    assert split(hidden_only=True) == ([(3, 3), (3, 3)], 8)
    with pytest.raises(LabError, match="hidden weight matrices"):
        build_optimizer("muon", nn.Linear(3, 2), {"hidden_only": True})
    with pytest.raises(LabError, match="weight matrices; this one has none"):
        build_optimizer("muon", nn.Embedding(3, 2), {})
    assert len(build_optimizer("muon", nn.Linear(3, 2, bias=False), {}).optimizers) == 1


def test_muon_on_a_linear_layer_is_torchs_own_and_on_a_convolution_that_of_its_flat_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    flat = [nn.Parameter(model[0].weight.detach().flatten(1).clone()), nn.Parameter(model[2].weight.detach().clone())]
    ours = build_optimizer("muon", model, {"lr": 0.01, "weight_decay": 0.1})
    theirs = torch.optim.Muon(flat, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        ours.zero_grad()
        assert model[0].weight.grad is None
        model(torch.randn(5, 2, 4, 4)).square().mean().backward()
        for twin, layer in zip(flat, (model[0], model[2]), strict=True):
            twin.grad = layer.weight.grad.flatten(1).clone()
        ours.step()
        theirs.step()
    assert torch.equal(flat[0], model[0].weight.flatten(1)) and torch.equal(flat[1], model[2].weight)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(("name", "task"), [("muon", "vgg11"), ("soap", "vgg11"), ("adamw", "classifier")])
def test_rivals_train_convolutions_with_and_without_batch_norm(name, task, batch_norm):
    torch.manual_seed(0)
    model = TASKS.get(task).build(2, batch_norm)
    optimizer = build_optimizer(name, model, {"lr": 1e-2, "weight_decay": 1e-3})
    x, y = torch.rand(20, *TASKS.get(task).input_shape), torch.arange(20) % 10
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_soap_without_its_package_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(LabError, match="needs the package pytorch_optimizer: pip install") as caught:
        build_optimizer("soap", nn.Linear(3, 2), {})
    assert "\n" not in str(caught.value)


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
    load_plugin(str(plugin))
    run = train(config)
    assert run.status == "finished" and run.about["parameters"] == 7850
    assert run.history[-1]["validation_accuracy"] is None
    load_plugin(str(plugin))  # a second time does nothing


def test_workers_find_a_plugin_whose_path_was_relative(tmp_path, monkeypatch):
    (tmp_path / "relative.py").touch()
    monkeypatch.chdir(tmp_path)
    load_plugin("relative.py")
    assert loaded_plugins()[-1] == str((tmp_path / "relative.py").resolve())


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
