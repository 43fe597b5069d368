"""Training: what is recorded is what happened; same seed, same run; divergence is seen and said."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ekfac.lab.data.datasets import Dataset, Split, load_dataset, register_dataset
from ekfac.lab.registry import LabError
from ekfac.lab.tasks import Task, label_correct, label_cross_entropy, register_task
from ekfac.lab.training import run as training
from ekfac.lab.training.run import Progress, TrainConfig, train
from ekfac.lab.training.trainer import Trainer
from lab import patterns

SMALL = {"width": 8, "limit": 200, "batch_size": 50, "epochs": 2, "device": "cpu"}


def small(optimizer: str = "sgd", **changes) -> TrainConfig:
    return TrainConfig("classifier", optimizer, **{**SMALL, **changes})


def curve(run, name="train_loss"):
    return [record[name] for record in run.history]


def test_the_training_loss_is_recorded_both_ways():
    config = small(batch_norm=True, lr=0.1).resolved()
    trainer = Trainer(config, load_dataset("mnist-5k"))
    model = trainer.model
    first = trainer.initial_record()
    x, y = trainer.data.train
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append((module.training, inputs[0], output)))
    record = trainer.train_epoch()
    batches = [(inputs, output) for train_mode, inputs, output in seen if train_mode]
    assert [len(inputs) for inputs, _ in batches] == [50] * 4
    labels = {tuple(row.tolist()): label for row, label in zip(x, y, strict=True)}
    means = [
        nn.functional.cross_entropy(output, torch.stack([labels[tuple(row.tolist())] for row in inputs])).item()
        for inputs, output in batches
    ]
    assert record["train_loss_mean"] == pytest.approx(sum(means) / 4, rel=1e-6)
    model.eval()
    with torch.no_grad():
        full = nn.functional.cross_entropy(model(x), y).item()
    assert record["train_loss"] == pytest.approx(full, rel=1e-6)
    assert record["train_loss"] != pytest.approx(record["train_loss_mean"], rel=1e-3)
    assert first["train_loss_mean"] is None and first["epoch"] == 0 and first["seconds"] == 0
    assert record["step"] == 4 and record["seconds"] > 0 and record["images_per_second"] > 0
    assert record["peak_memory"] > 0 and 0 <= record["validation_accuracy"] <= 1


def test_each_epoch_shows_every_example_once_in_a_new_order():
    trainer = Trainer(small().resolved(), load_dataset("mnist-5k"))
    seen: list[list[list[float]]] = [[], []]
    epoch = 0
    trainer.model.register_forward_hook(
        lambda module, inputs, output: seen[epoch].extend(inputs[0].tolist()) if module.training else None
    )
    trainer.train_epoch()
    epoch = 1
    trainer.train_epoch()
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(trainer.data.train.x.tolist())
    assert seen[0] != seen[1]


def test_same_seed_same_run_and_another_seed_another():
    runs = [curve(train(small("ekfac-ra", seed=seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_floor_of_the_autoencoder_is_recorded():
    run = train(TrainConfig("autoencoder", "sgd", width=20, limit=100, batch_size=50, epochs=1, device="cpu"))
    data = load_dataset("mnist-5k").limited(100)
    x = data.train.x.double()
    entropy = -(torch.xlogy(x, x) + torch.xlogy(1 - x, 1 - x)).sum(1).mean().item()
    assert run.about["floor"]["train"] == pytest.approx(entropy)
    assert curve(run)[-1] > entropy and curve(run, "train_accuracy") == [None, None]


def test_the_learning_rate_is_halved_every_so_many_epochs():
    run = train(small(lr=0.4, halve_every=2, epochs=5))
    assert curve(run, "lr") == [0.4, 0.4, 0.4, 0.2, 0.2, 0.1]


def test_the_learning_rate_falls_along_a_cosine():
    run = train(small(lr=0.4, cosine=True, epochs=4))
    steps = run.history[1]["step"]
    at = [epoch + (steps - 1) / steps for epoch in range(4)]  # a record holds the rate of the epoch's last step
    assert curve(run, "lr")[1:] == pytest.approx([0.2 + 0.2 * math.cos(math.pi * t / 4) for t in at])


def test_a_cosine_takes_the_place_of_annealing():
    assert small("ekfac-default", cosine=True).resolved().options["anneal"] is None
    assert small("ekfac-default", cosine=True, options={"anneal": 50.0}).resolved().options["anneal"] == 50.0
    assert "anneal" not in small("ekfac-default").resolved().options
    assert "anneal" not in small("sgd", cosine=True).resolved().options


def test_a_run_along_a_cosine_cannot_be_given_more_epochs(tmp_path):
    train(small(cosine=True, epochs=1), tmp_path / "run")
    with pytest.raises(LabError, match="epochs 1, not 2"):
        train(small(cosine=True, epochs=2), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("optimizer", "options"), [("sgd", {}), ("ekfac-ra", {}), ("kfac", {"kl_clip": None})])
def test_a_run_that_diverges_says_so(optimizer, options, tmp_path):
    config = small(optimizer, lr=1e12, epochs=6, options=options)
    run = train(config, tmp_path / "run")
    assert run.status == "diverged" and run.exit_code == 1
    assert run.history[-1]["diverged"] and not any(curve(run, "diverged")[:-1])
    again = training.load_run(tmp_path / "run")
    assert again.status == "diverged" and again.history == run.history
    assert train(config, tmp_path / "run", resume=True).history == run.history


def test_an_exploding_loss_has_diverged_though_it_is_finite():
    run = train(small("sgd", lr=3e4, epochs=3, options={"momentum": 0.0}))
    last = run.history[-1]
    assert run.status == "diverged" and math.isfinite(last["train_loss"])


def test_an_optimizer_that_gives_up_on_nan_has_diverged_and_another_error_is_raised():
    def fail(at_nan: bool):
        trainer = Trainer(small().resolved(), load_dataset("mnist-5k"))
        trainer.initial_record()
        step = trainer.optimizer.step

        def broken():
            step()
            if at_nan:
                next(trainer.model.parameters()).data.fill_(math.nan)
                trainer.optimizer.step = stop
            else:
                stop()

        def stop():
            raise RuntimeError("no inverse")

        trainer.optimizer.step = broken
        return trainer.train_epoch()

    assert fail(at_nan=True)["diverged"]
    with pytest.raises(RuntimeError, match="no inverse"):
        fail(at_nan=False)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance"),
    # EKFAC's basis is not defined where examples are fewer than inputs, so rounding may turn it.
    [("sgd", "float64", 1e-5), ("sgd", "bfloat16", 0.1), ("ekfac-ra", "float64", 0.1), ("ekfac-ra", "bfloat16", 0.1)],
)
def test_other_dtypes_train(optimizer, dtype, tolerance):
    run = train(small(optimizer, dtype=dtype, lr=0.05))
    exact = train(small(optimizer, lr=0.05))
    assert run.status == "finished"
    assert curve(run)[-1] == pytest.approx(curve(exact)[-1], rel=tolerance)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "gan"}, "unknown task 'gan'; known: autoencoder"),
        ({"dataset": "svhn"}, "unknown dataset 'svhn'"),
        ({"width": 0}, "width must be at least 1, not 0"),
        ({"limit": 4001}, "limit 4001 is more than the 4000"),
        ({"limit": 40}, "batch_size 50 is more than the 40"),
        ({"batch_size": -2}, "batch_size must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": math.nan}, "lr must be a positive number"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"halve_every": 0}, "halve_every must be at least 1"),
        ({"seed": -1}, "seed must be between 0"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"channels_last": True}, r"channels_last is for images; task classifier takes examples of shape \(784,\)"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known: float32, float64, bfloat16"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(changes, message, tmp_path):
    with pytest.raises(LabError, match=message):
        train(TrainConfig(**{"task": "classifier", "optimizer": "sgd", **SMALL, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dataset_of_another_shape_is_refused():
    x = torch.zeros(10, 3)
    split = Split(x, torch.zeros(10, dtype=torch.int64))
    register_dataset("three-numbers", lambda folder: Dataset("three-numbers", {"train": split, "validation": split}))
    with pytest.raises(LabError, match=r"takes examples of shape \(784,\); dataset three-numbers has \(3,\)"):
        train(TrainConfig("classifier", dataset="three-numbers", batch_size=5, device="cpu"))


@pytest.mark.parametrize(
    ("name", "split", "rows", "labels", "message"),
    [
        ("few-labels", "train", 10, 8, "train: 10 examples and 8 labels"),
        ("no-rows", "validation", 0, 0, "validation: 0 examples and 0 labels"),
        ("few-rows", "validation", 3, 5, "validation: 3 examples and 5 labels"),
        ("narrow", "validation", 3, 3, r"examples of shape \(784,\); dataset narrow, validation: has \(3,\)"),
    ],
)
def test_splits_that_do_not_fit_are_refused_before_anything_is_written(name, split, rows, labels, message, tmp_path):
    good = Split(torch.zeros(10, 784), torch.zeros(10, dtype=torch.int64))
    bad = Split(torch.zeros(rows, 3 if name == "narrow" else 784), torch.zeros(labels, dtype=torch.int64))
    register_dataset(name, lambda folder: Dataset(name, {"train": good, "validation": good, split: bad}))
    with pytest.raises(LabError, match=message):
        train(TrainConfig("classifier", dataset=name, batch_size=5, device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_task_whose_build_returns_no_network_is_refused(monkeypatch):
    from ekfac.lab.tasks import TASKS

    task = dataclasses.replace(TASKS.get("classifier"), build=lambda width, batch_norm: torch.compile)
    monkeypatch.setattr(TASKS, "get", lambda name: task)
    with pytest.raises(LabError, match=r"build\(width, batch_norm\) returned a function, not an nn.Module"):
        train(TrainConfig("classifier", optimizer="sgd", **SMALL))


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "kfac", "ekfac-default"])
def test_channels_last_changes_the_layout_alone(optimizer):
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.rand(40, 3, 32, 32, generator=generator), torch.arange(40) % 10)
    register_dataset(f"noise-{optimizer}", lambda folder: Dataset("noise", {"train": split, "validation": split}))
    settings = {
        "dataset": f"noise-{optimizer}",
        "width": 4,
        "batch_size": 20,
        "epochs": 2,
        "dtype": "float64",
        "device": "cpu",
    }
    runs = [train(TrainConfig("vgg11", optimizer, **settings, channels_last=last)) for last in (False, True)]
    # The last layers' bases are not defined, with fewer examples than channels, so rounding may turn them.
    tolerance = 1e-2 if optimizer == "ekfac-default" else 1e-9
    assert curve(runs[1]) == pytest.approx(curve(runs[0]), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "ekfac-ra"])
def test_compiled_training_gives_the_same_losses(optimizer):
    # More examples than inputs in a batch, so that the basis is defined and rounding cannot turn it.
    settings = {"lr": 0.05, "limit": 1000, "batch_size": 1000, "epochs": 3, "dtype": "float64"}
    plain, compiled = train(small(optimizer, **settings)), train(small(optimizer, **settings, compile=True))
    assert curve(compiled) == pytest.approx(curve(plain), rel=1e-5)


def test_progress_hears_everything_in_order():
    heard: list[str] = []

    class Listening(Progress):
        def start(self, run):
            heard.append("start")

        def step(self, step, steps):
            heard.append(f"{step}/{steps}")

        def epoch(self, record):
            heard.append(f"epoch {record['epoch']}")

        def end(self, run):
            heard.append(run.status)

    train(small(epochs=1), progress=Listening())
    assert heard == ["start", "epoch 0", "1/4", "2/4", "3/4", "4/4", "epoch 1", "finished"]


def test_random_layers_go_on_with_the_same_numbers_after_a_resume(tmp_path):
    def build(width: int, batch_norm: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(784, width), nn.Dropout(0.5), nn.Linear(width, 10))

    register_task("with-dropout", Task(build, label_cross_entropy, "mnist-5k", (784,), 8, correct=label_correct))
    config = {**SMALL, "limit": 100, "task": "with-dropout", "optimizer": "adam"}
    whole = train(TrainConfig(**{**config, "epochs": 4}))
    train(TrainConfig(**{**config, "epochs": 2}), tmp_path)
    torch.rand(17)  # somebody else draws
    resumed = train(TrainConfig(**{**config, "epochs": 4}), tmp_path, resume=True)
    assert curve(resumed) == curve(whole)


@pytest.mark.gpu
def test_the_same_seed_starts_and_trains_alike_on_a_gpu():
    cpu, gpu = (train(small(lr=0.1, dataset=patterns.DIGITS, device=device)) for device in ("cpu", "cuda"))
    assert curve(gpu) == pytest.approx(curve(cpu), rel=1e-3)
