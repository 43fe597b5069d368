"""VGG11 and ResNet34 without batch-norm learn 500 images by heart with EKFAC-ra, and one batch with the defaults."""

import statistics

import pytest
import torch

import ekfac
from ekfac.lab.data import padded  # noqa: F401  (registers a dataset)
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.tasks import TASKS
from ekfac.lab.training.run import TrainConfig, train
from ekfac.lab.training.trainer import Trainer
from lab import patterns


def config(task: str, dataset: str = "mnist-5k-padded", **more) -> TrainConfig:
    return TrainConfig(
        task,
        "ekfac-ra",
        dataset=dataset,
        limit=500,
        batch_size=100,
        refresh_every=20,
        **more,
    )


@pytest.mark.parametrize("task", ["vgg11", pytest.param("resnet34", marks=pytest.mark.slow)])
def test_width_8_overfits(task):
    settings = config(task, width=8, device="cpu", damping=1e-2, options={"kl_clip": None}).resolved()
    trainer = Trainer(settings, load_dataset("mnist-5k-padded"))
    # Steps amplify rounding, so which epoch is the first to know them all is another one on another CPU.
    for _ in range(24):
        record = trainer.train_epoch()
        if record["train_loss"] < 0.05 and record["train_accuracy"] > 0.99:
            break
    assert record["train_loss"] < 0.05 and record["train_accuracy"] > 0.99


def test_the_images_made_for_a_gpu_are_learnt_here_too():
    settings = config("vgg11", patterns.IMAGES, width=8, device="cpu", damping=1e-2, options={"kl_clip": None})
    trainer = Trainer(settings.resolved(), load_dataset(patterns.IMAGES))
    assert any(trainer.train_epoch()["train_loss"] < 0.05 for _ in range(12))


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["vgg11", "resnet34"])
def test_full_width_overfits_on_a_gpu(task):
    run = train(config(task, patterns.IMAGES, epochs=30, device="cuda"))
    last = run.history[-1]
    assert last["train_loss"] < 0.05 and last["train_accuracy"] > 0.99


@pytest.mark.parametrize(("task", "width"), [("vgg11", 8), pytest.param("resnet34", 8, marks=pytest.mark.slow)])
def test_the_defaults_learn_one_batch_by_heart(task, width):
    # Its gradients agree for so long that a pace which follows them at once outruns them, and rectifiers die.
    torch.manual_seed(0)
    model = TASKS.get(task).build(width, False)
    x, y = torch.rand(32, 3, 32, 32), torch.randint(10, (32,))
    opt = ekfac.EKFAC(model, sua=True)
    losses = []
    for _ in range(80):
        opt.zero_grad()
        loss = TASKS.get(task).losses(model(x), x, y).mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    # Rounding decides how far below it gets, and when it is thrown out for a few steps. One whose rectifiers have died
    # stays at chance, 2.3, or above.
    assert min(losses) < 1e-2 and statistics.median(losses[-20:]) < 1
